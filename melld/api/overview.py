"""The page at `/`: one HTML file of the package, which asks `/status` for what it shows.

Owns the file and the headers that bind it: nothing but its own script and style runs in it, and it talks to this daemon
alone.  The page itself tells nothing of the daemon, so it is served without a key; what it shows needs one.
"""

import base64
import functools
import hashlib
import re
from importlib.resources import files

CONTENT_TYPE = "text/html; charset=utf-8"
# An answer that names requests is nobody else's to keep.
NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@functools.cache
def overview_html() -> bytes:
    """The page, as it lies in the package."""
    return files("melld.api").joinpath("overview.html").read_bytes()


@functools.cache
def overview_headers() -> dict[str, str]:
    """The page's headers: the policy names the page's one script and one style by their digests."""
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
    return NO_STORE | {"Content-Security-Policy": "; ".join(policy), "Referrer-Policy": "no-referrer"}


def _source(element: str) -> str:
    """The digest of the element's text, as a browser computes it."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (element.encode(), element.encode()), overview_html(), re.DOTALL)
    assert len(found) == 1, f"the page has one {element}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"
