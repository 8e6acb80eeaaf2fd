"""`melld install-service`: write or remove melld's systemd units, without enabling or starting them.

Owns the files' places and the rule that only files written by this command are replaced or removed.  Prints each
action; with `--dry-run` it prints them only.  `melld.daemon.systemd` owns the texts.
"""

import argparse
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from melld.cli import DONE, FAILED
from melld.daemon.systemd import CONFIG, is_ours, own_command, remark_on_key_file, signed, unit_text

UNITS = ("melld.socket", "melld.service")
SYSTEM_DIRECTORY = Path("/etc/systemd/system")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the sub-command to `parser`."""
    parser.description = (
        "Write melld's systemd units, and print the commands that enable and start them.  Files that this command did "
        "not write, or that were edited since, are left alone."
    )
    parser.epilog = "Exit codes: 0 done, 1 a file is in the way or not writable, 2 bad usage."
    parser.add_argument("--user", action="store_true", help="install for the current user instead of system-wide")
    parser.add_argument("--dry-run", action="store_true", help="print the actions without performing them")
    parser.add_argument("--remove", action="store_true", help="remove installed units")
    parser.add_argument(
        "--root", metavar="DIR", type=Path, default=Path("/"), help="install below this directory, for building images"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write or remove the units; return the exit code."""
    directory = unit_directory(arguments.root, os.environ, user=arguments.user)
    act = _Act(dry=arguments.dry_run)
    try:
        if arguments.remove:
            return _remove(directory, act, user=arguments.user)
        return _install(directory, arguments.root, act, user=arguments.user)
    except OSError as error:
        if error.filename is None:  # the output's, which `main` tells of
            raise
        print(f"melld install-service: {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED


def unit_directory(root: Path, environment: Mapping[str, str], *, user: bool) -> Path:
    """Return the directory of the units, below `root`.  A relative `XDG_CONFIG_HOME` counts as none, as for systemd."""
    directory = SYSTEM_DIRECTORY
    if user:
        configured = Path(environment.get("XDG_CONFIG_HOME", ""))
        home = Path(environment.get("HOME") or "~").expanduser().absolute()
        directory = (configured if configured.is_absolute() else home / ".config") / "systemd" / "user"
    return root / directory.relative_to("/")


class _Act:
    """Changes to files, each printed; in a dry run, only printed."""

    def __init__(self, *, dry: bool) -> None:
        self._dry = dry

    def _say(self, text: str) -> None:
        print(f"would {text}" if self._dry else text)

    def make_directory(self, directory: Path) -> None:
        if not directory.is_dir():
            self._say(f"make   {directory}")
            if not self._dry:
                directory.mkdir(parents=True)

    def write(self, path: Path, text: str) -> None:
        """Write the file atomically, so that a service manager never reads half a unit."""
        self._say(f"write  {path}")
        if not self._dry:
            beside = path.with_name(f".{path.name}.new")
            try:
                beside.write_text(text)
                beside.chmod(0o644)
                beside.replace(path)
            except OSError as error:  # of a full disk it names no file
                raise OSError(error.errno, error.strerror, str(path)) from error

    def remove(self, path: Path) -> None:
        self._say(f"remove {path}")
        if not self._dry:
            path.unlink()


def _install(directory: Path, root: Path, act: _Act, *, user: bool) -> int:
    source = files("melld").joinpath("systemd", *(["user"] if user else []))
    wanted = {directory / name: signed(unit_text(source.joinpath(name).read_text(), own_command())) for name in UNITS}
    found = _found(directory)
    if foreign := _foreign(found):
        _tell_of(foreign, "no unit was written")
        return FAILED
    act.make_directory(directory)
    for path, text in wanted.items():
        if found.get(path) == text:
            print(f"keep   {path}: it is up to date")
        else:
            act.write(path, text)
    if not user:
        _tell_of_keys(root)
    manager = "systemctl --user" if user else "systemctl"
    config = "~/.config/melld/melld.toml" if user else CONFIG
    print(f"\nNow write {config}, then:\n  {manager} daemon-reload\n  {manager} enable --now {' '.join(UNITS)}")
    return DONE


def _remove(directory: Path, act: _Act, *, user: bool) -> int:
    """Remove files we wrote; report and keep those edited since."""
    found = _found(directory)
    foreign = _foreign(found)
    for path in found:
        if path not in foreign:
            act.remove(path)
    _tell_of(foreign, "it stays")
    if not found:
        print(f"No melld units found in {directory}.")
        return DONE
    manager = "systemctl --user" if user else "systemctl"
    stop = f"  {manager} stop {' '.join(UNITS)}\n  {manager} disable {' '.join(UNITS)}"
    print(f"\nTo stop and disable what is still active:\n{stop}\n  {manager} daemon-reload")
    return FAILED if foreign else DONE


def _found(directory: Path) -> dict[Path, str]:
    """Return the units that are there; bytes that are not text differ from all that we write."""
    return {path: path.read_text(errors="replace") for name in UNITS if (path := directory / name).exists()}


def _foreign(found: Mapping[Path, str]) -> list[Path]:
    """Return the files that this command did not write, or that were edited since."""
    return [path for path, text in found.items() if not is_ours(text)]


def _tell_of(foreign: Iterable[Path], what: str) -> None:
    for path in foreign:
        print(
            f"melld install-service: {path} was not written by this command or was edited since: {what}. "
            "Move it away, or keep your changes with `systemctl edit`.",
            file=sys.stderr,
        )


def _tell_of_keys(root: Path) -> None:
    """Warn if the service could not read its configured key file."""
    try:
        server = tomllib.loads((root / CONFIG.lstrip("/")).read_text()).get("server", {})
    except (OSError, ValueError):  # missing or invalid: `melld check-config` says which
        return
    named = server.get("api_key_file") if isinstance(server, dict) else None
    if isinstance(named, str) and (remark := remark_on_key_file(named, root)) is not None:
        print(f"melld install-service: warning: {remark}", file=sys.stderr)
