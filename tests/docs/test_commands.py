"""Every command in the documents does what it is shown for: it is run, or at least parsed."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from melld.cli import COMMANDS, SYNONYMS
from melld.config_text import parse_config
from tests.docs.commands import ROOT, Block, blocks, commands
from tests.serve.daemon_process import DaemonProcess

RUN = [block for block in blocks() if block.runs]
PARSED = [block for block in blocks() if not block.runs]
# Programs of other people that the documents use where nothing can be run: a misspelt one is not among them.
OTHERS = {
    "aider",
    "cd",
    "claude",
    "cp",
    "curl",
    "export",
    "git",
    "grep",
    "journalctl",
    "kill",
    "mkdir",
    "openssl",
    "pip",
    "python3",
    "qwen",
    "ray",
    "systemctl",
    "systemd-analyze",
    "umask",
}
ADDRESS = "http://127.0.0.1:8000"
PROGRAM = """#!{python} -S
import sys
sys.path.insert(0, {root!r})
from tests.forked import nursery
from tests.forked import ForkedPython
sys.exit(ForkedPython([sys.executable, "-m", "melld", *sys.argv[1:]]).wait())
"""


@pytest.fixture(scope="module")
def desk(daemon: DaemonProcess, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a reader has it after `make serve`: a demo model, and melld on the path."""
    directory = tmp_path_factory.mktemp("desk")
    (directory / ".demo-model").symlink_to(demo_model)
    program = directory / "bin" / "melld"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    return directory


@pytest.mark.parametrize("block", RUN, ids=[block.name for block in RUN])
def test_a_block_runs_as_written(block: Block, desk: Path, daemon: DaemonProcess) -> None:
    """A reader who pastes it gets no error."""
    if "melld demo-model .demo-model" in block.script:  # a reader makes it once
        block = block._replace(script=block.script.replace("demo-model .demo-model", "demo-model another-model"))
    script = block.script.replace(ADDRESS, daemon.url).replace("curl -s", "curl -fs")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=desk,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "PATH": f"{desk / 'bin'}:{os.environ['PATH']}",
            "RUNTIME_DIRECTORY": str(daemon.runtime_directory),
            "PYTHONPATH": str(ROOT),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", PARSED, ids=[block.name for block in PARSED])
def test_a_block_that_is_not_run_still_parses(block: Block) -> None:
    """No unknown flag, target or file."""
    subprocess.run(["bash", "-n", "-c", block.script.replace("<", "").replace(">", "")], check=True)
    for words in commands(block.script):
        _understand(words)


def _understand(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # for the command that follows
        words = words[1:]
    program = words[0].rpartition("/")[2]
    if program == "melld":
        _parse(words[1:])
    elif program == "make":
        _make(words)
    elif program == "python" and words[1] != "-m":
        assert (ROOT / words[1]).is_file(), words
    else:
        assert program in OTHERS | {"python"}, words


def _parse(words: list[str]) -> None:
    """Parse as `melld.cli.main` does, and no further."""
    if words == ["--help"]:
        return
    module = importlib.import_module(COMMANDS[SYNONYMS.get(words[0], words[0])].module)
    parser = argparse.ArgumentParser(prog=f"melld {words[0]}", exit_on_error=False)
    module.add_arguments(parser)
    if "--help" not in words:
        parser.parse_args(words[1:])


def _make(words: list[str]) -> None:
    """Check that the targets exist: `make -n` prints its plan and does nothing."""
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/several-models.md", "docs/coming-from.md"])
def test_a_shown_configuration_is_valid(page: str) -> None:
    """A reader who copies the TOML has nothing to fix."""
    shown = re.findall(r"^```toml\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert shown
    for text in shown:
        parse_config(text, page)


def test_the_readme_is_short() -> None:
    """Three minutes of reading, from what it is to how to run it."""
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_readme_begins_with_what_works() -> None:
    """A stranger's first two commands are the ones that CI runs."""
    first = next(block for block in blocks() if block.page == "README.md")
    assert [words[:2] for words in commands(first.script)] == [["make", "serve"], ["make", "test"]]


def test_every_link_in_the_documents_resolves() -> None:
    """A page or section that moves must not break links to it."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target, section in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" not in target:
                found = page.parent / target if target else page
                assert found.exists(), f"{page.name}: {target}"
                assert not section or section in sections(found), f"{page.name}: {target}#{section}"


def test_every_file_that_a_page_names_exists() -> None:
    """A reader finds it from the root, or from the packages that docs/architecture.md describes."""
    bases = (ROOT, ROOT / "melld", ROOT / "melld" / "engine")
    for page in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`(\w[\w/.-]*/[\w.-]+\.(?:json|md|py|txt|toml))`", page.read_text()):
            assert any((base / name).is_file() for base in bases), f"{page.name}: {name}"


def sections(page: Path) -> set[str]:
    """Return a page's heading anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
