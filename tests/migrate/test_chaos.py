"""A short random history on real workers: nothing lost, doubled, altered or hung, and nothing left behind."""

from tests.migrate.chaos import History
from tests.migrate.live import Bench


def test_a_random_history_harms_no_answer(bench: Bench) -> None:
    """Moves, clients that leave and workers that die at any step of a migration, together."""
    history = History(bench.daemon, bench.faults, seed=5, harm_every_s=4.0)
    history.play(requests=100, clients=6)
    assert history.wrong == []
    assert not history.tally["rounded"]
    assert history.tally["exact"] + history.tally["left"] == 100
    assert history.tally["move committed"] > 0
