"""A low-priority request gives way to a high-priority one: its client gets the tokens of an undisturbed run."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from melld.cli import main
from tests.decisions.audit import Auditor
from tests.migrate.live import CASES, CHUNK_S, GREEDY, LONG, THINKS, Answer, Bench, Stream, alike
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

PROMPT = {"prompt": list(range(5, 45)), "max_tokens": 120, "temperature": 0, "ignore_eos": True}
BODIES = {
    **CASES,
    "prompt_logprobs": {**PROMPT, "prompt_logprobs": 2, "stream": False},
    "echoed logprobs": {**PROMPT, "echo": True, "logprobs": 2, "stream": False},
}
HERE = ("n",)
"""In the short form; `tests/engine/worker/residency` resumes each of the others from its tokens, too."""
URGENT = GREEDY | {"priority": -1, "max_tokens": 20}
KILLED = ("suspending", "aborted", "waiting", "resumed", "step")
"""When the worker dies: before it hears of the suspension; before it says that it has; while the low one waits; as it
comes back; after the next step."""
FEW = ("aborted",)
"""In the short form."""
ROUNDING = 1e-4


class Lone(Bench):
    """A daemon of one worker that runs one request at a time, and its undisturbed answers."""

    def alone(self, name: str) -> Answer:
        """Return the low-priority request's answer when alone."""
        if name not in self._unmoved:
            self._unmoved[name] = Stream(self.daemon, low(name)).result()
        return self._unmoved[name]

    def urgent_alone(self) -> Answer:
        """Return the high-priority request's answer when alone."""
        if "urgent" not in self._unmoved:
            self._unmoved["urgent"] = Stream(self.daemon, URGENT).result()
        return self._unmoved["urgent"]

    def decoding(self, name: str) -> Stream:
        """Return a run of the low-priority request that has begun to answer."""
        stream = Stream(self.daemon, low(name))
        self.operator.wait_request(lambda found: found["output_tokens"] >= 8)
        return stream

    def suspended(self) -> dict[str, Any]:
        """Return the status of the suspended request."""
        found: dict[str, Any] = self.operator.wait_request(lambda one: one["suspensions"])
        return found

    def kill(self) -> None:
        """Kill the worker from outside."""
        os.kill(self.operator.status()["workers"][0]["pid"], signal.SIGKILL)

    def suspensions(self) -> int:
        """Return how many the daemon has counted."""
        [line] = [line for line in self.daemon.get("/metrics").splitlines() if line.startswith("melld_suspensions_to")]
        counted = int(float(line.split()[-1]))
        assert counted == self.operator.status()["suspensions"]
        return counted


def assert_same(stream: Stream, expected: Answer) -> None:
    """Check that the client cannot tell; recomputed states may change a log-probability's last digits."""
    assert alike(asdict(stream.result()), asdict(expected), ROUNDING)


def low(name: str) -> dict[str, Any]:
    """Return the case, sent with low priority."""
    return BODIES[name] | {"priority": 1}


@pytest.fixture(scope="module", params=["demo", pytest.param("granite4_h", marks=pytest.mark.long)])
def daemon(
    demo_model: Path, model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, request: Any
) -> Iterator[Lone]:
    """A daemon whose decisions are audited and replayed; also with a model that keeps states."""
    model = demo_model if request.param == "demo" else model_of(request.param)
    log = tmp_path_factory.mktemp("suspension") / "decisions.jsonl"
    flags = [*THINKS, "--device", "cpu:1", "--kv-bytes", "64MiB", "--set", f'scheduler.decision_log="{log}"']
    flags += ["--set", "model.vllm.max_num_active_seqs=1", "--set", "idle.sleep_after_s=inf"]
    flags += ["--set", "model.vllm.max_num_batched_tokens=512"]  # a prompt of 3,000 tokens takes six steps
    flags += ["--set", "health.steady_after_s=0"]
    with DaemonProcess(model, *flags, harmable=True) as process:
        lone = Lone(process.wait_ready(), process.faults)
        yield lone
        suspensions = lone.suspensions()
    auditor = Auditor().read(log.read_bytes().splitlines())
    assert auditor.faults == []
    assert auditor.kinds["suspend"] == suspensions > 0
    assert main(["simulate", "--replay", str(log)]) == 0


@pytest.fixture
def lone(daemon: Lone) -> Iterator[Lone]:
    """The daemon, left idle, with its worker ready and no pending fault."""
    yield daemon
    assert not list(daemon.faults.iterdir())
    daemon.operator.wait_ready()
    daemon.operator.wait_idle()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in HERE else pytest.mark.long) for name in BODIES]
)
def test_a_suspended_answer_is_unchanged(lone: Lone, name: str) -> None:
    """Text, log-probabilities, also the prompt's, finish reason and usage: the client cannot tell."""
    low_alone, high_alone, before = lone.alone(name), lone.urgent_alone(), lone.suspensions()
    with lone.slowed():
        stream = lone.decoding(name)
        high = Stream(lone.daemon, URGENT)
        one = lone.suspended()
        assert (one["worker"], one["suspensions"], high.answer.usage) == (None, 1, None)
        assert_same(high, high_alone)
    assert_same(stream, low_alone)
    assert lone.suspensions() == before + 1


@pytest.mark.parametrize(
    "killed", [pytest.param(step, marks=() if step in FEW else pytest.mark.long) for step in KILLED]
)
def test_a_worker_killed_at_any_step_of_a_suspension_costs_no_token(lone: Lone, killed: str) -> None:
    """Whichever died, both streams complete."""
    low_alone, high_alone = lone.alone("seeded"), lone.urgent_alone()
    fault = lone.faults / f"w0.{killed}.KILL"
    with lone.slowed():
        stream = lone.decoding("seeded")
        if killed in ("suspending", "aborted"):
            fault.touch()
        high = Stream(lone.daemon, URGENT)
        lone.suspended()
        if killed == "waiting":
            lone.kill()
        elif killed == "resumed":
            fault.touch()
        elif killed == "step":
            lone.operator.wait_request(lambda one: one["suspensions"] and one["worker"])
            fault.touch()
        assert_same(high, high_alone)
        assert_same(stream, low_alone)


def test_a_request_suspended_during_prefill_starts_over(lone: Lone) -> None:
    """It has no token yet: its client gets all of them, once."""
    body = low("greedy") | {"messages": LONG, "max_tokens": 30}
    alone = Stream(lone.daemon, body | {"cache_salt": "alone"}).result()
    with slowed(lone.faults, CHUNK_S):
        stream, _ = lone.seen_prefilling(body, "suspended")
        high = Stream(lone.daemon, URGENT | {"max_tokens": 3})
        one = lone.suspended()
        assert (one["worker"], one["output_tokens"]) == (None, 0)
        high.result()
    assert_same(stream, alone)


def test_a_client_that_leaves_while_suspended_leaves_nothing_behind(lone: Lone) -> None:
    """It leaves the queue at once, the urgent one goes on, and its story is complete."""
    with lone.slowed():
        stream = lone.decoding("greedy")
        high = Stream(lone.daemon, URGENT)
        one = lone.suspended()
        stream.hang_up()
        lone.operator.wait(lambda status: one["request"] not in str(status["requests"]))
        assert high.answer.usage is None, "the urgent one was over before"
        assert_same(high, lone.urgent_alone())
    why = lone.daemon.melld("why", one["request"])
    assert (why.returncode, why.stderr) == (0, "")
    assert "suspended on w0, tokens so far are kept: another request needs the memory" in why.stdout
    assert f" preemptions, {lone.suspensions()} suspensions" in lone.daemon.melld("status").stdout
