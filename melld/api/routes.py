"""The routes of the API, and the methods that each takes.

Pure.
"""

import re

from melld.api.answers import Refusal
from melld.api.calls import CALLS
from melld.api.pages import PAGES
from melld.api.stored_responses import ASKED

_MODELS, _RESPONSES = "/v1/models/", "/v1/responses/"


def route_of(path: str) -> tuple[str, str]:
    """Return the route of a path, and the name or the id in it.

    Raises:
        Refusal: 404, there is none.
    """
    route, rest = path.rstrip("/") or "/", ""
    if route.startswith(_MODELS):
        route, rest = "/v1/models", route.removeprefix(_MODELS)
    elif route.startswith(_RESPONSES):
        rest, slash, verb = route.removeprefix(_RESPONSES).partition("/")
        route = f"{_RESPONSES}{{response_id}}{slash}{verb}"
    if not any(route in table for table in (CALLS, PAGES, ASKED)):
        raise Refusal(404, f"no such path{_hint(path)}", code="unknown_path")
    return route, rest


def _hint(path: str) -> str:
    """Name the intended path for a client whose base URL lacks or repeats a `/v1` or a slash."""
    plain = re.sub("/+", "/", path).rstrip("/")
    near = (plain, f"/v1{plain}", plain.removeprefix("/v1"))
    meant = next((one for one in near if one in CALLS or one in PAGES), None)
    return "; /openapi.json lists the paths" if meant is None else f"; did you mean {meant}? (check the base URL)"


def check_method(route: str, method: str) -> None:
    """Refuse a method that the route does not take.

    Raises:
        Refusal: 405.
    """
    allowed = tuple(ASKED.get(route, ("POST",) if route in CALLS else ("GET", "HEAD")))
    if method not in allowed:
        message = f"{route} takes {' or '.join(allowed)}"
        raise Refusal(405, message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})
