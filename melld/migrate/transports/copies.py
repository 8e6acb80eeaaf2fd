"""The thread that runs one link's copies while the engine keeps decoding.

Owns the thread and the order of its jobs: one at a time (so this is also the link's concurrency limit), first come
first served, except that urgent jobs, for which a frozen request waits, go first.  Every submitted job ends in exactly
one `CopyDone`, cancelled and failed ones included.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import msgspec

from melld.migrate.transports.transport import LinkBroken, PullCancelled, Pulled, Puller, TransportFailed


class CopyDone(msgspec.Struct, frozen=True):
    """Result of a job: `pulled`, or why not.  Nothing writes to the job's destination blocks after it."""

    job: str
    pulled: Pulled | None = None
    failure: str | None = None
    cancelled: bool = False
    is_link_broken: bool = False
    """All later copies over the link would fail, too."""


class _Job(msgspec.Struct):
    name: str
    source: Sequence[int]
    destination: Sequence[int]
    urgent: bool
    bytes_per_s: float
    cancelled: bool = False


class Copies:
    """Queue and thread of one link's copies."""

    def __init__(self, puller: Puller, done: Callable[[CopyDone], None], name: str) -> None:
        """Start the thread.  It calls `done`, which should only pass the result on."""
        self._puller = puller
        self._done = done
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._pending: dict[str, _Job] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"copies {name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        job: str,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        *,
        urgent: bool = False,
        bytes_per_s: float = 0.0,
    ) -> None:
        """Queue a copy of these blocks under the unused name `job`.

        After `close` the job ends as cancelled at once: a link may close while a user still submits to it.

        An urgent job (a client waits for it) runs between two pieces of another job and ignores the rate limit.
        `bytes_per_s`: this job's limit, within the link's; 0: the link's alone.
        """
        pending = _Job(job, source_blocks, destination_blocks, urgent, bytes_per_s)
        with self._lock:
            assert job not in self._pending, f"{job} is being copied"
            if not self._closed:
                self._pending[job] = pending
                if urgent:
                    self._urgent.put(pending)
                self._jobs.put(pending)
                return
        self._done(CopyDone(job, cancelled=True))

    def cancel(self, job: str) -> None:
        """Cancel the job before its next piece; its blocks are free only after its `CopyDone`."""
        with self._lock:
            if pending := self._pending.get(job):
                pending.cancelled = True

    def close(self) -> None:
        """Cancel all jobs, wait for the piece under way, and close the link."""
        with self._lock:
            for pending in self._pending.values():
                pending.cancelled = True
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
        self._puller.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run_urgent()
            if not job.urgent:  # urgent jobs are done by now
                self._finish(job)

    def _run_urgent(self) -> None:
        while not self._urgent.empty():
            self._finish(self._urgent.get())

    def _finish(self, job: _Job) -> None:
        done = self._copy(job)
        with self._lock:
            del self._pending[job.name]
        self._done(done)

    def _copy(self, job: _Job) -> CopyDone:
        def is_cancelled() -> bool:
            if not job.urgent:
                self._run_urgent()
            return job.cancelled

        try:
            pulled = self._puller.pull(
                job.source, job.destination, is_cancelled, paced=not job.urgent, bytes_per_s=job.bytes_per_s
            )
            return CopyDone(job.name, pulled)
        except PullCancelled:
            return CopyDone(job.name, cancelled=True)
        except TransportFailed as error:
            return CopyDone(job.name, failure=str(error), is_link_broken=isinstance(error, LinkBroken))
        except Exception as error:  # noqa: BLE001  a move waits for the job's end: report it, whatever the cause
            return CopyDone(job.name, failure=f"{type(error).__name__}: {error}", is_link_broken=True)
