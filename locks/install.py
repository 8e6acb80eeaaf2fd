"""Install packages into the environment of the Python that runs this: with uv, or with pip where uv cannot be had.

    python locks/install.py ARGUMENT ...    # what `pip install` and `uv pip install` both understand

Tells uv where pip is configured to look, and pip where uv's variables say: a user has set up one of the two.  Needs
only Python's own library.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
UV = Path(sys.executable).with_name("uv")
UV_LOCK = Path(__file__).with_name("uv.txt")
PYPI = "https://pypi.org/simple"
PIP_NAMES = {
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_INDEX_URL": "PIP_INDEX_URL",
    "UV_INDEX": "PIP_EXTRA_INDEX_URL",
    "UV_EXTRA_INDEX_URL": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
}
"""uv's variables that say where packages are, and pip's."""


def options_of(listed: str) -> dict[str, str]:
    """Return the options that count for `pip install`, of what `pip config list` prints."""
    options: dict[str, str] = {}
    pairs = [line.split("=", 1) for line in listed.splitlines() if "=" in line]
    for section in ("global.", "install.", ":env:."):  # a later one overrides an earlier one
        found = {key.removeprefix(section): value for key, value in pairs if key.startswith(section)}
        options |= {name: str(ast.literal_eval(value)) for name, value in found.items()}
    return options


def places_for_uv(variables: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell uv where pip looks; none where uv's own say it.

    Variables and not flags, which other users of the machine could read: an index may have a password.
    """
    if any(name in variables for name in PIP_NAMES):
        return {}
    index, more = options.get("index-url", PYPI), options.get("extra-index-url", "")
    told = {"UV_DEFAULT_INDEX": index, "UV_FIND_LINKS": ",".join(options.get("find-links", "").split())}
    if more:  # of equal versions uv takes those of the first index, though another may have the better wheel
        told["UV_INDEX"] = " ".join([index, *more.split()])
    return {name: value for name, value in told.items() if value}


def flags_for_uv(options: Mapping[str, str]) -> list[str]:
    """Return the flags for what else pip is told about places."""
    flags = [word for host in options.get("trusted-host", "").split() for word in ("--trusted-host", host)]
    flags += ["--cert", options["cert"]] if "cert" in options else []
    return flags + ["--no-index"] * (options.get("no-index", "").lower() in ("1", "true", "yes", "on"))


def places_for_pip(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell pip of the places that uv's variables name."""
    told = {"PIP_NO_INDEX": "1"} if variables.get("UV_OFFLINE") else {}
    for name, of_pip in PIP_NAMES.items():
        if places := variables.get(name, "").replace(",", " ").split():
            told[of_pip] = " ".join(re.sub(r"^[\w.-]+=", "", place) for place in places)  # an index may have a name
    return told


def install(arguments: list[str]) -> int:
    """Install with uv, which pip fetches once; return the exit code of whoever came last."""
    for_pip = os.environ | places_for_pip(os.environ)
    if not UV.exists():
        fetch = [*PIP, "install", "-q", "--only-binary", ":all:", "--no-deps", "--require-hashes", "-r", str(UV_LOCK)]
        subprocess.run(fetch, env=for_pip, stderr=subprocess.DEVNULL, check=False)
    if UV.exists():
        listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
        options = options_of(listed)
        # A file that several indexes have is taken from any, as pip does: the locks' hashes say which it is.
        uv = [str(UV), "pip", "install", "-q", "--python", sys.executable, "--index-strategy", "unsafe-best-match"]
        for_uv = os.environ | places_for_uv(os.environ, options)
        if subprocess.run([*uv, *flags_for_uv(options), *arguments], env=for_uv, check=False).returncode == 0:
            return 0
        print("melld: uv could not; trying with pip, which takes longer", file=sys.stderr)
    else:
        print("melld: uv cannot be had here; installing with pip, which takes longer", file=sys.stderr)
    return subprocess.run([*PIP, "install", "-q", *arguments], env=for_pip, check=False).returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
