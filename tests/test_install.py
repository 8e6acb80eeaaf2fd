"""The set-up finds packages where a user has configured pip, or uv, to look."""

import pytest

from locks.install import flags_for_uv, options_of, places_for_pip, places_for_uv

MIRROR, MORE = "https://mirror.example/simple", "https://user:p=w@more.example/simple"


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("", {"UV_DEFAULT_INDEX": "https://pypi.org/simple"}),
        (f"global.index-url='{MIRROR}'\n:env:.timeout='60'", {"UV_DEFAULT_INDEX": MIRROR}),
        (f"global.index-url='https://old'\n:env:.index-url='{MIRROR}'", {"UV_DEFAULT_INDEX": MIRROR}),
        (
            f"global.index-url='{MIRROR}'\ninstall.extra-index-url='\\n{MORE}\\nfile:///a'",
            {"UV_DEFAULT_INDEX": MIRROR, "UV_INDEX": f"{MIRROR} {MORE} file:///a"},
        ),
        (
            ":env:.find-links='/wheels /more'",
            {"UV_DEFAULT_INDEX": "https://pypi.org/simple", "UV_FIND_LINKS": "/wheels,/more"},
        ),
    ],
    ids=["nothing", "a file", "a variable overrides a file", "more indexes", "folders"],
)
def test_uv_looks_where_pip_does(listed: str, told: dict[str, str]) -> None:
    """Behind a company's mirror nothing needs to be said twice."""
    assert places_for_uv({}, options_of(listed)) == told


@pytest.mark.parametrize(
    "name", ["UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"]
)
def test_uv_s_own_settings_take_precedence(name: str) -> None:
    """Whoever uses uv elsewhere has set it up."""
    assert places_for_uv({name: "/wheels"}, {"index-url": MIRROR}) == {}


def test_uv_trusts_whom_pip_trusts() -> None:
    """Both have options for a private certificate and for no index at all."""
    options = options_of("global.cert='/ca.pem'\nglobal.trusted-host='a b'\n:env:.no-index='1'")
    assert flags_for_uv(options) == ["--trusted-host", "a", "--trusted-host", "b", "--cert", "/ca.pem", "--no-index"]
    assert flags_for_uv({"no-index": "0"}) == []


def test_pip_looks_where_uv_does() -> None:
    """It fetches uv from there, and installs the rest where uv is unavailable."""
    variables = {"UV_DEFAULT_INDEX": f"ours={MIRROR}", "UV_INDEX": MORE, "UV_FIND_LINKS": "/a,/b", "UV_OFFLINE": "1"}
    assert places_for_pip(variables) == {
        "PIP_NO_INDEX": "1",
        "PIP_INDEX_URL": MIRROR,
        "PIP_EXTRA_INDEX_URL": MORE,
        "PIP_FIND_LINKS": "/a /b",
    }
    assert places_for_pip({}) == {}
