"""The configuration file: what is wrong in it is told, with its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.config import Config, parse_bytes, parse_config
from melld.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no model: name one with `--model DIR`"),
        ("[model]\n", "no model: name one with `--model DIR`"),
        ("x =", "not TOML"),
        ('[model]\npath="m"\n[server]\nprt=1', "[server] unknown key `prt`"),
        ('[model]\npath="m"\n[server]\nport=70000', "[server.port]"),
        ('[model]\npath="m"\n[server]\nport="8000"', "[server.port] Expected `int`, got `str`"),
        ('[model]\npath="m"\n[serve]\n', "unknown key `serve`"),
        ('[model]\npath="m"\n[devices]\ncuda=[0]\ncpu={count=1}', "both cuda and cpu"),
        ('[model]\npath="m"\n[devices]\ncuda=[]', "cuda is empty"),
        ('[model]\npath="m"\n[devices]\ncpu={count=0}', "[devices.cpu.count]"),
        ('[model]\npath="m"\n[devices]\ncpu={kv_bytes="lots"}', "'lots' is not a size"),
        ('[model]\npath="m"\n[migration]\nlink_bytes_per_s="fast"', "'fast' is not a size"),
        ('[model]\npath="m"\n[migration]\nmax_moves_per_link=0', "[migration.max_moves_per_link]"),
        ('[model]\npath="m"\n[server]\napi_keys=["secret"]', "[server.api_keys] holds something other than sha256:"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, told: str) -> None:
    """A daemon that starts with half of its configuration is worse than one that does not start."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "melld.toml")
    assert told in str(caught.value)


def test_a_plain_key_in_the_configuration_is_not_repeated_in_the_error() -> None:
    """Errors end up in logs: a key must not."""
    with pytest.raises(ConfigError) as caught:
        parse_config('[model]\npath="m"\n[server]\napi_keys=["sk-secret"]', "melld.toml")
    assert "sk-secret" not in str(caught.value)


def test_flags_go_before_the_file() -> None:
    """What is typed now counts more than what was written down once."""
    config = parse_config('[model]\npath="m"\n[server]\nport=1', "melld.toml", {"server.port": 2})
    assert config.server.port == 2


def test_the_default_listens_on_loopback_alone() -> None:
    """A newcomer's first start opens nothing to the network."""
    config: Config = parse_config('[model]\npath="m"', "melld.toml")
    assert config.server.host == "127.0.0.1"


@given(st.integers(1, 2**20), st.sampled_from([("B", None), ("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_sizes_mean_what_they_say(count: int, unit: tuple[str, int | None]) -> None:
    """128MiB is 128 times 2 to the 20."""
    name, power = unit
    text = str(count) if power is None else f"{count}{name}"
    assert parse_bytes(text, "test") == count << (power or 0)
