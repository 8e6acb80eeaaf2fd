"""A daemon's output: a reader who stops reading delays nobody."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

import pytest

from melld.output import CLOSE_DEADLINE_S, MOST_WAITING, Output


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small pipe, whose ends may be closed."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def read_all(end: int) -> str:
    """Read to the end."""
    with open(end, closefd=False) as file:
        return file.read()


def test_both_streams_keep_their_order(pipe: tuple[int, int]) -> None:
    """As where both are the same terminal."""
    output = Output(pipe[1], pipe[1])
    for number in range(100):
        (output.error if number % 3 else output.out).write(f"{number}\n")
    output.close()
    os.close(pipe[1])
    assert read_all(pipe[0]).split() == [str(number) for number in range(100)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_stalled_reader_delays_nobody_and_learns_what_was_dropped(pipe: tuple[int, int], waits: bool) -> None:
    """A stopped terminal continues with a gap, whether its writes wait or fail."""
    os.set_blocking(pipe[1], waits)
    output = Output(pipe[1], pipe[1])
    for number in range(2 * MOST_WAITING):
        output.out.write(f"{number}\n")
    told: list[str] = []
    reading = threading.Thread(target=lambda: told.extend(read_all(pipe[0]).splitlines()))
    reading.start()
    output.close()
    os.close(pipe[1])
    reading.join()
    numbers = [int(line) for line in told if line.isdecimal()]
    dropped = [
        int(line.split()[1]) for line in told if line.endswith(" lines were dropped because the output was not read")
    ]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= MOST_WAITING
    assert len(told) == len(numbers) + len(dropped)
    assert sum(dropped) == 2 * MOST_WAITING - len(numbers) > 0


def test_a_descriptor_closed_before_the_start_is_left_alone(pipe: tuple[int, int]) -> None:
    """Its number may be a log's or a client's by now."""
    output = Output(None, pipe[1])
    output.say("for nobody")
    output.error.write("for somebody")
    output.close()
    os.close(pipe[1])
    assert read_all(pipe[0]) == "for somebody"


def test_a_reader_that_has_gone_costs_nothing(pipe: tuple[int, int]) -> None:
    """`melld serve | head` serves on."""
    output = Output(pipe[1], pipe[1])
    os.close(pipe[0])
    output.out.write("for nobody\n")
    output.close()
    assert not output._thread.is_alive()


def test_an_exit_waits_for_a_reader_for_a_limited_time(pipe: tuple[int, int]) -> None:
    """A process that should end does so."""
    output = Output(pipe[1], pipe[1])
    output.out.write("a" * 100_000)
    output.close()
    assert output._thread.is_alive()
    assert CLOSE_DEADLINE_S < 5
    os.close(pipe[0])
    output._thread.join()
