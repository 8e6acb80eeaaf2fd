"""Which pages of other origins may call the API: CORS, per the Fetch standard.

Pure.  Owns the headers that a browser asks for.  A page that is not allowed gets none of them.
"""

from collections.abc import Mapping

from melld.config_server import ServerConfig

ANY = "*"
METHODS = ("DELETE", "GET", "HEAD", "POST")
"""What `*` stands for: the methods that routes take."""
EXPOSED = "x-request-id, request-id, retry-after"
"""Headers of answers that a page may read."""
PREFLIGHT_S = 600
"""How long a browser may remember the answer to a preflight."""


def is_allowed(headers: Mapping[str, str], config: ServerConfig) -> bool:
    """Return True if the page that sends these headers is of an allowed origin."""
    return ANY in config.allowed_origins or headers.get("Origin") in config.allowed_origins


def answer_head(headers: Mapping[str, str], config: ServerConfig) -> dict[str, str]:
    """Return the headers that let the sender of `headers`, if it is allowed, read an answer."""
    if not config.allowed_origins:
        return {}
    is_any = ANY in config.allowed_origins
    head = {} if is_any else {"Vary": "Origin"}  # else a cache would give one page the answer to another
    if is_allowed(headers, config):
        origin = ANY if is_any else headers["Origin"]
        head |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
        head |= {"Access-Control-Allow-Credentials": "true"} if config.allow_credentials else {}
    return head


def preflight_head(method: str, headers: Mapping[str, str], config: ServerConfig) -> dict[str, str] | None:
    """Return the headers of a CORS preflight response; None for any other request."""
    asks = method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers
    if not asks or not is_allowed(headers, config):
        return None
    methods = METHODS if ANY in config.allowed_methods else config.allowed_methods
    allowed = ", ".join(("Content-Type", *config.allowed_headers))  # without that one no call could send JSON
    if ANY in config.allowed_headers:  # to browsers it would not stand for Authorization
        asked = headers.get("Access-Control-Request-Headers", "")
        allowed = asked if asked.isascii() and asked.isprintable() else ""
    return {
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Allow-Headers": allowed,
        "Access-Control-Max-Age": str(PREFLIGHT_S),
    }
