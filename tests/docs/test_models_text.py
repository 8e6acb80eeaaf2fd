"""docs/models.md says how melld serves each model that vLLM knows."""

from tests.docs.architectures import architectures
from tests.docs.models_text import PAGE, models_text


def test_the_page_matches_the_code() -> None:
    """`python -m tests.docs.models_text` rewrites it after a vLLM upgrade or a change of what moves."""
    assert PAGE.read_text() == models_text()


def test_every_name_in_vllm_s_registry_is_listed() -> None:
    """Whoever brings a model finds its row."""
    from vllm.model_executor.models.registry import ModelRegistry

    assert {one.name for one in architectures()} == set(ModelRegistry.get_supported_archs())
