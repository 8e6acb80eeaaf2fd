"""The ranks of a worker with several devices: one process each, which computes its part of every layer.

Owns their start and their end.  They are forked from the worker, which has imported all they need; the scheduler and
the block tables stay in the worker.  A worker and its ranks end together: the kernel kills the ranks when the worker
ends, and the worker ends as its rank did, at once, so that the daemon resumes its requests on another worker.
"""

import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from melld.engine.worker.forking import has_one_thread
from melld.engine.worker.rank_links import Lines
from melld.engine.worker.start import die_with_parent, vital

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0001, 0.001
WAITED_SHARE = 0.05
"""Of what it has waited already, each pause between two looks for a message."""


def watched(executor: "type[Executor]", own_files: Sequence[int]) -> "type[Executor]":
    """Return a subclass of vLLM's `MultiprocExecutor` whose ranks and worker end together.

    `own_files`: descriptors that ranks must not keep open.
    """

    class Watched(executor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            # A fork copies the calling thread alone.  vLLM's CPU build asks for `spawn`, which imports all anew.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if has_one_thread() else "spawn"
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # ranks find each other on this machine, and nobody else them
            worker_pid = os.getpid()
            if self.device_config.device_type == "cpu":
                _wait_without_spinning()
            if has_one_thread():
                self.lines = lines = Lines(self.parallel_config.world_size)
                os.register_at_fork(after_in_child=lines.own_in_rank, after_in_parent=lines.forked)
                os.register_at_fork(after_in_child=lambda: begin(worker_pid, own_files))
            super()._init_executor()
            self.collective_rpc(_begin, args=(worker_pid,))

        def start_worker_monitor(self, inline: bool = False) -> None:  # noqa: ARG002  vLLM's
            ends = {os.pidfd_open(handle.proc.pid): handle.rank for handle in self.workers}
            threading.Thread(target=vital(lambda: _end_with_first(ends)), name="ranks", daemon=True).start()

    return Watched


def _wait_without_spinning() -> None:
    """Make this process and the ranks forked from it pause between polls for a message.

    vLLM's readers look again and again for a second after each, and its writers until there is room
    (`vllm.distributed.device_communicators.shm_broadcast`): on CPU devices with the cores that the ranks compute with.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    began_s = looked_s = 0.0

    def pause() -> None:
        nonlocal began_s, looked_s
        now_s = time.monotonic()
        if now_s > looked_s + LONGEST_PAUSE_S:  # what it waits for now is something else
            began_s = now_s
        time.sleep(min(max(WAITED_SHARE * (now_s - began_s), SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
        looked_s = time.monotonic()

    shm_broadcast.sched_yield = pause


_begun = False


def begin(worker_pid: int, not_ours: Sequence[int] = ()) -> None:
    """Tie this rank's life to its worker's, but not that of processes the rank forks."""
    global _begun  # noqa: PLW0603  a rank is a process
    if _begun:
        return
    _begun = True
    for file in not_ours:
        os.close(file)
    die_with_parent(worker_pid)


def _begin(_rank: Any, worker_pid: int) -> None:
    begin(worker_pid)


def _end_with_first(ends: dict[int, int]) -> None:
    """Wait for a rank to end, and end this process in the same way.  `ends`: the ranks by pidfd."""
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    end = poll.poll()[0][0]
    how = os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
    assert how is not None
    exited = how.si_code == os.CLD_EXITED
    word = f"with exit code {how.si_status}" if exited else f"by signal {how.si_status}"
    print(f"rank {ends[end]} of this worker exited {word}", file=sys.stderr, flush=True)  # noqa: T201
    if not exited:
        os.kill(os.getpid(), how.si_status)
    os._exit(1)
