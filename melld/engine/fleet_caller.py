"""Who a request is from, on its way through vLLM's serving classes.

Owns one context variable.  vLLM's classes carry no such field from the HTTP request to the engine client, and the tasks
that they start inherit the context of the call.  It is set for one call and put back, so that the next call on the same
connection (and so in the same task) begins without it.  A client is a short name for an API key, never the key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CALLER: ContextVar[str] = ContextVar("melld_caller", default="")


@contextmanager
def called_by(client: str) -> Iterator[None]:
    """What is admitted in this context, and in tasks begun in it, is this client's."""
    token = _CALLER.set(client)
    try:
        yield
    finally:
        _CALLER.reset(token)


def caller() -> str:
    """Whose request is being admitted; empty where nobody asks for keys."""
    return _CALLER.get()
