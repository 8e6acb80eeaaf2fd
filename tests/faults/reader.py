"""A client that records everything it receives, in order, for a checker to judge."""

import contextlib
import http.client
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S


class Reader(threading.Thread):
    """One streamed completion of one choice.  `text` is what came; `ends` all that said that it is over."""

    def __init__(self, url: str, body: dict[str, Any], key: str | None = None) -> None:
        super().__init__(daemon=True)
        self.body = body
        self.id = ""
        self.text = ""
        self.ends: list[str] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.asked_s = time.monotonic()
        self.head_s = self.first_s = self.last_s = self.ended_s = 0.0
        self.comments = 0
        self.left = False
        self.longest_gap_s = 0.0
        self._came = threading.Condition()
        self._chunks = 0
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self.left:
                self.ends.append(f"connection: {type(error).__name__}")
        finally:
            self._connection.close()
            self.ended_s = time.monotonic()
            with self._came:
                self._came.notify_all()

    def _read(self) -> None:
        path = "/v1/completions" if "prompt" in self.body else "/v1/chat/completions"
        body = {"model": "demo", "stream": True, **self.body}
        self._connection.request("POST", path, json.dumps(body), self._headers)
        response = self._connection.getresponse()
        self.head_s = time.monotonic()
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        if response.status != 200:
            self.ends.append(f"status {response.status} {json.loads(response.read())['error']['code']}")
            return
        for line in response:
            if line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))
            elif line.startswith(b": keep-alive"):
                self.comments += 1
            elif line.startswith(b"data: [DONE]"):
                return
        self.ends.append("silent close")

    def _take(self, chunk: dict[str, Any]) -> None:
        with self._came:
            now_s = time.monotonic()
            if self._chunks:
                self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
            self.last_s = now_s
            self._chunks += 1
            self.id = chunk.get("id", self.id)
            if "error" in chunk:
                self.ends.append(f"error {chunk['error']['code']}")
            else:
                self.first_s = self.first_s or now_s
            for piece in chunk.get("choices", ()):
                self.text += piece.get("text") or (piece.get("delta") or {}).get("content") or ""
                if piece.get("finish_reason"):
                    self.ends.append(str(piece["finish_reason"]))
            self._came.notify_all()

    def wait_chunks(self, count: int) -> None:
        """Wait until so many have come, or it has ended."""
        with self._came:
            came = self._came.wait_for(lambda: self._chunks >= count or not self.is_alive(), PATIENCE_S)
        assert came, f"the stream stands still after {self._chunks} chunks"

    def leave(self) -> None:
        """Close the connection now, as a killed client does."""
        self.left = True
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(2)

    def wait_end(self) -> "Reader":
        """Wait until it is over."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"the stream hangs after {self._chunks} chunks"
        return self
