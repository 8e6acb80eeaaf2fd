"""The wheel and the source distribution hold what melld needs, and melld runs from them."""

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
INGREDIENTS = """
melld systemd docs locks tests pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CONTRIBUTING.md Makefile
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes, from a copy of the tree, so that nothing is left in it."""
    copy = tmp_path_factory.mktemp("packaging") / "melld"
    copy.mkdir()
    for name in INGREDIENTS.split():
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, copy)
    _run(sys.executable, "-c", BUILD, cwd=copy)
    return copy / "dist"


def _run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment or None, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _wheel_names(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_makefile_builds_as_this_test_does() -> None:
    """What is tested is what is released."""
    assert BUILD.replace("b.", "build.").replace("as b", "as build") in (ROOT / "Makefile").read_text()


FAILING = """#!/bin/sh
[ "$1" = -c ] && exit
mkdir -p .venv/bin && ln -sf /bin/true .venv/bin/python
[ -e installed ] && ln -s /bin/true .venv/bin/pip
"""


def test_an_incomplete_environment_is_recreated(tmp_path: Path) -> None:
    """Debian's Python fails half-way until python3-venv is installed: then the same command works."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "locks").mkdir()
    files = (
        "pyproject.toml",
        "locks/cpu.txt",
        "locks/torch-cpu.txt",
        "locks/torch-cuda.txt",
        "locks/vision.txt",
        "python",
    )
    for name in files:
        (tmp_path / name).write_text(FAILING)
    (tmp_path / "python").chmod(0o755)
    words = ("make", "setup", "BUILD=cpu", "PYTHON=./python", "VENV=.venv")
    failed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode == 2, failed.stdout
    (tmp_path / "installed").touch()
    assert "PyTorch's CPU build" in _run(*words, cwd=tmp_path)


def test_the_wheel_holds_every_file_of_the_package(built: Path) -> None:
    """A missing data file would be noticed at a user's first start, not here."""
    files = [path for path in (ROOT / "melld").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in files} <= _wheel_names(built)
    units = [path for path in (ROOT / "systemd").rglob("*") if path.is_file()]
    assert {f"melld/{path.relative_to(ROOT)}" for path in units} <= _wheel_names(built)


def test_the_wheel_holds_nothing_else(built: Path) -> None:
    """Tests and benchmarks stay out of a user's site-packages."""
    assert {name.split("/")[0].split("-")[0] for name in _wheel_names(built)} == {"melld"}


def test_the_wheel_s_metadata_is_complete(built: Path) -> None:
    """Name, licence, Python, the two builds of vLLM, and the command."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert (metadata["Name"], metadata["License-Expression"]) == ("melld", "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"cpu", "cuda"} <= set(metadata.get_all("Provides-Extra", []))
    assert entry_points.split() == ["[console_scripts]", "melld", "=", "melld.cli:main"]


def test_the_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    """Whoever builds from source gets what everybody gets."""
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for needed in ("LICENSE", "Makefile", "locks/cpu.txt", "tests/conftest.py", "docs/architecture.md"):
        assert (unpacked / needed).is_file()
    _run(sys.executable, "-c", BUILD.replace("b.build_sdist('dist'); ", ""), cwd=unpacked)
    assert _wheel_names(unpacked / "dist") == _wheel_names(built)


def test_melld_runs_from_the_wheel(built: Path, tmp_path: Path) -> None:
    """The command, the units and a demo model come from what was installed, far from any checkout."""
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "installed"
    pip = (
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(place),
    )
    _run(sys.executable, *pip, str(wheel), cwd=tmp_path)

    def melld(*words: str) -> str:
        path = {"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        return _run(sys.executable, "-m", "melld", *words, cwd=tmp_path, **path)

    where = _run(sys.executable, "-c", "import melld; print(melld.__file__)", cwd=tmp_path, PYTHONPATH=str(place))
    assert Path(where.strip()).is_relative_to(place)
    assert "check-config" in melld("--help")
    melld("demo-model", "demo")
    assert melld("check-config", "--quick", "--model", "demo").startswith("ok\n")
    melld("install-service", "--root", "machine")
    assert (tmp_path / "machine/etc/systemd/system/melld.service").is_file()
