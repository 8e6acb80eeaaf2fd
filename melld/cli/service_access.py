"""Whether the installed service could read a file: it runs as a user that exists only while it runs (DynamicUser).

Owns the judgement by modes alone: what such a user may read, everybody may, or a group that the unit names.
"""

import stat
from pathlib import Path

ROOT_GROUP = 0


def remark_on_key_file(named: str, root: Path = Path("/")) -> str | None:
    """Return what is to be said of `[server] api_key_file`; None where the service can read it, or it is not there."""
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
        "for its owner alone): leave the key out, and the unit hands over /etc/melld/api-keys; "
        "or give the file a group (docs/install.md)"
    )


def _is_open(path: Path) -> bool:
    about = path.stat()
    others, group = (stat.S_IXOTH, stat.S_IXGRP) if stat.S_ISDIR(about.st_mode) else (stat.S_IROTH, stat.S_IRGRP)
    return bool(about.st_mode & others or (about.st_mode & group and about.st_gid != ROOT_GROUP))
