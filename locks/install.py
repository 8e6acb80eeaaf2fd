"""Install packages into the environment of the Python that runs this: with uv, or with pip where uv cannot be had.

    python locks/install.py ARGUMENT ...    # what `pip install` and `uv pip install` both understand

Tells uv where pip is configured to look, and pip where uv's variables say: a user has set up one of the two.  Needs
only Python's own library.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
UV = Path(sys.executable).with_name("uv")
UV_LOCK = Path(__file__).with_name("uv.txt")
PYPI = "https://pypi.org/simple"
UV_PLACES = {
    "UV_DEFAULT_INDEX": "--index-url",
    "UV_INDEX_URL": "--index-url",
    "UV_INDEX": "--extra-index-url",
    "UV_EXTRA_INDEX_URL": "--extra-index-url",
    "UV_FIND_LINKS": "--find-links",
}
"""uv's variables that say where packages are, and pip's options that do."""


def flags_for_uv(variables: Mapping[str, str], listed: str) -> Iterator[str]:
    """Yield the flags that tell uv what pip is configured with, as `pip config list` prints it.

    Where uv's own variables name places, those alone count.
    """
    options: dict[str, str] = {}
    pairs = [line.split("=", 1) for line in listed.splitlines() if "=" in line]
    for section in ("global.", "install.", ":env:."):  # a later one overrides an earlier one
        found = {key.removeprefix(section): value for key, value in pairs if key.startswith(section)}
        options |= {name: str(ast.literal_eval(value)) for name, value in found.items()}
    yield from _repeated("--trusted-host", options.get("trusted-host", ""))
    yield from _repeated("--cert", options.get("cert", ""))
    if any(name in variables for name in UV_PLACES):
        return
    if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        yield "--no-index"
    else:
        index, more = options.get("index-url", PYPI), options.get("extra-index-url", "")
        # Of equal versions uv takes those of the first index, though another may have the better wheel.
        yield from _repeated("--index", f"{index} {more}" if more else "")
        yield from _repeated("--default-index", index)
    yield from _repeated("--find-links", options.get("find-links", ""))


def _repeated(flag: str, values: str) -> Iterator[str]:
    return (word for value in values.split() for word in (flag, value))


def flags_for_pip(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the flags that tell pip of the places that uv's variables name."""
    if variables.get("UV_OFFLINE"):
        yield "--no-index"
    for name, flag in UV_PLACES.items():
        for place in variables.get(name, "").replace(",", " ").split():
            yield from (flag, place.split("=", 1)[-1] if name in ("UV_INDEX", "UV_DEFAULT_INDEX") else place)


def install(arguments: list[str]) -> int:
    """Install with uv, which pip fetches once; return the exit code of whoever came last."""
    pip = [*PIP, "install", "-q", *flags_for_pip(os.environ)]
    if not UV.exists():
        fetch = [*pip, "--only-binary", ":all:", "--no-deps", "--require-hashes", "-r", str(UV_LOCK)]
        subprocess.run(fetch, stderr=subprocess.DEVNULL, check=False)
    if UV.exists():
        listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
        # A file that several indexes have is taken from any, as pip does: the locks' hashes say which it is.
        uv = [str(UV), "pip", "install", "-q", "--python", sys.executable, "--index-strategy", "unsafe-best-match"]
        done = subprocess.run([*uv, *flags_for_uv(os.environ, listed), *arguments], check=False)
        if done.returncode == 0:
            return 0
        print("melld: uv could not; trying with pip, which takes longer", file=sys.stderr)
    else:
        print("melld: uv cannot be had here; installing with pip, which takes longer", file=sys.stderr)
    return subprocess.run([*pip, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
