"""docs/configuration.md is generated from the code, and up to date."""

import msgspec

from melld.config import Config
from tests.docs.configuration_text import ROOT, configuration_text, descriptions, keys, reloadable, tables


def test_every_key_is_explained() -> None:
    """A key without a word of explanation helps nobody."""
    silent = [
        f"{name}.{field.name}"
        for name, kind in tables("", Config)
        for field in keys(kind)
        if field.name not in descriptions(kind)
    ]
    assert silent == []


def test_the_page_matches_the_code() -> None:
    """A new key or default cannot be missing.  `python -m tests.docs.configuration_text` writes the page."""
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_text()


def test_a_keyword_does_not_hide_the_other_values() -> None:
    """Whoever wants two devices of each machine must not read that only `all` is allowed."""
    assert '- `devices_per_machine = "all"` (`"all"` or integer): ' in configuration_text()


def test_keys_marked_as_reloadable_exist() -> None:
    """The page must not promise to reload a renamed key."""
    known = {f"{name}.{field.name}" for name, kind in tables("", Config) for field in keys(kind)}
    assert reloadable() <= known
    assert len(known) > len(msgspec.structs.fields(Config))
