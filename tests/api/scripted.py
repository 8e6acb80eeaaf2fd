"""The scripted app, and how tests talk to it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from tests.api.http_client import request
from tests.forked import ForkedPython


class App:
    """The scripted app."""

    def __init__(self, model: Path) -> None:
        self.process = ForkedPython(
            [sys.executable, "-m", "tests.api.scripted_app", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | COMMON_ENVIRONMENT | CPU_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"},
        )
        self.url = self._line()

    def tell(self, word: str) -> tuple[int, int]:
        """Return how many events were written from moulds since the last call, and how many requests run."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        written, running = map(int, self._line().split())
        return written, running

    def stream(self, path: str, body: dict[str, Any]) -> str:
        """Return everything that a stream says."""
        answered = request(self.url, "POST", path, body | {"stream": True})
        assert answered.status == 200, answered.body
        return answered.body.decode()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()
