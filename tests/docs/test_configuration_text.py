"""docs/configuration.md is written from the code, and is up to date."""

import msgspec

from melld.config import Config
from tests.docs.configuration_text import ROOT, configuration_text, descriptions, keys, reloadable, tables


def test_every_key_says_what_it_means() -> None:
    """A key without a word of explanation helps nobody."""
    silent = [
        f"{name}.{field.name}"
        for name, kind in tables("", Config)
        for field in keys(kind)
        if field.name not in descriptions(kind)
    ]
    assert silent == []


def test_the_page_is_the_one_that_the_code_writes() -> None:
    """A new key or default cannot be missing.  `python -m tests.docs.configuration_text` writes the page."""
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_text()


def test_a_word_does_not_hide_the_other_values() -> None:
    """Who wants two devices of each machine must not read that `all` alone is allowed."""
    assert '- `devices_per_machine = "all"` (`"all"` or integer): ' in configuration_text()


def test_what_is_marked_as_reloadable_exists() -> None:
    """A renamed key is not promised to be taken over."""
    known = {f"{name}.{field.name}" for name, kind in tables("", Config) for field in keys(kind)}
    assert reloadable() <= known
    assert len(known) > len(msgspec.structs.fields(Config))
