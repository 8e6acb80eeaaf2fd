"""A wall clock that jumps an hour changes nothing.

The clock of the machine is not a test's to set.  Shown instead: melld measures with monotonic clocks alone; where it
reads the wall clock, the reading is shown or written down and nothing is reckoned with it.
"""

import ast
from pathlib import Path

from melld.engine.fleet.life import Do, Event, WorkerLife
from melld.ids import WorkerId

MELLD = Path(__file__).parents[2] / "melld"
WALL = {"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today", "CLOCK_REALTIME"}
TOLD = {
    "daemon/wiring.py": "the first record of the decision log says what o'clock it is",
    "engine/worker/start.py": "vLLM's request wants the time of its arrival: for warming up and measuring",
}


def readings(path: Path) -> list[str]:
    """Return every reading of a wall clock in a file: `time.time()`, `datetime.now()` and their kin, under any name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in WALL:
            owner = ast.unparse(node.value)
            if owner.split(".")[0] in ("time", "datetime", "date"):
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found += [f"{node.module}: {name.name}" for name in node.names if name.name in WALL | {"datetime", "date"}]
    return found


def test_no_decision_reads_the_wall_clock() -> None:
    """Deadlines, back-off, patience and epochs are unaffected when the clock is set."""
    found = {str(path.relative_to(MELLD)): readings(path) for path in MELLD.rglob("*.py")}
    assert {name: clocks for name, clocks in found.items() if clocks and name not in TOLD} == {}
    assert {name: len(found.get(name, [])) for name in TOLD} == dict.fromkeys(TOLD, 1)


def test_the_scan_finds_what_it_looks_for(tmp_path: Path) -> None:
    """A scan that never finds anything would prove nothing."""
    source = tmp_path / "source.py"
    source.write_text("import time, datetime\na = time.time()\nb = datetime.datetime.now()\nc = time.monotonic()\n")
    assert readings(source) == ["time.time", "datetime.datetime.now"]


def test_restarts_back_off_and_then_stop() -> None:
    """A worker that cannot load does not keep a processor busy forever."""
    life, waits_s = WorkerLife(WorkerId("w0")), []
    life.take(Event.WAKE)
    while not life.given_up:
        life.take(Event.DIED)
        waits_s.append(life.back_off_s)
        do = life.take(Event.RETRY)
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert do is Do.NOTHING
