"""The page at `/`: one HTML file, which shows what `/status` answers and has a chat to try.

Owns its files, which become one, and the headers that restrict it: only its own script and style run in it, and it
calls only this daemon.  The page holds nothing about the daemon, so it is served without a key; its calls need one.
"""

import base64
import functools
import hashlib
import re
from importlib.resources import files

# Answers that name requests must not be cached.
NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@functools.cache
def overview_html() -> bytes:
    """Return the page with its script and style inlined."""
    folder = files("melld.api")
    page = folder.joinpath("overview.html").read_bytes()
    return re.sub(rb"/\* (chat\.\w+) \*/\n", lambda name: folder.joinpath(name[1].decode()).read_bytes(), page)


@functools.cache
def overview_headers() -> dict[str, str]:
    """Return the page's headers: the policy names the page's one script and one style by their digests."""
    policy = (
        "default-src 'none'",
        f"script-src {_source('script')}",
        f"style-src {_source('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    kind = {"Content-Type": "text/html; charset=utf-8", "Referrer-Policy": "no-referrer"}
    return NO_STORE | kind | {"Content-Security-Policy": "; ".join(policy)}


def _source(element: str) -> str:
    """Return the digest of the element's text, as a browser computes it."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (element.encode(), element.encode()), overview_html(), re.DOTALL)
    assert len(found) == 1, f"the page has one {element}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"
