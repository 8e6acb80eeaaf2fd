"""Whoever made the control socket may be no daemon: its answers are shown, and cannot control the terminal."""

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from melld.control.messages import CONTROL_SOCKET
from tests.cli.here import melld_here
from tests.cli.plausible import STATUS

NASTY = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
IN_JSON = NASTY.replace("\x1b", "\\u001b").replace("\x07", "\\u0007")
WHOLE_STATUS = msgspec.json.encode(msgspec.structs.replace(STATUS, model=NASTY, warnings=(NASTY,)))


def answer(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Impostor:
    """Answer every connection with these bytes."""

    def __init__(self, directory: Path) -> None:
        self.says = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / CONTROL_SOCKET))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if not connection.recv(65536):
                    return
                connection.sendall(self.says)

    def stop(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(path)
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="melld-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def impostor(directory: Path) -> Iterator[Impostor]:
    made = Impostor(directory)
    yield made
    made.stop(str(directory / CONTROL_SOCKET))


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (answer("200 OK", WHOLE_STATUS), ["status"]),
        (answer("200 OK", WHOLE_STATUS), ["status", "--json"]),
        (answer("200 OK", f'{{"{IN_JSON}": "{IN_JSON}"}}'.encode()), ["status", "--json"]),
        (answer("400 Bad", f'{{"code": "{IN_JSON}", "message": "{IN_JSON}"}}'.encode()), ["drain", "w0"]),
        (answer("200 OK", f'{{"worker": "{IN_JSON}", "outcome": "drained"}}'.encode()), ["drain", "w0", "--json"]),
        (answer("400 Bad", f'{{"code": "{IN_JSON}", "message": "{IN_JSON}"}}'.encode()), ["run", "--", "true"]),
        (answer("200 OK", f'{{"step": "refused", "reason": "{IN_JSON}"}}\n'.encode()), ["run", "--", "true"]),
        (b"HTTP/1.0 200 OK\r\n\r\n" + NASTY.encode(), ["run", "--", "true"]),
        (f"{NASTY} is no HTTP\r\n\r\n".encode(), ["status"]),
        (answer("200 OK", NASTY.encode()), ["status", "--json"]),
    ],
)
def test_a_socket_s_answers_cannot_control_the_terminal(
    impostor: Impostor, directory: Path, says: bytes, words: list[str]
) -> None:
    """An operator who asks the wrong socket sees odd text, and keeps the terminal."""
    impostor.says = says
    done = melld_here(words[0], "--runtime-directory", str(directory), *words[1:])
    shown = done.stdout + done.stderr
    assert shown.strip()
    assert "Traceback" not in shown
    assert [character for character in shown if not character.isprintable() and character != "\n"] == []
