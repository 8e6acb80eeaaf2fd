"""The operator's roles reach the scheduler, and unknown workers are refused."""

import pytest

from melld.config_text import parse_config
from melld.daemon.preflight import check_roles, scheduler_settings
from melld.errors import ConfigError
from melld.scheduler.roles import RoleSettings


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("", RoleSettings()),
        ('roles = "auto"', RoleSettings(auto=True)),
        ('fixed_roles = {w0 = "prefill"}', RoleSettings(fixed={"w0": "prefill"})),  # type: ignore[dict-item]
    ],
)
def test_the_configured_roles_reach_the_scheduler(table: str, expected: RoleSettings) -> None:
    config = parse_config(f'[model]\npath = "m"\n[scheduler]\n{table}', "test", {})
    assert scheduler_settings(config).cluster.roles == expected


def test_a_role_of_an_unknown_worker_is_refused() -> None:
    config = parse_config('[model]\npath = "m"\n[scheduler]\nfixed_roles = {w7 = "prefill"}', "test", {})
    check_roles(config, ["w0", "w7"])
    with pytest.raises(ConfigError, match="'w7' is not one of the workers w0, w1"):
        check_roles(config, ["w0", "w1"])
