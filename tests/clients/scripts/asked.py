"""What every script is asked, and how it tells: `python SCRIPT.py URL PROMPT STOP_AFTER`, with 0 for never."""

import sys
from collections.abc import Iterable

URL, PROMPT, STOP_AFTER = sys.argv[1], sys.argv[2], int(sys.argv[3])
MODEL, KEY = "demo", "none"
ABOUT = "Tell the weather of a city."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def get_weather(city: str, degrees: int) -> str:
    """Tell the weather of a city."""
    print(f"get_weather({city}, {degrees})")
    return "sunny"


def tell(texts: Iterable[str | None]) -> bool:
    """Print a stream's texts; return True if it is to be left, after which the caller closes it and waits."""
    for count, text in enumerate(filter(None, texts), 1):
        print(text, end="", flush=True)
        if count == STOP_AFTER:
            return True
    return False


def wait() -> None:
    """Stay until the harness has seen that the request has ended."""
    print("\nleft", flush=True)
    sys.stdin.read()
