"""Figures of a live run: from what its clients saw, and from the decision log of its daemon.

A request is good when it met both targets, judged as the daemon and the simulator do.  Worker-seconds are the time
between `activate` and `retire`, until the last request has ended.
"""

import collections
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.targets.live_load import Played, spread_ms
from melld.ids import WorkerId
from melld.scheduler.events import WorkerPace, WorkerUp
from melld.scheduler.policies.slo.models import PromptModel, StepModel
from melld.scheduler.roster import Roster
from melld.scheduler.targets import MEAN_OVER_TOKENS, Targets
from melld.simulator.latency import Floats

Figures = dict[str, Any]


class Learned:
    """A worker's speed (`simulator.latency.Latency`), as learned from what a daemon told of its steps."""

    def __init__(self, bytes_per_token: int) -> None:
        self.steps, self.prompts = StepModel(), PromptModel()
        self._step_s = np.vectorize(
            lambda batch, tokens: self.steps.step_s(None, batch, tokens * bytes_per_token), otypes=[float]
        )

    def step_s(self, batch: Floats, context_tokens: Floats) -> Floats:
        """See `Latency`."""
        seconds: Floats = self._step_s(batch, context_tokens)
        return seconds

    def prefill_s(self, tokens: float) -> float:
        """See `Latency`."""
        return self.prompts.seconds(tokens)  # type: ignore[arg-type]


def learned_from(decisions: Path, bytes_per_token: int) -> Learned:
    """Return what the log says of steps and prompts."""
    learned, roster = Learned(bytes_per_token), Roster()
    for record in map(json.loads, decisions.read_text().splitlines()):
        if record["kind"] == "worker" and record["worker"] not in roster.workers:
            roster.add(WorkerUp(0.0, WorkerId(record["worker"]), record["capacity_bytes"]))
        elif record["kind"] == "pace":
            pace = WorkerPace(**{key: record[key] for key in WorkerPace.__struct_fields__})
            learned.steps.observe(roster.workers[record["worker"]], pace)
            learned.prompts.observe(pace)
    return learned


def move_of(decisions: Path, most_moves: int) -> tuple[float, float]:
    """Return the mean seconds from asking for a move to its end, and by how much its client waits longer than a step.

    Only of moves that were committed and did not wait for `most_moves` others between the same workers; 0 without any.
    """
    began: dict[str, tuple[float, str]] = {}
    seconds: list[float] = []
    pauses_s: list[float] = []
    steps_s: list[float] = []
    under_way: collections.Counter[str] = collections.Counter()
    for record in map(json.loads, decisions.read_text().splitlines()):
        if record["kind"] == "resumed" and record["pause_s"] is not None:
            pauses_s.append(record["pause_s"])
        elif record["kind"] == "pace" and record["step_s"]:
            steps_s.append(record["step_s"])
        elif record["kind"] == "move":
            link = f"{record['source']} {record['destination']}"
            waits = under_way[link] >= most_moves
            began[record["request"]] = float("inf") if waits else record["at"], link
            under_way[link] += 1
        elif record["kind"] in ("moved", "finish") and record["request"] in began:
            began_s, link = began.pop(record["request"])
            under_way[link] -= 1
            if record.get("outcome") == "committed" and began_s < record["at"]:
                seconds.append(record["at"] - began_s)
    gap_s = statistics.fmean(pauses_s) - statistics.fmean(steps_s) if pauses_s and steps_s else 0.0
    return statistics.fmean(seconds) if seconds else 0.0, max(gap_s, 0.0)


def good_of(played: list[Played], learned: Learned, targets: Targets) -> int:
    """Return how many clients got what was promised."""
    good = 0
    for one in played:
        if one.whole and targets.itl_s is not None:
            seconds = (one.arrivals_s[-1] - one.arrivals_s[0]) / max(one.tokens - 1, MEAN_OVER_TOKENS)
            in_time = one.ttft_s <= targets.first_token_s(learned.prefill_s(one.prompt_tokens))
            good += in_time and seconds <= targets.itl_s
    return good


def client_figures(played: list[Played]) -> Figures:
    """Return what the clients saw."""
    whole = [one for one in played if one.whole]
    return {
        "requests": len(played),
        "lost": len(played) - len(whole),
        "ttft_ms": spread_ms([one.ttft_s for one in whole]),
        "itl_ms": spread_ms([gap_s for one in whole for gap_s in one.gaps_s]),
    }


def log_figures(decisions: Path, since_s: float, until_s: float) -> Figures:
    """Return what the decision log says of this time (the same clock: one machine)."""
    awake: dict[str, float] = {}
    worker_s, peak = 0.0, 0
    counts: collections.Counter[str] = collections.Counter()
    ways: dict[str, str] = {}
    for line in decisions.read_text().splitlines():
        record = json.loads(line)
        at_s, kind = max(min(record["at"], until_s), since_s), record["kind"]
        if kind == "activate":
            awake[record["worker"]] = at_s
            peak = max(peak, len(awake)) if record["at"] > since_s else peak
        elif kind == "retire":
            worker_s += at_s - awake.pop(record["worker"], at_s)
        elif record["at"] < since_s:
            continue
        elif kind == "move":
            ways[record["request"]] = record["via"]
        elif kind == "moved":
            counts[ways[record["request"]] if record["outcome"] == "committed" else "aborted"] += 1
        else:
            counts[kind] += 1
    worker_s += sum(until_s - at_s for at_s in awake.values())
    requests = max(1, counts["arrive"])
    return {
        "worker_s": worker_s,
        "peak": peak,
        "moves_kv": counts["kv"] / requests,
        "moves_tokens": counts["tokens"] / requests,
        "aborted": counts["aborted"] / requests,
        "preemptions": counts["preempt"],
        "queued": counts["queue"],
    }
