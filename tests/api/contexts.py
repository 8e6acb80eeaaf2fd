"""The daemon as the API sees it, without a daemon: ready, open, no keys."""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from melld.api import app
from melld.api.keys import Keys
from melld.api.stored_responses import StoredResponses
from melld.config_server import ServerConfig


def context_of(models: Sequence[Any]) -> Any:
    """Return the `ApiContext` of these models."""
    return app.ApiContext(
        models=models,
        config=ServerConfig,
        keys=Keys,
        why_not_ready=lambda: None,
        why_closed=lambda: None,
        status=lambda: None,
        stored=StoredResponses(ServerConfig, Keys().owners),
        registry=CollectorRegistry(),
    )
