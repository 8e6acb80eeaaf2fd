"""Generated units: right for each manager, and recognised later."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.daemon.systemd import CONFIG, PROGRAM, is_ours, own_command, signed, unit_text

UNITS = Path(__file__).parents[2] / "systemd"
SERVICE = (UNITS / "melld.service").read_text()
USER_SERVICE = (UNITS / "user" / "melld.service").read_text()
PRIVILEGED = frozenset(
    [
        "AmbientCapabilities",
        "CacheDirectory",
        "CapabilityBoundingSet",
        "DeviceAllow",
        "DevicePolicy",
        "DynamicUser",
        "Environment",
        "LimitMEMLOCK",
        "LoadCredential",
        "PrivateTmp",
        "ProtectControlGroups",
        "ProtectHome",
        "ProtectHostname",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "ProtectProc",
        "ProtectSystem",
        "RemoveIPC",
        "RestrictNamespaces",
        "SetCredential",
    ]
)
"""Keys that a user's own service manager cannot apply: they need namespaces, other users or cgroups."""


def keys_of(unit: str) -> dict[str, str]:
    """Return the values of a unit's keys."""
    pairs = (line.partition("=") for line in unit.splitlines() if not line.startswith("#"))
    return {key: value for key, equals, value in pairs if equals}


def test_the_system_unit_differs_only_in_the_program() -> None:
    """What was reviewed and hardened in systemd/ is what runs."""
    assert PROGRAM in SERVICE
    assert unit_text(SERVICE, PROGRAM) == SERVICE
    assert "ExecStart=/usr/local/lib/melld/bin/melld serve --config" in unit_text(
        SERVICE, "/usr/local/lib/melld/bin/melld"
    )


@pytest.mark.parametrize("name", ["melld.service", "melld.socket"])
def test_the_user_unit_is_the_system_s_without_privileges(name: str) -> None:
    """A user manager refuses a unit that wants another user or a namespace; all else holds for both."""
    theirs, its = keys_of((UNITS / name).read_text()), keys_of((UNITS / "user" / name).read_text())
    assert its.keys() == theirs.keys() - PRIVILEGED
    differs = {key for key, value in its.items() if value != theirs[key]}
    assert differs == ({"ExecStart", "After", "WantedBy"} if name == "melld.service" else set())


def test_the_user_service_starts_at_log_in_with_the_user_s_settings() -> None:
    """Its manager can wait for no unit of the system's, and removes the runtime directory at each stop."""
    text = unit_text(USER_SERVICE, "/home/me/bin/melld")
    assert f"/home/me/bin/melld serve --config %E/{CONFIG.removeprefix('/etc/')}\n" in text
    for line in ("WantedBy=default.target", "After=melld.socket", "StateDirectory=melld"):
        assert f"\n{line}\n" in text


@pytest.mark.parametrize("manager", ["--system", "--user"])
def test_systemd_accepts_generated_units(tmp_path: Path, manager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ignored line would weaken the unit, and an unquoted "My Projects" would run no program."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    place = tmp_path / "my 50% place"
    place.mkdir()
    shutil.copy("/bin/true", place / "melld")
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    source = UNITS / "user" if manager == "--user" else UNITS
    for name in ("melld.service", "melld.socket"):
        (tmp_path / name).write_text(signed(unit_text((source / name).read_text(), own_command())))
    done = subprocess.run(
        ["systemd-analyze", manager, "--man=no", "verify", tmp_path / "melld.service", tmp_path / "melld.socket"],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "melld" in line]
    assert (done.returncode, ours) == (0, [])


@given(st.text(), st.text(min_size=1, max_size=1))
def test_a_signed_text_is_recognised_until_it_is_edited(text: str, more: str) -> None:
    """A file that an administrator has touched is the administrator's."""
    assert is_ours(signed(text))
    assert not is_ours(signed(text) + more)
    assert not is_ours(text)
