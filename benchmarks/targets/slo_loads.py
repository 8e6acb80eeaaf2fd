"""The loads of `slo_table.py`: pieces of traces, drawn ones, and ones of a shape that no trace has.

Owns what arrives.  Knows no machine but for how long the longest load takes there, and judges nothing.
"""

import functools
import math
import pathlib
import random
from collections.abc import Callable, Sequence

from melld.simulator import workload as workloads
from melld.simulator.workload import Lengths, LogNormal, Workload, poisson

LONG_S, SHORT_S, DAY_S, HOUR_S = 1800.0, 900.0, 14_400.0, 3600.0
NIGHT, NOON = 0.1, 1.9
"""The least and the most of a day's rate, as parts of its mean."""
CHATS = LogNormal(400.0, 1.0, 150.0, 0.9)
AGENTS = LogNormal(6000.0, 0.3, 40.0, 0.5)
WRITERS = LogNormal(100.0, 0.8, 800.0, 0.5)
Drawn = LogNormal | Sequence[Lengths]


@functools.cache
def load_of(load: str, machines: str, seed: int, traces: pathlib.Path) -> Workload:
    """Return the load of that name.

    Raises:
        ConfigError: its file is not there.
        KeyError: there is none of that name.
    """
    chance = random.Random(seed)
    if load in DRAWN:
        return DRAWN[load](chance)
    conversation = traces / "azure2023_conv.csv.gz"
    match load:
        case "conv":
            found = workloads.read_trace(conversation)
            return found.until(LONG_S) if machines == "13b-a100" else found
        case "conv20":
            return workloads.read_trace(conversation).stretched(20.0)
        case "code":
            return workloads.read_trace(traces / "azure2023_code.csv.gz")
        case "arxiv":
            lengths = workloads.read_lengths(traces / "lengths_arxiv_summarization.csv.gz")
            return poisson(6.0, SHORT_S, lengths, chance)
        case "lmsys":
            lengths = workloads.read_lengths(traces / "lengths_lmsys_chat_1m.csv.gz")
            return poisson(8.0, SHORT_S, lengths, chance).scaled(4)
        case "day":
            return day(workloads.read_lengths(conversation), 4.0, chance)
    raise KeyError(load)


def day(lengths: list[Lengths], mean_rate: float, chance: random.Random) -> Workload:
    """Return a day in four hours: two nights at a tenth of the mean rate, two noons at twice of it."""

    def rate(at_s: float) -> float:
        swing = math.cos(4 * math.pi * at_s / DAY_S)
        return mean_rate * ((NIGHT + NOON) / 2 - (NOON - NIGHT) / 2 * swing)

    return _varying(rate, mean_rate * NOON, DAY_S, lengths, chance)


def normal(chance: random.Random) -> Workload:
    """Return 6 chats a second."""
    return poisson(6.0, SHORT_S, CHATS, chance)


def waves(chance: random.Random) -> Workload:
    """Return bursts: every two minutes 20 s at 24 requests a second, 1 a second between them."""
    lengths = LogNormal(800.0, 1.0, 120.0, 0.9)
    return _varying(lambda at_s: 24.0 if at_s % 120.0 < 20.0 else 1.0, 24.0, SHORT_S, lengths, chance)


def ramps(chance: random.Random) -> Workload:
    """Return three slow rises, in five minutes each from nothing to 14 requests a second, and a sudden end of each."""
    return _varying(lambda at_s: 14.0 * (at_s % 300.0) / 300.0, 14.0, SHORT_S, CHATS, chance)


def squares(chance: random.Random) -> Workload:
    """Return five minutes at 1 request a second and five minutes at 10, three times."""
    return _varying(lambda at_s: 10.0 if at_s % 600.0 >= 300.0 else 1.0, 10.0, LONG_S, CHATS, chance)


def tails(chance: random.Random) -> Workload:
    """Return answers with a heavy tail: most have under 150 tokens, one in 250 above 8,000 (Pareto)."""
    load = poisson(4.0, SHORT_S, CHATS, chance)
    answers = [min(round(80 * chance.paretovariate(1.2)), 16_000) for _ in load.arrival_s]
    return Workload(load.arrival_s, load.prompt_tokens, answers)


def giants(chance: random.Random) -> Workload:
    """Return chats, and every ten seconds a prompt of 24,000 tokens."""
    every_s = [10.0 * number + 5.0 for number in range(int(SHORT_S / 10.0))]
    huge = Workload(every_s, [24_000] * len(every_s), [200] * len(every_s))
    return _together(normal(chance), huge)


def crowd(chance: random.Random) -> Workload:
    """Return an hour with a request every five minutes, then a crowd: 15 a second, fewer and fewer for ten minutes."""

    def rate(at_s: float) -> float:
        return 1.0 / 300.0 if at_s < HOUR_S else 15.0 * math.exp((HOUR_S - at_s) / 200.0)

    return _varying(rate, 15.0, HOUR_S + 600.0, CHATS, chance)


def classes(chance: random.Random) -> Workload:
    """Return agents with long prompts and writers of long answers, now more of the ones, now of the others."""

    def agents(at_s: float) -> float:
        return 2.0 * math.sin(math.pi * at_s / 400.0) ** 2

    of_agents = _varying(agents, 2.0, 1200.0, AGENTS, chance)
    return _together(of_agents, _varying(lambda at_s: 2.0 - agents(at_s), 2.0, 1200.0, WRITERS, chance))


SHAPES: dict[str, Callable[[random.Random], Workload]] = {
    load.__name__: load for load in (ramps, squares, tails, giants, crowd, classes)
}
DRAWN = {"normal": normal, "waves": waves} | SHAPES


def _varying(
    rate: Callable[[float], float], most: float, seconds: float, lengths: Drawn, chance: random.Random
) -> Workload:
    """Return a Poisson process of a rate that varies up to `most`."""
    made = poisson(most, seconds, lengths, chance)
    kept = [index for index, at_s in enumerate(made.arrival_s) if chance.random() * most < rate(at_s)]
    columns = (made.arrival_s, made.prompt_tokens, made.output_tokens)
    return Workload(*([column[index] for index in kept] for column in columns))


def _together(*loads: Workload) -> Workload:
    rows = sorted(
        row for load in loads for row in zip(load.arrival_s, load.prompt_tokens, load.output_tokens, strict=True)
    )
    return Workload(*(list(column) for column in zip(*rows, strict=True)))
