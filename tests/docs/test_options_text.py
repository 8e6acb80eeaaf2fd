"""docs/api.md says what becomes of each option of `vllm serve`."""

from tests.docs.options_text import PAGE, options_text


def test_the_list_is_the_one_that_the_code_writes() -> None:
    """`python -m tests.docs.options_text` writes it anew; `test_arguments` holds that none is missing."""
    assert PAGE.read_text().endswith(options_text())
