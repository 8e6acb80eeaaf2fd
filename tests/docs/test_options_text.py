"""docs/api.md says how melld treats each option of `vllm serve`."""

from tests.docs.options_text import PAGE, options_text


def test_the_list_matches_the_code() -> None:
    """`python -m tests.docs.options_text` writes it; `test_arguments` checks that none is missing."""
    assert PAGE.read_text().endswith(options_text())
