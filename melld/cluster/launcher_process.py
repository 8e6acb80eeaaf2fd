"""The launcher as the daemon sees it: a child process, and the socket pair with it.

Owns that process.  `melld.cluster.head` begins it, so that Ray is never imported here.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from melld.cluster.envelopes import FromLauncher, LauncherFailed
from melld.cluster.link import Link
from melld.config import ClusterConfig
from melld.engine.host.fate import Fate, end_in_words
from melld.engine.host.lines import OutputLines

log = logging.getLogger("melld.cluster")
BEGIN = "import sys; sys.path[:] = {path!r}; from melld.cluster.head import main; main({words})"


async def run_launcher(
    config: ClusterConfig, run: str, kind: str, began: Callable[[Link], None], told: Callable[[Any], None]
) -> str:
    """Run a launcher to its end, or end it when cancelled.  Calls `began(link)`, and `told` with its messages.

    Returns how it ended, or "" if it said why itself.

    Raises:
        OSError: there is no process for it.
    """
    ended = asyncio.Event()
    is_told = False

    def received(message: Any, _payload: list[bytes]) -> None:
        nonlocal is_told
        is_told = isinstance(message, LauncherFailed)
        told(message)

    link = Link(FromLauncher, None, received, lambda _: ended.set())
    fate = Fate()
    lines = OutputLines(lambda line: log.debug("launcher: %s", line))
    ours, theirs = socket.socketpair()
    words = (theirs.fileno(), os.getpid(), config.address, run, kind, config.allow_open_cluster)
    code = BEGIN.format(path=sys.path, words=", ".join(map(repr, words)))
    with theirs:
        printed = lines.open()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,  # what a terminal, or `timeout`, sends to the daemon's group is the daemon's
            )
        finally:
            os.close(printed)
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        began(link)
        await ended.wait()
    finally:
        link.close()
        if process.returncode is None:  # `process.kill` might take from asyncio how it ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    lines.read_rest()
    lines.close()
    return "" if is_told else end_in_words(process.returncode, fate.killer, lines.last)
