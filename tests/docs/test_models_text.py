"""docs/models.md says what becomes of each model that vLLM knows."""

from tests.docs.architectures import architectures
from tests.docs.models_text import PAGE, models_text


def test_the_page_is_the_one_that_the_code_writes() -> None:
    """`python -m tests.docs.models_text` writes it anew, after a new vLLM or a change of what moves."""
    assert PAGE.read_text() == models_text()


def test_every_name_of_vllms_registry_is_there() -> None:
    """Who comes with a model finds its row."""
    from vllm.model_executor.models.registry import ModelRegistry

    assert {one.name for one in architectures()} == set(ModelRegistry.get_supported_archs())
