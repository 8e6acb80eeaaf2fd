"""Which route a path leads to, and what the error for a wrong path says."""

import pytest

from melld.api.answers import Refusal
from melld.api.routes import route_of


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize/", "/tokenize"),
    ],
)
def test_a_wrong_base_url_is_answered_with_the_right_path(path: str, meant: str) -> None:
    """OpenAI's clients want `/v1` in their base URL and Anthropic's do not, a common first mistake."""
    with pytest.raises(Refusal, match=f"did you mean {meant}"):
        route_of(path)


@pytest.mark.parametrize("path", ["/v1/files", "/api/tags", "/v1", "/v1/"])
def test_an_unknown_path_is_answered_with_the_known_ones(path: str) -> None:
    """No guess is better than a wrong one."""
    with pytest.raises(Refusal, match=r"no such path; /openapi\.json lists the paths"):
        route_of(path)
