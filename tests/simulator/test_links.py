"""Links between simulated workers: contention, waking, the gap of a move, and planning over a tree of switches."""

import msgspec
import pytest

from melld.migrate.snapshot import Via
from melld.scheduler import events
from melld.simulator.latency import ConstantLatency
from melld.simulator.links import LinkSettings, SimulatedLinks
from melld.simulator.measures import Measures
from tests.simulator.setups import BLOCK_BYTES, SMALL, one_by_one, small_load
from tests.simulator.test_simulation import Script, activate, move, place, play, retire, simulate

KV = LinkSettings(bytes_per_s=40 * BLOCK_BYTES, ways=(Via.KV,))
SIZE = 16 * BLOCK_BYTES
TREE = msgspec.structs.replace(KV, gpus_per_switch=2, switch_bytes_per_s=KV.bytes_per_s)


def test_transfers_over_one_switch_wait_for_one_another() -> None:
    """Two pairs that share an uplink take twice as long; neighbours below one switch do not notice."""
    links = SimulatedLinks(TREE)
    ends = [links.transfer(*pair, SIZE, 0.0) for pair in ((0, 2), (1, 3), (4, 5))]
    assert ends == pytest.approx([0.4, 0.8, 0.4])


def test_a_wide_switch_delays_nobody() -> None:
    """An uplink that carries two links' worth is free again when half of a transfer is through."""
    links = SimulatedLinks(msgspec.structs.replace(TREE, switch_bytes_per_s=2 * KV.bytes_per_s))
    assert [links.transfer(*pair, SIZE, 0.0) for pair in ((0, 2), (1, 3))] == pytest.approx([0.4, 0.6])


def test_a_link_carries_a_limited_number_of_moves() -> None:
    """As the daemon's do: a fifth one between two workers begins when a first has ended."""
    links = SimulatedLinks(msgspec.structs.replace(KV, delay_s=10.0))
    ends = [links.transfer(0, 1, SIZE, 0.0) for _ in range(5)]
    assert ends == pytest.approx([10.4, 10.8, 11.2, 11.6, 20.8])
    assert links.transfer(0, 2, SIZE, 21.0) == pytest.approx(31.4)


def moved_to_a_sleeper(link: LinkSettings, wake_s: float) -> tuple[Script, Measures]:
    """Move one request to a worker that is woken for it, and end it there."""
    settings = msgspec.structs.replace(SMALL, link=link, gpus=2, wake_s=wake_s)
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), place("r0", "w0")]),
        (events.EpochStarted, wake_s + 0.5, [activate("w1"), move("r0", "w0", "w1", SIZE)]),
        (events.EpochStarted, 60.0, [retire("w0"), retire("w1")]),
    )
    return script, play(settings, one_by_one((0.1, 255, 700)), script)


def test_a_waking_worker_runs_no_request_before_it_is_awake() -> None:
    """A request whose KV came early would decode on a GPU that has not started."""
    script, _ = moved_to_a_sleeper(KV, wake_s=4.0)
    (committed,) = script.heard_of(events.MoveCommitted)
    assert committed.at_s >= 4.5 + 4.0


def test_the_scheduler_hears_when_a_worker_is_awake() -> None:
    """As in the daemon: a move's wait for a start does not count as its own time."""
    script, _ = moved_to_a_sleeper(KV, wake_s=4.0)
    told = [(event.worker, event.wake_s) for event in script.heard_of(events.WorkerWakeTimeChanged)]  # type: ignore[union-attr]
    assert told == [("w0", 4.0), ("w1", 4.0), ("w0", 0.0), ("w1", 0.0)]


def test_a_move_costs_its_client_the_measured_gap() -> None:
    """A policy that moves more does not come out as fast as one that moves less."""
    ends = []
    for gap_s in (0.0, 0.25):
        script, _ = moved_to_a_sleeper(msgspec.structs.replace(KV, kv_gap_s=gap_s), wake_s=0.0)
        (finished,) = script.heard_of(events.RequestFinished)
        ends.append(finished.at_s)
    assert ends[1] - ends[0] == pytest.approx(0.25, rel=0.01)


def test_copies_take_decoding_time_on_both_workers() -> None:
    """Requests that run beside a move slow down by the measured amount."""
    ends = []
    for cost_s in (0.0, 0.4):
        script, _ = moved_to_a_sleeper(msgspec.structs.replace(KV, copy_cost_s=cost_s, kv_gap_s=0.0), wake_s=0.0)
        (finished,) = script.heard_of(events.RequestFinished)
        ends.append(finished.at_s)
    assert ends[0] < ends[1] < ends[0] + 0.5


def test_tokens_beyond_the_boundary_take_several_epochs() -> None:
    """A worker that may prefill a tenth of its time for others needs ten times as long for it."""
    link = LinkSettings(bytes_per_s=1.0, ways=(Via.TOKENS,), prefill_share=0.1)
    settings = msgspec.structs.replace(
        SMALL, link=link, gpus=2, latency=ConstantLatency(decode_step_s=0.02, prefill_token_s=0.001)
    )
    script = Script(
        (events.RequestArrived, 0.0, [activate("w0"), activate("w1"), place("r0", "w0")]),
        (events.RequestArrived, 0.0, [place("r1", "w1")]),
        (events.EpochStarted, 0.5, [move("r0", "w0", "w1", SIZE)]),
        (events.EpochStarted, 60.0, [retire("w0"), retire("w1")]),
    )
    play(settings, one_by_one((0.1, 250, 400), (0.1, 10, 700)), script)
    (committed,) = script.heard_of(events.MoveCommitted)
    assert committed.at_s - 0.5 == pytest.approx(10 * 0.27, rel=0.1)  # 270 tokens of a millisecond


def test_waking_does_not_set_off_a_chain_of_wakings() -> None:
    """Waiting for a starting GPU is not learned as move time: a few GPUs serve what a few can hold."""
    reports = [
        simulate("mell-plus", msgspec.structs.replace(SMALL, link=KV, wake_s=wake_s), small_load(seconds=300.0))
        for wake_s in (0.0, 8.0)
    ]
    assert reports[1].peak_gpus <= 2 * reports[0].peak_gpus


def makespan_s(link: LinkSettings) -> float:
    """Empty two workers below one switch to the other side of it; return when the last move ends."""
    settings = msgspec.structs.replace(
        SMALL, link=link, gpus=4, latency=ConstantLatency(decode_step_s=0.02, prefill_token_s=0.0005)
    )
    workers = [f"w{number}" for number in range(4)]
    requests = {f"r{number}": workers[number % 2] for number in range(10)}
    script = Script(
        (events.RequestArrived, 0.0, [*(activate(worker) for worker in workers), place("r0", "w0")]),
        *((events.RequestArrived, 0.0, [place(name, worker)]) for name, worker in list(requests.items())[1:]),
        (
            events.EpochStarted,
            0.5,
            [move(name, worker, workers[2 + int(name[1:]) % 2], SIZE) for name, worker in requests.items()],
        ),
        (events.EpochStarted, 200.0, [retire(worker) for worker in workers]),
    )
    play(settings, one_by_one(*[(0.1, 250, 2000)] * 10), script)
    committed = script.heard_of(events.MoveCommitted)
    assert len(committed) == 10
    return max(event.at_s for event in committed) - 0.5


def test_planned_moves_over_a_switch_beat_its_bandwidth() -> None:
    """A planner that ignored what links share would send all by KV and wait for the switch; most go by tokens."""
    narrow = KV.bytes_per_s / 4
    link = msgspec.structs.replace(TREE, switch_bytes_per_s=narrow, ways=(Via.KV, Via.TOKENS), prefill_share=0.5)
    assert makespan_s(link) < 0.5 * 10 * SIZE / narrow
