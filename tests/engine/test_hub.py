"""A model given by name: a missing one is reported in seconds and one line, not after minutes of retries."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

UNREACHABLE = "http://127.0.0.1:9"
LOOK = "import sys; from melld.engine.hub import check_hub; print(check_hub(sys.argv[1]))"
LOOK += "; import huggingface_hub; print(huggingface_hub.constants.HF_HUB_OFFLINE)"


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that knows one model."""

    def do_GET(self) -> None:
        known = self.path == "/api/models/us/ours"
        self.send_response(200 if known else 404)
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"id": "us/ours", "modelId": "us/ours"}' if known else b"{}")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(command: list[str], endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: each reads the hub's address once."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def serve(model: str, endpoint: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `melld serve`, which must end by itself."""
    flags = ["--model", model, "--port", "0", "--device", "cpu:1", "--runtime-directory", str(directory / "run")]
    return run(["-m", "melld", "serve", *flags], endpoint, directory)


@pytest.mark.parametrize(
    ("model", "why"), [("us/nobodys", "rejects it (404 Not Found"), ("no name", "no such directory: no name")]
)
def test_a_model_that_the_hub_lacks_ends_the_start(hub: str, tmp_path: Path, model: str, why: str) -> None:
    """Before any worker starts."""
    ended = serve(model, hub, tmp_path)
    assert ended.returncode != 0
    [line] = ended.stderr.splitlines()
    assert why in line


def test_an_unreachable_hub_ends_the_start_of_an_uncached_model(tmp_path: Path) -> None:
    """It names what cannot be reached."""
    ended = serve("us/ours", UNREACHABLE, tmp_path)
    assert ended.returncode != 0
    [line] = ended.stderr.splitlines()
    assert f"{UNREACHABLE} cannot be reached" in line


@pytest.mark.parametrize("reachable", [False, True])
def test_a_downloaded_model_loads_without_the_hub(hub: str, tmp_path: Path, reachable: bool) -> None:
    """A workstation without a network, or with an expired token, serves what it has and contacts nobody."""
    snapshot = tmp_path / "hub" / "models--us--mine"
    (snapshot / "refs").mkdir(parents=True)
    (snapshot / "refs" / "main").write_text("abc")
    (snapshot / "snapshots" / "abc").mkdir(parents=True)
    (snapshot / "snapshots" / "abc" / "config.json").write_text("{}")
    said = run(["-c", LOOK, "us/mine"], hub if reachable else UNREACHABLE, tmp_path).stdout.splitlines()
    assert "using the downloaded copy" in said[0]
    assert said[1] == "True"


def test_a_model_on_the_hub_is_left_to_vllm(hub: str, tmp_path: Path) -> None:
    """Nothing is logged, and the hub stays in use."""
    assert run(["-c", LOOK, "us/ours"], hub, tmp_path).stdout.splitlines() == ["[]", "False"]
