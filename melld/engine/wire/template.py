"""Daemon <-> template process: what is said, one message a packet.

Owns the messages.  `SpawnWorker` travels with two descriptors: the worker's end of its wire, and the pipe for what it
prints.
"""

from typing import Literal

import msgspec

from melld.engine.wire import messages as wire

MAX_MESSAGE_BYTES = 1 << 17
Program = Literal["main", "judge"]


class SpawnWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a worker.  `number` names it in the answers; no two have the same."""

    number: int
    spec: wire.WorkerSpec
    program: Program = "main"
    """What the child becomes: the module `melld.engine.worker.<program>` whose `main` it runs."""


class WorkerForked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is there.  Until `WorkerExited` its process id is nobody else's."""

    number: int
    pid: int


class WorkerExited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is gone.  `exit_code` is negative for a signal."""

    number: int
    exit_code: int


FromTemplate = WorkerForked | WorkerExited
