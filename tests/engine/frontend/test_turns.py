"""Turns of the event loop, each with a time slice for pieces of long work."""

import asyncio
from collections import Counter

from melld.engine.frontend.turns import Turns


def _pieces_by_turn(turns: Turns, calls: int, pieces_of_a_call: int) -> Counter[int]:
    """Return how many pieces ran in each turn of the loop."""
    pieces: Counter[int] = Counter()
    turn = 0

    async def work() -> None:
        for _ in range(pieces_of_a_call):
            await turns.mine()
            pieces[turn] += 1

    async def main() -> None:
        nonlocal turn
        working = [asyncio.create_task(work()) for _ in range(calls)]
        while not all(task.done() for task in working):
            turn += 1
            await asyncio.sleep(0)

    asyncio.run(main())
    return pieces


def test_pieces_that_fill_a_slice_get_a_turn_each() -> None:
    """A hundred short pieces in one turn are one long one; none is left out."""
    pieces = _pieces_by_turn(Turns(slice_s=0.0), 7, 5)
    assert sum(pieces.values()) == 35
    assert set(pieces.values()) == {1}


def test_pieces_that_fit_into_a_slice_share_a_turn() -> None:
    """A burst of cheap requests waits for no turns."""
    assert set(_pieces_by_turn(Turns(slice_s=60.0), 7, 5).values()) == {35}


def test_more_pieces_start_per_turn_once_turns_are_short() -> None:
    """Cheap pieces behind a long one go on together."""
    now_s, turn, begun = 0.0, 0, list[int]()
    turns = Turns(slice_s=1.0, clock=lambda: now_s)

    async def work(took_s: float) -> None:
        nonlocal now_s
        await turns.mine()
        begun.append(turn)
        now_s += took_s

    async def main() -> None:
        nonlocal turn
        working = [asyncio.create_task(work(took_s)) for took_s in (5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
        while not all(task.done() for task in working):
            turn += 1
            await asyncio.sleep(0)

    asyncio.run(main())
    assert list(Counter(begun).values()) == [1, 1, 2, 4]


def test_a_first_piece_does_not_wait() -> None:
    """With nothing else to do, nothing is lost."""

    async def main() -> None:
        coroutine = Turns().mine()
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("it gave the loop back")

    asyncio.run(main())


def test_a_piece_cancelled_while_queued_takes_no_turn() -> None:
    """The others go on."""

    async def main() -> list[str]:
        turns, done = Turns(slice_s=0.0), list[str]()

        async def work(name: str) -> None:
            await turns.mine()
            done.append(name)

        tasks = [asyncio.create_task(work(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        return done

    assert asyncio.run(main()) == ["a", "c"]
