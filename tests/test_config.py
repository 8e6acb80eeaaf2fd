"""The configuration file: errors name the place, what is allowed, and an example."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.config import Config
from melld.config_text import parse_config
from melld.config_values import parse_bytes
from melld.errors import ConfigError

DIGEST = f"sha256:{'0' * 64}"


def client(text: str) -> str:
    """Return a configuration with one client."""
    return f'[model]\npath="m"\n[[server.clients]]\n{text}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no model given: use `--model DIR`"),
        ("[model]\n", "no model given: use `--model DIR`"),
        ("x =", "not TOML"),
        (f"x = {'[' * 5000}", "not TOML"),
        ('[model]\npath="m"\n[server]\nprt=1', "[server] unknown key `prt`; did you mean 'port'?"),
        ('port=1\n[model]\npath="m"', "unknown key `port`; it belongs to [server]"),
        ('[model]\npath="m"\nmax_model_len=1', "vLLM options go in [model.vllm]"),
        ('[model]\npath="m"\n[server]\nqqq=1', "available: host, port, "),
        (f'[model]\npath="m"\n[server]\nmax_headers={1 << 63}', "[server.max_headers] wants a whole number"),
        ('[model]\npath="m"\n[server]\nruntime_directory="\\u0000"', "[server.runtime_directory] wants text"),
        ('[model]\npath="m"\n[devices]\ncpu=134217728', "[devices.cpu.count] wants a whole number from 1 to 1024"),
        ("[model]\npath=/m", "text in quotes"),
        ('[model]\npath="m"\n[server]\nport=70000', "[server.port]"),
        (
            '[model]\npath="m"\n[server]\nport="8000"',
            '[server.port] wants a whole number from 0 to 65535, such as 8000, not "8000"',
        ),
        ('[model]\npath="m"\n[serve]\n', "unknown key `serve`"),
        ('[model]\npath="m"\n[devices]\ncuda=[0]\ncpu={count=1}', "both cuda and cpu"),
        ('[model]\npath="m"\n[devices]\ncuda=[]', "cuda is empty"),
        ('[model]\npath="m"\n[devices]\ncpu={count=0}', "[devices.cpu.count]"),
        ('[model]\npath="m"\n[devices]\ncpu={kv_bytes="lots"}', "'lots' is not a size"),
        ('[model]\npath="m"\n[devices]\nlent_kv_bytes="much"', "'much' is not a size"),
        ('[model]\npath="m"\n[migration]\nlink_bytes_per_s="fast"', "'fast' is not a size"),
        ('[model]\npath="m"\n[cluster]\nkv="nixl"', '[cluster] kv = "nixl" requires kv_interface'),
        ('[model]\npath="m"\n[cluster]\naddress="10.0.0.1"', "[cluster.address] wants auto, or HOST:PORT of"),
        ('[model]\npath="m"\n[cluster]\naddress="10.0.0.1:99999"', ", not '10.0.0.1:99999'"),
        ('[model]\npath="m"\n[migration]\nmax_moves_per_link=0', "[migration.max_moves_per_link]"),
        ('[model]\npath="m"\n[[models]]\npath="n"', "[model] and [[models]]"),
        ('[[models]]\npath="m"\n[[models]]\npath="/x/m"', "are both called 'm': rename one"),
        ('[[models]]\npath="m"\n[[models]]\npath="n"\nname=["a", "m"]', "are both called 'm': rename one"),
        ('[[models]]\npath="m"\nweight=0', "[models.weight] wants a number above 0"),
        ('[[models]]\npath="m"\nkeep_alive_s=-1\n[[models]]\npath="n"', "wants a number from 0, such as 300.0, not -1"),
        ('[[models]]\npath="m"\nmax_model_len=1', "vLLM options go in [model.vllm]"),
        ('[[models]]\nname="m"', "[[models]] is missing `path`"),
        ('[[models]]\npath="m"\npined=true', "[[models]] unknown key `pined`; did you mean 'pinned'?"),
        ('[[model]]\npath="m"', "; for several models use [[models]]"),
        ("models=[]", "no model given"),
        ('models="m"', "[models] wants a list of a table"),
        ('[model]\npath="m"\n[server]\napi_keys=["secret"]', "[server.api_keys] holds something other than sha256:"),
        (client("key='secret'\nname='a'"), "[server.clients.key] holds something other than sha256:"),
        (client("name='a'"), "[server.clients] is missing `key`"),
        (client(f"key='{DIGEST}'\nname='a b'"), "[server.clients.name] must have at most 64 letters"),
        (
            client(f"key='{DIGEST}'\nname='a'\npriority=101"),
            "[server.clients.priority] wants a whole number from -100 to 100",
        ),
        (client(f"key='{DIGEST}'\nname='a'\nmin_priority=1\npriority=0"), "a has min_priority 1"),
        (
            client(f"key='{DIGEST}'\nname='a'\npriority=-1\n[[server.clients]]\nkey='{DIGEST}'\nname='b'"),
            "[server.clients] a and b have the same key",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_place(text: str, told: str) -> None:
    """A daemon that starts with half of its configuration is worse than one that does not start."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "melld.toml")
    assert told in str(caught.value)


def every_key(kind: type[msgspec.Struct] = Config, name: str = "") -> Iterator[str]:
    """Return every key of every table, and every table, by its dotted name."""
    for field in msgspec.structs.fields(kind):
        dotted = f"{name}.{field.name}".lstrip(".")
        if dotted == "models":  # they have the keys of `model`, which does not go together with them
            continue
        yield dotted
        parts = [field.type, *getattr(field.type, "__args__", ())]
        for inner in parts:
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from every_key(inner, dotted)


KINDS: dict[str, Any] = {
    "text": "no such word",
    "no text": "",
    "number": 3,
    "negative": -3,
    "huge": 10**400,
    "fraction": 0.5,
    "nan": float("nan"),
    "truth": True,
    "list": [[]],
    "mixed list": [True, {}],
    "table": {"no_such_key": 1},
    "date": tomllib.loads("date = 1979-05-27")["date"],
}


TOLD_OTHERWISE = ("unknown key", "is not a size such as", "no model", "sha256:<64 hex digits>", "must be a name")


@pytest.mark.parametrize("key", list(every_key()))
def test_every_key_s_error_gives_an_example_that_works(key: str) -> None:
    """A newcomer's first mistake is fixed by reading one line; valid input is accepted."""
    for value in KINDS.values():
        check_what_is_told(key, value)


def check_what_is_told(key: str, value: object) -> None:
    with_model = {} if key in ("model", "model.path") else {"model.path": "m"}
    try:
        config = parse_config("", "melld.toml", {**with_model, key: value})
    except ConfigError as error:
        told = str(error)
        assert "`object" not in told
        assert "Expected" not in told
        assert "\n" not in told
        if any(words in told for words in TOLD_OTHERWISE):
            return
        assert key in told
        found = re.search(r"such as (.*), not ", told)
        assert found is not None, told
        if "<" not in found[1]:
            example = tomllib.loads(f"value = {found[1]}")["value"]
            parse_config("", "melld.toml", {**with_model, told.split("[")[1].split("]")[0]: example})
    else:
        assert isinstance(config, Config)


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ("", ("m",)),
        ('name = "a"', ("a",)),
        ('name = ["a", "b", "a"]', ("a", "b")),
        ('vllm = {served_model_name = "a"}', ("a",)),
        ('vllm = {served-model-name = ["a", "b"]}', ("a", "b")),
    ],
)
def test_a_model_has_one_name_or_several(lines: str, names: tuple[str, ...]) -> None:
    """Clients that cannot be changed ask for the name that they know; vLLM's word for it is understood."""
    assert parse_config(f'[model]\npath="/models/m/"\n{lines}', "melld.toml").model.names == names


@pytest.mark.parametrize(
    "lines",
    ["name = []", 'name = ""', 'name = ["a", ""]', "name = [1]", "vllm = {served_model_name = 1}",
     'vllm = {served_model_name = [""]}', 'name = "a"\nvllm = {served_model_name = "b"}'],
)  # fmt: skip
def test_a_name_that_no_client_could_ask_for_is_refused(lines: str) -> None:
    """A model without a name, or with two lists of names, is a mistake."""
    with pytest.raises(ConfigError, match="name"):
        parse_config(f'[model]\npath="m"\n{lines}', "melld.toml")


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("devices.cpu=1", "devices.cpu={count=1}"),
        ("devices.cuda=0", "devices.cuda=[0]"),
        ('devices.cuda="GPU-5b1e"', 'devices.cuda=["GPU-5b1e"]'),
        ('server.extra_roles="critic"', 'server.extra_roles=["critic"]'),
        ('model="m"', 'model.path="m"'),
    ],
)
def test_unambiguous_shorthand_is_understood(short: str, long: str) -> None:
    """`cpu = 1` is what everybody types first."""
    model = "" if short.startswith("model") else 'model.path="m"\n'
    assert parse_config(model + short, "melld.toml") == parse_config(model + long, "melld.toml")


@pytest.mark.parametrize(
    "text",
    [
        '[model]\npath="m"\n[server]\napi_keys=["sk-secret"]',
        '[model]\npath="m"\n[server]\nclients=["sk-secret"]',
        '[model]\npath="m"\n[server]\nclients=[{key=["sk-secret"], name="a"}]',
        client("key='sk-secret'\nname='a'"),
    ],
)
def test_a_plain_key_in_the_configuration_is_not_repeated_in_the_error(text: str) -> None:
    """Errors end up in logs: a key must not."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "melld.toml")
    assert "sk-secret" not in str(caught.value)


def test_each_of_several_models_is_served_as_it_would_be_alone() -> None:
    """The devices are not divided among them in advance."""
    text = """
        models = ["/m/chat", {path = "/m/coder", name = ["coder", "gpt-4o"], weight = 3, keep_alive_s = 90}]
        devices = {cpu = {count = 4, kv_bytes = "64MiB"}}
    """
    config = parse_config(text, "melld.toml")
    chat, coder = [config.alone(model) for model in config.served]
    assert [chat.model.names, coder.model.names] == [("chat",), ("coder", "gpt-4o")]
    assert chat.devices == coder.devices == config.devices
    assert chat.idle == coder.idle == config.idle


def test_one_model_is_served_as_configured() -> None:
    """Whoever serves one model notices nothing of several."""
    config = parse_config('[model]\npath="m"\n[devices]\ncpu=3', "melld.toml")
    assert config.alone(config.model) == config
    config = parse_config('[model]\npath="m"\nkeep_alive_s=90', "melld.toml")
    idle = config.alone(config.model).idle
    assert (idle.sleep_after_s, idle.stop_after_s) == (90, 0)


def test_flags_override_the_file() -> None:
    """What is typed now counts more than what was written down once."""
    config = parse_config('[model]\npath="m"\n[server]\nport=1', "melld.toml", {"server.port": 2})
    assert config.server.port == 2


@pytest.mark.parametrize(
    ("short", "key", "value", "long"),
    [
        ("devices.cpu=1", "devices.cpu.kv_bytes", "64MiB", 'devices.cpu={count=1, kv_bytes="64MiB"}'),
        ("devices.cpu=1", "devices.cpu.count", 4, "devices.cpu=4"),
        ('cluster="auto"', "cluster.port", 9, 'cluster={address="auto", port=9}'),
    ],
)
def test_a_flag_changes_part_of_a_shorthand_in_the_file(short: str, key: str, value: object, long: str) -> None:
    """`--device cpu:4` goes with `cpu = 1` in the file, as with the table that this is short for."""
    model = 'model="m"\n'
    given = parse_config(model + short, "melld.toml", {key: value, "model.name": "a"})
    assert given == parse_config(f'model={{path="m", name="a"}}\n{long}', "melld.toml")


def test_the_default_listens_only_on_loopback() -> None:
    """A newcomer's first start opens nothing to the network."""
    config: Config = parse_config('[model]\npath="m"', "melld.toml")
    assert config.server.host == "127.0.0.1"


@given(st.integers(1, 2**20), st.sampled_from([("B", None), ("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_sizes_mean_what_they_say(count: int, unit: tuple[str, int | None]) -> None:
    """128MiB is 128 times 2 to the 20."""
    name, power = unit
    text = str(count) if power is None else f"{count}{name}"
    assert parse_bytes(text, "test") == count << (power or 0)


@pytest.mark.parametrize(("text", "value"), [("1.5GB", 1_500_000_000), ("12e9", 12 * 10**9), ("2e3kib", 2000 << 10)])
def test_sizes_accept_decimal_units_fractions_and_exponents(text: str, value: int) -> None:
    """Nobody has to count zeros."""
    assert parse_bytes(text, "test") == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "0.4", "nan", "inf", "1e300GiB", "x"])
def test_invalid_sizes_are_refused(text: str) -> None:
    """Zero, more than any machine has, or no number at all."""
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text, "test")
