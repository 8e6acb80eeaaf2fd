"""Turns of the event loop, one piece of long work in each."""

import asyncio
from collections import Counter

from melld.engine.frontend.turns import Turns


def test_no_turn_of_the_loop_has_two_pieces_and_none_is_left_out() -> None:
    """A hundred short pieces in one turn are one long one."""
    pieces: Counter[int] = Counter()
    turn = 0

    async def work(turns: Turns) -> None:
        for _ in range(5):
            await turns.mine()
            pieces[turn] += 1

    async def main() -> None:
        nonlocal turn
        turns = Turns()
        working = [asyncio.create_task(work(turns)) for _ in range(7)]
        while not all(task.done() for task in working):
            turn += 1
            await asyncio.sleep(0)

    asyncio.run(main())
    assert sum(pieces.values()) == 35
    assert set(pieces.values()) == {1}


def test_a_first_piece_waits_for_nobody() -> None:
    """Where nothing else is to do, nothing is lost."""

    async def main() -> None:
        coroutine = Turns().mine()
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("it gave the loop back")

    asyncio.run(main())


def test_who_is_cancelled_while_it_waits_takes_no_turn() -> None:
    """The others go on."""

    async def main() -> list[str]:
        turns, done = Turns(), list[str]()

        async def work(name: str) -> None:
            await turns.mine()
            done.append(name)

        tasks = [asyncio.create_task(work(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        return done

    assert asyncio.run(main()) == ["a", "c"]
