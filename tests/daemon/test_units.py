"""Generated units: right for each manager, and recognised later."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.daemon.systemd import CONFIG, PROGRAM, is_ours, own_command, signed, system_unit, user_unit

UNITS = Path(__file__).parents[2] / "systemd"
SERVICE = (UNITS / "melld.service").read_text()
SOCKET = (UNITS / "melld.socket").read_text()


def test_the_system_unit_differs_only_in_the_program() -> None:
    """What was reviewed and hardened in systemd/ is what runs."""
    assert PROGRAM in SERVICE
    assert system_unit(SERVICE, PROGRAM) == SERVICE
    assert "ExecStart=/usr/local/lib/melld/bin/melld serve --config" in system_unit(
        SERVICE, "/usr/local/lib/melld/bin/melld"
    )


def test_the_user_unit_needs_no_privileges() -> None:
    """A user manager refuses a unit that wants another user or a namespace."""
    text = user_unit(SERVICE, "/home/me/bin/melld")
    for needs_privileges in ("DynamicUser", "DevicePolicy", "ProtectSystem", "LoadCredential", "CapabilityBoundingSet"):
        assert needs_privileges in SERVICE
        assert needs_privileges not in text
    assert f"/home/me/bin/melld serve --config %E/{CONFIG.removeprefix('/etc/')}" in text
    assert "WantedBy=default.target" in text
    for kept in ("Type=notify", "WatchdogSec=30s", "NoNewPrivileges=yes", "RuntimeDirectoryMode=0700"):
        assert kept in text


def test_the_user_daemon_keeps_its_measurements() -> None:
    """The manager removes the runtime directory at each stop, so data there would be measured anew."""
    assert "\nStateDirectory=melld\n" in user_unit(SERVICE, PROGRAM)


@pytest.mark.parametrize("manager", ["--system", "--user"])
def test_systemd_accepts_generated_units(tmp_path: Path, manager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ignored line would weaken the unit, and an unquoted "My Projects" would run no program."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    place = tmp_path / "my 50% place"
    place.mkdir()
    shutil.copy("/bin/true", place / "melld")
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    make = user_unit if manager == "--user" else system_unit
    for name, unit in (("melld.service", SERVICE), ("melld.socket", SOCKET)):
        (tmp_path / name).write_text(signed(make(unit, own_command())))
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
