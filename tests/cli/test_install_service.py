"""`melld install-service` reports what it does, touches only its own files, and can be undone."""

import os
import sys
from pathlib import Path

import pytest

from melld.daemon.systemd import is_ours
from tests.cli.here import melld_here
from tests.forked import run_melld

UNITS = ("melld.service", "melld.socket")


class Machine:
    """A root directory of its own, and the command run on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.system = root / "etc/systemd/system"

    def install(self, *flags: str, code: int = 0, **environment: str) -> str:
        """Run the command; return its output."""
        done = melld_here("install-service", "--root", str(self.root), *flags, env=os.environ | environment)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def everything(self) -> dict[str, str]:
        """Return every file of the machine."""
        return {str(path.relative_to(self.root)): path.read_text() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An empty machine."""
    return Machine(tmp_path)


def test_what_is_installed_can_be_removed(machine: Machine) -> None:
    """Trying melld as a service leaves nothing behind."""
    said = machine.install()
    assert set(machine.everything()) == {f"etc/systemd/system/{name}" for name in UNITS}
    assert all(is_ours(text) for text in machine.everything().values())
    assert all(f"write  {machine.system / name}" in said for name in UNITS)
    said = machine.install("--remove")
    assert machine.everything() == {}
    assert all(f"remove {machine.system / name}" in said for name in UNITS)


def test_the_unit_starts_this_melld(machine: Machine) -> None:
    """Not another one that happens to be on the machine."""
    assert run_melld("install-service", "--root", str(machine.root)).returncode == 0
    service = (machine.system / "melld.service").read_text()
    assert f"ExecStart={Path(sys.executable).parent}/" in service


@pytest.mark.parametrize("flags", [(), ("--user",), ("--remove",)])
def test_a_dry_run_changes_nothing(machine: Machine, flags: tuple[str, ...]) -> None:
    """It can be reviewed before it is run."""
    if "--remove" in flags:
        machine.install()
    before = machine.everything()
    said = machine.install("--dry-run", *flags, XDG_CONFIG_HOME="/home/me/.config")
    assert machine.everything() == before
    assert "would remove" in said if "--remove" in flags else "would write" in said


def test_a_second_run_writes_nothing(machine: Machine) -> None:
    """Set-up scripts may run it again and again."""
    machine.install()
    before = {name: (machine.system / name).stat().st_mtime_ns for name in UNITS}
    said = machine.install()
    assert {name: (machine.system / name).stat().st_mtime_ns for name in UNITS} == before
    assert "write  " not in said


@pytest.mark.parametrize("edited", UNITS)
def test_foreign_files_are_left_alone(machine: Machine, edited: str) -> None:
    """An administrator's own unit, or edits to ours, are never lost; and nothing is half done."""
    machine.install()
    with (machine.system / edited).open("a") as unit:
        unit.write("# mine\n")
    before = machine.everything()
    said = machine.install(code=1)
    assert machine.everything() == before
    assert edited in said


@pytest.mark.parametrize("edited", UNITS)
def test_unedited_units_are_removed_and_edited_ones_named(machine: Machine, edited: str) -> None:
    """As documented: an edited unit stays, and does not block the other's removal."""
    machine.install()
    with (machine.system / edited).open("a") as unit:
        unit.write("# mine\n")
    said = machine.install("--remove", code=1)
    assert set(machine.everything()) == {f"etc/systemd/system/{edited}"}
    assert f"{machine.system / edited} was not written by this command or was edited since: it stays" in said


@pytest.mark.parametrize(
    ("mode", "directory_mode", "group", "is_told"),
    [(0o600, 0o755, 0, True), (0o644, 0o755, 0, False), (0o640, 0o755, 0, True), (0o644, 0o700, 0, True)]
    + ([(0o640, 0o755, 12345, False)] if os.getuid() == 0 else []),
)
def test_a_key_file_that_the_service_cannot_read_is_reported(
    machine: Machine, mode: int, directory_mode: int, group: int, is_told: bool
) -> None:
    """The service has its own user: a key file for root alone would fail its first start."""
    settings = machine.root / "etc/melld"
    settings.mkdir(parents=True)
    settings.parent.chmod(0o755)
    (settings / "melld.toml").write_text('[server]\napi_key_file = "/etc/melld/keys"\n')
    (settings / "keys").write_text("key\n")
    if os.getuid() == 0:
        os.chown(settings / "keys", 0, group)
    (settings / "keys").chmod(mode)
    settings.chmod(directory_mode)
    assert ("cannot be read by the service" in machine.install()) == is_told
    assert "cannot be read by the service" not in machine.install("--user", XDG_CONFIG_HOME="/home/me/.config")


def test_an_older_version_of_our_unit_is_replaced(machine: Machine) -> None:
    """An upgrade brings its units."""
    from melld.daemon.systemd import signed

    machine.system.mkdir(parents=True)
    (machine.system / "melld.service").write_text(signed("[Service]\nExecStart=/old/melld\n"))
    machine.install()
    assert "/old/melld" not in (machine.system / "melld.service").read_text()


def test_user_units_go_to_the_user_s_configuration(machine: Machine) -> None:
    """No privileges are needed, and the system is not touched."""
    machine.install("--user", XDG_CONFIG_HOME="/home/me/.config")
    assert set(machine.everything()) == {f"home/me/.config/systemd/user/{name}" for name in UNITS}
    machine.install("--user", "--remove", XDG_CONFIG_HOME="/home/me/.config")
    assert machine.everything() == {}


@pytest.mark.parametrize("named", ["", "relative/config"])
def test_a_relative_configuration_directory_is_ignored(machine: Machine, named: str) -> None:
    """As by the XDG specification and systemd; the units go where systemd looks for them."""
    machine.install("--user", XDG_CONFIG_HOME=named, HOME="/home/me")
    assert set(machine.everything()) == {f"home/me/.config/systemd/user/{name}" for name in UNITS}


@pytest.mark.parametrize("flags", [(), ("--remove",)])
def test_a_binary_file_counts_as_foreign(machine: Machine, flags: tuple[str, ...]) -> None:
    """It is left alone and reported in one line."""
    machine.system.mkdir(parents=True)
    unit = machine.system / "melld.socket"
    unit.write_bytes(b"\xff\xfe")
    said = machine.install(*flags, code=1)
    assert (unit.read_bytes(), "Traceback" in said, str(unit) in said) == (b"\xff\xfe", False, True)


def test_removing_nothing_says_so(machine: Machine) -> None:
    """Not an error: the result is what was wanted."""
    assert "No melld units found" in machine.install("--remove")


def test_an_unwritable_place_is_reported_in_one_line(machine: Machine) -> None:
    """Without privileges the answer is a sentence, not a traceback."""
    machine.system.parent.mkdir(parents=True)
    machine.system.write_text("a file, where the directory should be")
    said = machine.install(code=1)
    assert "Traceback" not in said
    assert str(machine.system) in said


def test_a_full_disk_is_reported_with_the_file(machine: Machine) -> None:
    """It is the file that could not be written, not the printed output."""
    machine.system.mkdir(parents=True)
    (machine.system / ".melld.service.new").symlink_to("/dev/full")
    assert "melld.service: No space left on device" in machine.install(code=1)
