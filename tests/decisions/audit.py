"""An auditor of decision logs that shares nothing with melld but the log's description.

    python tests/decisions/audit.py LOG        prints what is wrong, one line each; exit code 1 if anything is

Checks that time does not run backwards, that capacities hold, that exactly one worker owns a request, that sizes
never shrink, that moves end, and that every lifecycle is followed to its end.
"""

import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterable

Record = dict[str, object]


class Auditor:
    """Feed it records in order, then `close`; `faults` lists what was wrong.

    `by_instant`: capacities are judged when time moves on, as in the paper's time slots, rather than after each record.
    """

    def __init__(self, by_instant: bool = False) -> None:
        self.by_instant = by_instant
        self.faults: list[str] = []
        self.records = 0
        self.at = 0.0
        self.capacity: dict[str, int] = {}
        self.built: dict[str, int] = {}  # the most that it ever offered: others may have taken of it since
        self.slots: dict[str, int] = {}
        self.of_a_daemon = False
        self.awake: set[str] = set()
        self.drained: set[str] = set()
        self.size: dict[str, int] = {}
        self.owner: dict[str, str | None] = {}
        self.begun: set[str] = set()  # they are known to hold what they were told to
        self.pushed_out: set[str] = set()
        self.moving: dict[str, str] = {}
        self.held: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
        self.shared: dict[str, int] = defaultdict(int)
        self.touched: set[str] = set()
        self.swollen: set[str] = set()
        self.roles: dict[str, str] = {}
        self.kinds: dict[str, int] = defaultdict(int)
        self.seen: set[str] = set()

    def read(self, lines: Iterable[bytes | str]) -> "Auditor":
        """Read all lines of a log, to its end."""
        for line in lines:
            self.feed(json.loads(line))
        self.close()
        return self

    def feed(self, record: Record) -> None:
        """Process one record."""
        self.records += 1
        at, kind = float(record["at"]), str(record["kind"])  # type: ignore[arg-type]
        self.kinds[kind] += 1
        if at < self.at:
            self.fault(record, f"time runs backwards from {self.at}")
        if at > self.at:
            self.touched |= self.swollen
            self.swollen.clear()
            self.judge(record, decided=False)
        self.at = at
        handler = getattr(self, f"on_{kind}", None)
        if handler is None:
            self.fault(record, "unknown kind")
            return
        handler(record)
        if kind == "grow":  # what was told together counts together, and moves that it ends are ended at that instant
            self.swollen |= self.touched
            self.touched.clear()
        elif not self.by_instant:
            self.judge(record, decided=kind in ("place", "move"))

    def close(self) -> None:
        """End the log: nothing may be left open."""
        self.touched |= self.swollen
        self.judge({"kind": "end"}, decided=False)
        for request in self.owner:
            self.faults.append(f"request {request} never finished")
        for worker in () if self.of_a_daemon else self.awake:  # a daemon may be stopped at any time
            self.faults.append(f"worker {worker} is still awake")

    def judge(self, record: Record, decided: bool) -> None:
        """Check every touched worker against its capacity.

        What is decided must fit with all that is to come.  What has happened to a daemon may leave no room for that:
        the destination then refuses what is on its way, and what was placed there, or has come by its tokens, holds
        nothing before it begins.  Others may take of a device what its requests hold: they stay, and may grow.
        """
        everything = decided or not self.of_a_daemon
        limits = self.capacity if everything else self.built
        for worker in self.touched:
            holds = self.held[worker].items()
            used = sum(size for (one, role), size in holds if everything or (role == "runs" and one in self.begun))
            used -= self.shared[worker]
            if used > limits.get(worker, 0):
                self.fault(record, f"{worker} holds {used} of {limits.get(worker, 0)} bytes")
            if len(self.held[worker]) > self.slots.get(worker, 1 << 60):
                self.fault(record, f"{worker} has {len(self.held[worker])} requests in {self.slots[worker]} slots")
        self.touched.clear()

    def fault(self, record: Record, why: str) -> None:
        """Note what is wrong with a record."""
        self.faults.append(f"record {self.records} {json.dumps(record)}: {why}")

    def expect(self, record: Record, holds: bool, why: str) -> None:
        """Note a fault unless the condition holds."""
        if not holds:
            self.fault(record, why)

    def hold(self, worker: str, request: str, role: str, size: int | None) -> None:
        """Record that the request holds this much on the worker in that role; None: nothing, and no slot."""
        if size is None:
            left = self.held[worker].pop((request, role), 0)
            self.shared[worker] -= min(left, self.shared[worker])  # who leaves frees nothing that others may hold
        else:
            self.held[worker][request, role] = size
            self.touched.add(worker)

    # ---- one method per kind

    def on_worker(self, record: Record) -> None:
        worker = str(record["worker"])
        self.capacity[worker] = int(record["capacity_bytes"])  # type: ignore[call-overload]
        self.built[worker] = max(self.built.get(worker, 0), self.capacity[worker])
        if "slots" in record:
            self.slots[worker] = int(record["slots"])  # type: ignore[call-overload]
        self.touched.add(worker)
        if "gone" in record:
            self.on_gone(worker)

    def on_gone(self, worker: str) -> None:
        """Drop a lost worker: its requests have no worker, moves to it are cancelled, and a successor is in service."""
        self.shared[worker] = 0
        self.built[worker] = 0
        self.roles.pop(worker, None)
        self.awake.discard(worker)
        self.drained.discard(worker)
        self.held[worker].clear()
        for request in [one for one, owner in self.owner.items() if owner == worker]:
            self.owner[request] = None
            self.pushed_out.discard(request)
            self.hold(self.moving.pop(request, worker), request, "arrives", None)
        for request in [one for one, destination in self.moving.items() if destination == worker]:
            del self.moving[request]

    def on_share(self, record: Record) -> None:
        """Count blocks that several requests share once."""
        worker, shared = str(record["worker"]), int(record["shared_bytes"])  # type: ignore[call-overload]
        self.expect(record, worker in self.capacity, "unknown worker")
        self.expect(record, shared >= 0, "cannot be")
        self.shared[worker] = min(shared, sum(self.held[worker].values()))
        self.touched.add(worker)

    def on_scheduler(self, record: Record) -> None:
        self.expect(record, self.records == 1, "is not the first")
        self.of_a_daemon = record.get("unix_s", 0.0) is not None

    def on_epoch(self, _record: Record) -> None:
        """Ignore it: it says nothing of sizes and places."""

    def on_ask(self, record: Record) -> None:
        self.expect(record, "request" in record, "asks for nothing")

    def on_resumed(self, record: Record) -> None:
        """Note that its client sees tokens again."""
        self.expect(record, self.owner.get(str(record["request"])) == record["worker"], "does not run there")
        self.expect(record, float(record["pause_s"]) >= 0.0, "a pause that ends before it began")  # type: ignore[arg-type]

    def on_wake(self, record: Record) -> None:
        """Note how long it takes to wake."""
        if str(record["worker"]) not in self.capacity:
            self.fault(record, "the worker is not known")

    def on_pace(self, record: Record) -> None:
        """Ignore it: step times say nothing of sizes and places."""

    def on_steady(self, record: Record) -> None:
        self.expect(record, str(record["worker"]) in self.capacity, "unknown worker")

    def on_drain(self, record: Record) -> None:
        self.expect(record, str(record["worker"]) in self.capacity, "unknown worker")
        self.drained.add(str(record["worker"]))

    def on_resume(self, record: Record) -> None:
        self.drained.discard(str(record["worker"]))

    def on_role(self, record: Record) -> None:
        """Check that roles are given to workers in service, and only when they change."""
        worker, role = str(record["worker"]), str(record["role"])
        self.expect(record, role in ("mixed", "prefill", "decode"), "no role")
        self.expect(record, worker in self.awake, "sleeps")
        self.expect(record, self.roles.get(worker, "mixed") != role, "has that role")
        self.roles[worker] = role

    def on_activate(self, record: Record) -> None:
        worker = str(record["worker"])
        self.expect(record, worker in self.capacity, "unknown worker")
        self.expect(record, worker not in self.awake, "already awake")
        self.awake.add(worker)

    def on_retire(self, record: Record) -> None:
        worker = str(record["worker"])
        self.expect(record, worker in self.awake, "not awake")
        self.expect(record, not self.held[worker], "still holds requests")
        self.expect(record, worker not in self.owner.values(), "still owns requests")
        self.awake.discard(worker)
        self.roles.pop(worker, None)

    def on_arrive(self, record: Record) -> None:
        request = str(record["request"])
        self.expect(record, request not in self.seen, "arrived before")
        self.seen.add(request)
        self.owner[request] = None
        self.size[request] = int(record["kv_bytes"])  # type: ignore[call-overload]

    def on_queue(self, record: Record) -> None:
        self.expect(record, self.owner.get(str(record["request"]), "?") is None, "does not wait")

    def on_promise(self, record: Record) -> None:
        self.on_queue(record)
        self.expect(record, record["worker"] in self.awake, "the room promised is on no worker that is awake")

    def on_suspend(self, record: Record) -> None:
        request, worker = str(record["request"]), str(record["worker"])
        self.expect(record, self.owner.get(request) == worker, "is not on the worker")
        self.expect(record, request not in self.moving, "moves")
        self.owner[request] = None
        self.pushed_out.discard(request)
        self.hold(worker, request, "runs", None)

    def on_place(self, record: Record) -> None:
        request, worker = str(record["request"]), str(record["worker"])
        self.expect(record, self.owner.get(request, "?") is None, "does not wait")
        self.expect(record, worker in self.awake, f"{worker} is not awake")
        self.expect(record, worker not in self.drained, f"{worker} takes nothing")
        self.expect(record, record["kv_bytes"] == self.size.get(request), "not its size")
        self.owner[request] = worker
        self.begun.discard(request)
        self.hold(worker, request, "runs", self.size.get(request, 0))

    def on_grow(self, record: Record) -> None:
        request, size = str(record["request"]), int(record["kv_bytes"])  # type: ignore[call-overload]
        owner = self.owner.get(request)
        self.expect(record, owner is not None, "has no worker")
        self.expect(record, size >= self.size.get(request, 0), "shrinks")
        self.size[request] = size
        self.begun.add(request)
        self.pushed_out.discard(request)
        if owner is not None:
            self.hold(owner, request, "runs", size)
        if request in self.moving:
            self.hold(self.moving[request], request, "arrives", size)

    def on_move(self, record: Record) -> None:
        request, source, destination = str(record["request"]), str(record["source"]), str(record["destination"])
        self.expect(record, self.owner.get(request) == source, "is not on the source")
        self.expect(record, source != destination, "goes nowhere")
        self.expect(record, request not in self.moving, "moves already")
        self.expect(record, destination in self.awake, f"{destination} is not awake")
        self.expect(record, destination not in self.drained, f"{destination} takes nothing")
        self.expect(record, record["kv_bytes"] == self.size.get(request), "not its size")
        self.expect(record, record["via"] in ("kv", "tokens"), "no way to move")
        self.moving[request] = destination
        self.hold(destination, request, "arrives", self.size.get(request, 0))

    def on_moved(self, record: Record) -> None:
        request, outcome = str(record["request"]), record["outcome"]
        self.expect(record, request in self.moving, "does not move")
        self.expect(record, outcome in ("committed", "aborted"), "no outcome")
        destination = self.moving.pop(request, "?")
        if outcome == "committed":
            self.held[destination].pop((request, "arrives"), None)  # it stays, and shares what it did
            self.hold(str(self.owner.get(request)), request, "runs", None)
            self.pushed_out.discard(request)
            self.owner[request] = destination
            (self.begun.discard if record.get("via") == "tokens" else self.begun.add)(request)
            self.hold(destination, request, "runs", self.size.get(request, 0))
        else:
            self.hold(destination, request, "arrives", None)

    def on_preempt(self, record: Record) -> None:
        request, worker = str(record["request"]), str(record["worker"])
        self.expect(record, self.owner.get(request) == worker, "is not on the worker")
        self.expect(record, request not in self.pushed_out, "is pushed out already")
        self.pushed_out.add(request)
        self.size[request] = max(self.size.get(request, 0), int(record["kv_bytes"]))  # type: ignore[call-overload]
        self.hold(worker, request, "runs", 0)

    def on_finish(self, record: Record) -> None:
        request = str(record["request"])
        self.expect(record, request in self.owner, "unknown or finished before")
        owner = self.owner.pop(request, None)
        if owner is not None:
            self.hold(owner, request, "runs", None)
        if request in self.moving:
            self.hold(self.moving.pop(request), request, "arrives", None)
        left = self.of_a_daemon  # its client may have left in the meantime
        self.expect(record, left or request not in self.pushed_out, "finished while pushed out")
        self.pushed_out.discard(request)


if __name__ == "__main__":
    with pathlib.Path(sys.argv[1]).open("rb") as log:
        auditor = Auditor(by_instant="--by-instant" in sys.argv).read(log)
    for found in auditor.faults:
        print(found)  # noqa: T201
    print(f"{auditor.records} records, {len(auditor.faults)} faults")  # noqa: T201
    sys.exit(1 if auditor.faults else 0)
