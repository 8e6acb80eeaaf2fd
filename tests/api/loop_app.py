"""The API over serving classes that refuse everything, and a watch over its loop.  A program: `python -m`.

Prints its URL; then, for each line that it reads, the longest time between two ticks of the loop since the last one.
The time is the process's own on the processor, so that a busy machine does not count: what holds the loop up is either
the loop's own work or another thread that holds the interpreter's lock, and both take it.
"""

import asyncio
import socket
import sys
import time
from argparse import Namespace
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.datastructures import State
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from melld.api.app import ApiContext, start_api
from melld.api.calls import CALLS
from melld.api.keys import Keys
from melld.config import ServerConfig

TICK_S = 0.001


class Refuses:
    """Stands where vLLM's serving classes do."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def __call__(self, *_: Any) -> ErrorResponse:
        return ErrorResponse(error=ErrorInfo(message="not here", type="BadRequestError", code=418))


class Watch:
    """Ticks, and keeps the longest time between two ticks."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._last_s = time.process_time()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.process_time()
            self._worst_s, self._last_s = max(self._worst_s, now_s - self._last_s), now_s

    def read(self) -> float:
        """The longest since the last time; what has held the loop up to now counts too."""
        now_s = time.process_time()
        worst_s = max(self._worst_s, now_s - self._last_s)
        self._worst_s, self._last_s = 0.0, now_s
        return worst_s


def serving() -> State:
    state = State()
    state.args = Namespace()
    for name in {call.serving for call in CALLS.values()}:
        setattr(state, name, Refuses())
    return state


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    context = ApiContext(
        state=serving(),
        config=ServerConfig,
        keys=Keys,
        why_not_ready=lambda: None,
        why_closed=lambda: None,
        status=lambda: None,  # type: ignore[arg-type,return-value]
        registry=CollectorRegistry(),
    )
    watch = Watch()
    async with start_api(context, [listener]):
        ticking = asyncio.create_task(watch.run())
        say(f"http://127.0.0.1:{listener.getsockname()[1]}")
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            say(str(watch.read()))
        ticking.cancel()


if __name__ == "__main__":
    asyncio.run(main())
