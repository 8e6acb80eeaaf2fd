"""A short random history on real workers: nothing lost, doubled, altered or hung, and nothing left behind."""

import pytest

from tests.migrate.chaos import History, pause_after
from tests.migrate.live import Bench


@pytest.mark.long  # its short forms: the kills of `test_failover`, and the moves of `tests/faults/test_tasks.py`
def test_a_random_history_harms_no_answer(bench: Bench) -> None:
    """Moves, disconnects and workers that die at any step of a migration, together."""
    requests = 100
    history = History(bench.daemon, bench.faults, seed=5, harm_every_s=4.0, bodies=20)
    history.play(requests=requests, clients=6)
    assert history.wrong == []
    assert not history.tally["rounded"]
    assert history.tally["exact"] + history.tally["left"] == requests
    assert history.tally["move committed"] > 0


def test_tokens_in_flight_do_not_end_the_pause_after_a_kill() -> None:
    """The dead worker's last token arrives after its death; how long the next one takes is what counts."""
    assert pause_after(1.0, [0.5, 1.25, 2.0, 9.0]) == [0.75]
    assert pause_after(1.0, [0.5, 2.0]) == [1.0]
    assert pause_after(1.0, [0.5, 0.9]) == []
