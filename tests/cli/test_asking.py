"""What the operator commands send to the daemon."""

from pathlib import Path

import pytest

from melld.cli import BAD_USAGE
from tests.cli.here import melld_here

NOT_TEXT = "\udcff"
"""The byte 0xff of a command line, as Python shows it."""


@pytest.mark.parametrize(
    "words", [("load", NOT_TEXT), ("why", NOT_TEXT), ("migrate", NOT_TEXT, "w0"), ("drain", NOT_TEXT)]
)
def test_an_argument_that_is_not_text_is_bad_usage(words: tuple[str, ...], tmp_path: Path) -> None:
    """A name pasted from a terminal with another encoding gets a one-line error."""
    done = melld_here(*words, "--runtime-directory", str(tmp_path))
    assert done.returncode == BAD_USAGE
    assert done.stderr == f"melld {words[0]}: a name is not valid in this terminal's encoding\n"
