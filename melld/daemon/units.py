"""The texts of the systemd units that `melld install-service` writes, and what a service under them can read.

Pure: takes the units of `systemd/`, returns the text to write.  A written unit starts with a line that names its writer
and the digest of the rest, so that melld never overwrites a foreign or edited file unnoticed.
"""

import hashlib
import re
import stat
from pathlib import Path

WRITER = "# Written by `melld install-service`; local changes belong in `systemctl edit`. sha256:"
_FIRST_LINE = re.compile(re.escape(WRITER) + r"([0-9a-f]{64})\n")
PROGRAM = "/usr/local/bin/melld"
"""The program as the units of `systemd/` name it."""
CONFIG = "/etc/melld/melld.toml"
ROOT_GROUP = 0

# Keys that a user's own service manager can apply without privileges; the others need namespaces, other users or
# cgroups.
_USER_KEYS_TEXT = """
Description Documentation Requires After StartLimitIntervalSec StartLimitBurst Type NotifyAccess ExecStart
ExecReload TimeoutStartSec WatchdogSec Restart RestartSec RestartPreventExitStatus KillMode TimeoutStopSec OOMPolicy
UMask ConfigurationDirectory RuntimeDirectory RuntimeDirectoryMode NoNewPrivileges LimitNOFILE LockPersonality
RestrictRealtime RestrictSUIDSGID RestrictAddressFamilies SystemCallArchitectures SystemCallFilter
SystemCallErrorNumber ListenStream FileDescriptorName Backlog NoDelay WantedBy Also
"""
USER_KEYS = frozenset(_USER_KEYS_TEXT.split())


def system_unit(unit: str, program: str) -> str:
    """Return a unit of `systemd/` for the system's manager, with the program's actual path."""
    return unit.replace(PROGRAM, program)


def user_unit(unit: str, program: str) -> str:
    """Return a unit of `systemd/` for a user's manager: started at log-in, configured in the user's `%E` directory."""
    lines = [line for line in unit.splitlines() if not line.startswith("#") and _is_for_users(line)]
    text = "\n".join(lines) + "\n"
    text = text.replace(PROGRAM, program).replace(CONFIG, "%E/melld/melld.toml")
    # A user's manager cannot wait for the system's units.
    text = re.sub(r"^After=melld\.socket .*$", "After=melld.socket", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text.replace("WantedBy=multi-user.target", "WantedBy=default.target"))


def _is_for_users(line: str) -> bool:
    key, equals, _ = line.partition("=")
    return not equals or key in USER_KEYS


def signed(text: str) -> str:
    """Return the text to write, with the first line that identifies it."""
    return f"{WRITER}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def is_ours(text: str) -> bool:
    """Return True if `text` is an unedited unit that `signed` made, in any version of melld."""
    match = _FIRST_LINE.match(text)
    return match is not None and hashlib.sha256(text[match.end() :].encode()).hexdigest() == match[1]


def remark_on_key_file(named: str, root: Path = Path("/")) -> str | None:
    """Return a warning if the service cannot read `[server] api_key_file`; None if it can, or if there is no file.

    The service runs as a user that exists only while it runs (DynamicUser): by the file's mode, it may read what
    everybody may, or what a group that the unit names may.
    """
    path = root / Path(named).absolute().relative_to("/")
    way = [path, *path.parents][: len(path.relative_to(root).parts)]
    try:
        closed = next((one for one in way if not _is_open(one)), None)
    except OSError:
        return None
    if closed is None:
        return None
    return (
        f"[server] api_key_file: {named} cannot be read by the service, which runs as a user of its own ({closed} is "
        "for its owner only): remove this setting, and the unit hands over /etc/melld/api-keys, "
        "or give the file a group (docs/install.md)"
    )


def _is_open(path: Path) -> bool:
    about = path.stat()
    others, group = (stat.S_IXOTH, stat.S_IXGRP) if stat.S_ISDIR(about.st_mode) else (stat.S_IROTH, stat.S_IRGRP)
    return bool(about.st_mode & others or (about.st_mode & group and about.st_gid != ROOT_GROUP))
