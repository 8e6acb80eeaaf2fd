"""The shell commands in the documents: every fenced block, and the commands in it.

A block that begins with ```sh is run as it stands; ```sh parsed says that it cannot be (it wants root, a network, a
GPU, or minutes), and its commands are looked at one by one.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# Pages whose blocks are marked.  In the others every block is parsed.
MARKED = ("install.md", "configuration.md", "scheduling.md", "operating.md", "api.md", "security.md", "coming-from.md")
BLOCK = re.compile(r"^ *```sh( parsed)?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SEPARATORS = {"&&", "||", "|", ";"}


class Block(NamedTuple):
    """One fenced block."""

    page: str
    number: int
    script: str
    runs: bool

    @property
    def name(self) -> str:
        """Return a name for a test's id."""
        return f"{self.page}-{self.number}"


def blocks() -> list[Block]:
    """Return every shell block of README.md, CONTRIBUTING.md and docs/."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        Block(page.name, number, match[2], runs=page.name in MARKED and match[1] is None)
        for page in pages
        for number, match in enumerate(BLOCK.finditer(page.read_text()), 1)
    ]


def commands(script: str) -> list[list[str]]:
    """Return a block's simple commands as words, without comments, output redirections and `sudo`."""
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in SEPARATORS:
                found.append(words)
                words = []
            else:
                words.append(word)
    return [_plain(words) for words in found if words]


def _plain(words: list[str]) -> list[str]:
    """Drop `sudo` and a subshell's parenthesis."""
    return words[1:] if words[0] == "sudo" else [words[0].lstrip("("), *words[1:]]
