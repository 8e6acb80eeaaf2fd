"""Messages between daemon and template process, one per packet.

Owns the messages.  `SpawnWorker` travels with descriptors: the worker's end of its wire, the pipe for what it prints,
and the chunks of its arena (`ArenaSpec.files`).
"""

from typing import Literal

import msgspec

from melld.engine.wire.spec import WorkerSpec

MAX_MESSAGE_BYTES = 1 << 17
MAX_DESCRIPTORS = 253
"""The kernel's limit for one message."""
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
