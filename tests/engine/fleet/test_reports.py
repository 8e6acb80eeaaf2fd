"""Which parts of a worker's report reach a client, and which are dropped."""

import msgspec
import pytest

from melld.engine.fleet.paces import STEPS
from melld.engine.fleet.reports import Reported, Reports
from melld.engine.fleet.request import Live
from melld.engine.fleet.step_outputs import Step
from melld.engine.wire import messages as wire
from melld.ids import RequestId, WorkerId
from melld.kvstore.ledger import Ledger
from melld.migrate.snapshot import Phase
from tests.engine.fleet.test_order import READY, Output

R, W0, W1 = RequestId("r"), WorkerId("w0"), WorkerId("w1")
BLOCKS = wire.BlockReport(1, 8, 0, {})


class Desk:
    """Reports of two workers about one request, which belongs to the first."""

    def __init__(self, itl_target_s: float | None = None) -> None:
        self.live = Live(request=R, core_request=b"", prompt_tokens=3, priority=0, arrived_s=0.0, worker=W0)
        self.limits: list[tuple[WorkerId, int]] = []
        self.reports = Reports({R: self.live}, Ledger(), self.limit, itl_target_s)
        for worker in (W0, W1):
            self.reports.worker_ready(worker, READY)

    def limit(self, worker: WorkerId, slots: int) -> None:
        self.limits.append((worker, slots))

    def step(self, worker: WorkerId, outputs: Step, step_s: float, decodes: int, prompt_tokens: int) -> Reported:
        done = wire.StepDone(1, step_s, BLOCKS, leases={}, gone=[], decodes=decodes, prompt_tokens=prompt_tokens)
        return self.reports.take(worker, done, outputs, 0.0)

    def say(self, worker: WorkerId, outputs: Step, lease: int = 0, now_s: float = 0.0) -> Reported:
        leases = {R: lease} if lease else {}
        done = wire.StepDone(1, 0.1, BLOCKS, leases=leases, gone=[])
        return self.reports.take(worker, done, outputs, now_s)


def tokens(*token_ids: int, finish: str | None = None) -> Step:
    if finish is None:
        return Step({R: list(token_ids)})
    return Step(outputs=[Output(R, list(token_ids), finish)])


def test_only_the_owner_with_the_current_lease_is_heard() -> None:
    """Two workers may hold a request for a moment: its client hears of one."""
    desk = Desk()
    desk.say(W0, tokens(7))
    desk.live.hand_over(W1, 1)
    dropped = Step({R: [8]}, [Output(R, [8], "stop")])
    assert desk.say(W0, dropped) == Reported()
    assert (dropped.tokens, dropped.outputs) == ({}, [])
    desk.say(W1, tokens(9), lease=1)
    desk.say(W1, tokens(10), lease=2)
    assert (desk.live.output_token_ids, desk.reports.dropped_outputs) == ([7, 9], 3)
    assert [desk.reports.workers[worker].tokens for worker in (W0, W1)] == [1, 1]


def test_the_first_output_after_a_move_reports_the_gap_once() -> None:
    """The cost of a move to its client is measured where the client's tokens pass."""
    desk = Desk()
    desk.say(W0, tokens(7), now_s=1.0)
    desk.live.hand_over(W1, 1)
    gaps = [desk.say(W1, tokens(8), lease=1, now_s=now_s).gaps_s for now_s in (1.5, 1.6)]
    assert gaps == [{R: pytest.approx(0.5)}, {}]


def test_a_move_before_the_first_token_makes_no_gap() -> None:
    """Its client waited for a prompt; that must not count as a move's gap."""
    desk = Desk()
    desk.live.hand_over(W1, 1)
    gaps = [desk.say(W1, tokens(token), lease=1, now_s=9.0).gaps_s for token in (7, 8)]
    assert gaps == [{R: None}, {}]


def test_the_last_output_is_reported() -> None:
    """Its room is free from then on."""
    desk = Desk()
    assert desk.say(W0, tokens(7)).finished == []
    assert desk.say(W0, tokens(8, finish="length")).finished == [R]


def test_time_to_first_token_and_step_times_are_reported() -> None:
    """The scheduler judges its promises by them."""
    desk = Desk()
    desk.say(W0, tokens(7), now_s=3.0)
    desk.say(W0, tokens(8), now_s=4.0)
    assert desk.live.first_token_s == 3.0
    [(worker, pace)] = desk.reports.take_paces().items()
    assert (worker, pace.step_s) == (W0, pytest.approx(0.1))
    assert desk.reports.take_paces() == {}


def test_a_worker_slower_than_the_target_gets_fewer_slots() -> None:
    """A full batch must not make everybody's tokens late; without a target nobody is limited."""
    desk = Desk(itl_target_s=0.05)
    both = Step(outputs=[Output(R, [1]), Output("another", [1])])
    for _ in range(STEPS):
        desk.say(W0, msgspec.structs.replace(both))
    assert desk.limits[-1] == (W0, 1)
    at_ease = Desk()
    at_ease.say(W0, both)
    assert at_ease.limits == []


def test_a_step_filled_up_with_prompts_costs_no_slot() -> None:
    """A worker is full when decoding alone is too slow: prompts only get the time that it leaves."""
    desk = Desk(itl_target_s=0.05)
    for number in range(4 * STEPS):
        decodes, prompt_tokens = 2 + number % 5, 200 * (number % 8 > 0)
        outputs = Step(outputs=[Output(R, [1])] * decodes)
        desk.step(W0, outputs, 0.01 + 0.001 * decodes + 0.0002 * prompt_tokens, decodes, prompt_tokens)
    costs = desk.reports.workers[W0].times.costs
    assert costs is not None
    assert costs.prompt_token_s == pytest.approx(0.0002, rel=0.05)
    assert set(desk.limits) == {(W0, READY.max_requests)}
    assert desk.reports.take_paces()[W0].prefill_s == 0.0, "no prompt has ended yet"
    prompt = Step(outputs=[Output(R, [1]), *[Output("another", [1])] * 4])
    desk.live.output_token_ids.clear()
    desk.step(W0, prompt, 0.01 + 0.001 * 4 + 0.0002 * 300, 4, 300)
    pace = desk.reports.take_paces()[W0]
    assert pace.prompts == 1
    assert pace.prefill_s == pytest.approx(0.0002 * pace.prompt_tokens, rel=0.1)


def test_a_worker_s_blocks_are_known_from_start_to_end() -> None:
    """Requests leave without output too; what an earlier process held is nobody's."""
    desk = Desk()
    ledger = desk.reports._ledger
    sums = ledger.worker(W0)
    assert sums is not None
    assert sums.used_blocks == 0
    for blocks, gone, held in (({R: (2, Phase.DECODING)}, [], 1), ({}, [R], 0)):
        done = wire.StepDone(1, 0.1, wire.BlockReport(2, 8, 0, blocks), leases={}, gone=gone)
        assert desk.reports.take(W0, done, None, 0.0) == Reported()
        assert len(ledger.holdings_on(W0)) == held
    assert desk.reports.worker_lost(W0)
    assert ledger.worker(W0) is None
    assert not desk.reports.worker_lost(W0)
    assert ledger.worker(W1) is not None


def test_the_token_size_is_known_once_a_worker_is_ready() -> None:
    """In whole blocks; before that nothing is known of the model."""
    reports = Reports({}, Ledger(), lambda *_: None)
    assert reports.kv_bytes(17) == 0
    reports.worker_ready(W0, READY)
    assert reports.kv_bytes(17) == 2 * READY.geometry.block_bytes
