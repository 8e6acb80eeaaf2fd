"""Messages between daemon and template process, one per packet.

Owns the messages.  `SpawnWorker` travels with two descriptors: the worker's end of its wire, and the pipe for what it
prints.
"""

from typing import Literal

import msgspec

from melld.engine.wire.spec import WorkerSpec

MAX_MESSAGE_BYTES = 1 << 17
Program = Literal["main", "judge"]


class SpawnWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a worker.  `number` names it in the answers; no two have the same."""

    number: int
    spec: WorkerSpec
    program: Program = "main"
    """The program to run: `main` of the module `melld.engine.worker.<program>`."""


class WorkerForked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker was forked.  Its process id is not reused before `WorkerExited`."""

    number: int
    pid: int


class WorkerExited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker has exited.  `exit_code` is negative for a signal."""

    number: int
    exit_code: int


FromTemplate = WorkerForked | WorkerExited
