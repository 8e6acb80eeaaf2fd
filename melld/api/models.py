"""The models that calls may use, and the choice of one for each call.

A model's names include those of its adapters.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from starlette.datastructures import State
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList

from melld.api.answers import Refusal
from melld.control.status import ModelStatus


class AskedModel(Protocol):
    """A model, as the API sees it."""

    names: tuple[str, ...]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of its adapters."""

    serving: State | None
    """vLLM's serving classes, as `init_app_state` leaves them; None until the model has been loaded once."""

    def called(self) -> AbstractContextManager[None]:
        """Count a call inside the context."""

    async def until_loaded(self) -> None:
        """Load the model if necessary; raise if that fails or takes too long."""

    def check_queue(self, client: str, priority: int) -> None:
        """Raise if the full queue would turn away a request of this client and priority on arrival."""

    def why_closed(self) -> str | None:
        """Return why no call is admitted, not even to wait; None if calls are."""

    def status(self) -> ModelStatus:
        """Return what clients may know of the model."""


def asked_model(models: Sequence[AskedModel], name: Any) -> AskedModel:
    """Return the model called `name`, or the first one if there is no name.

    Raises:
        Refusal: 404, none has that name.
    """
    is_named = isinstance(name, str) and name  # otherwise vLLM says what is wrong
    found = next((one for one in models if name in (*one.names, *one.adapters)), None) if is_named else models[0]
    if found is None:
        known = ", ".join(name for one in models for name in (*one.names, *one.adapters))
        message = f"The model `{name[:200]}` does not exist; available: {known}"
        raise Refusal(404, message, code="model_not_found", param="model")
    return found


async def cards(models: Sequence[AskedModel]) -> list[dict[str, Any]]:
    """Return the `/v1/models` entry of each name: vLLM's card plus the model's state."""
    found: list[dict[str, Any]] = []
    for model in models:
        known = model.status()
        status = {"status": known.state.value, "capabilities": list(known.capabilities)}
        if model.serving is None:
            adapters = [ModelCard(id=name, parent=model.names[0]) for name in model.adapters]
            shown = ModelList(data=[*(ModelCard(id=name) for name in model.names), *adapters])
        else:
            shown = await model.serving.openai_serving_models.show_available_models()
        found += [card.model_dump(mode="json") | status for card in shown.data]
    return found
