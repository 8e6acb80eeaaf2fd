"""docs/decision-log.md describes every kind of record, and says which of them a simulation writes too."""

import json
import re
from pathlib import Path

from melld.cli import main
from melld.decisions.records import DECIDED, PLAIN_FACTS

PAGE = (Path(__file__).parents[2] / "docs" / "decision-log.md").read_text()
ROW = re.compile(r"^- (`\w+`(?:, `\w+`)*)(?: \(.*?\))?: ", re.MULTILINE)


def kinds(text: str) -> set[str]:
    """Return the kinds of records that a list's items begin with."""
    return {kind for names in ROW.findall(text) for kind in re.findall(r"\w+", names)}


def test_every_kind_of_record_is_documented() -> None:
    """Whoever parses a log finds each kind explained."""
    assert {kind for kind, _ in (*DECIDED.values(), *PLAIN_FACTS.values())} <= kinds(PAGE)


def test_records_that_simulations_write_are_not_called_daemon_only(tmp_path: Path) -> None:
    """A reader of simulated logs expects step times."""
    log = tmp_path / "log.jsonl"
    load = ["--poisson", "2", "--lengths", "lognormal", "--seconds", "10", "--gpus", "4", "--wake-s", "8"]
    targets = ["--itl-target-ms", "50", "--link-rate", "4GiB", "--high-part", "0.2"]
    assert main(["simulate", *load, *targets, "--policy", "mell-slo", "--decision-log", str(log)]) == 0
    written = {json.loads(line)["kind"] for line in log.read_text().splitlines()}
    assert {"wake", "pace"} <= written
    assert written <= kinds(PAGE.partition("A daemon's log has also")[0])
