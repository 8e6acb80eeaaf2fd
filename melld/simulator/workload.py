"""Workloads: arrivals with prompt and output lengths, from files or from a seeded generator.

Owns the file schema (CSV with a header line, plain or gzip: `arrival_s`, `prompt_tokens`, `output_tokens`; a file of
lengths lacks the first; `priority` may be missing).  The scheduler never sees `output_tokens`.
"""

import bisect
import csv
import gzip
import math
import pathlib
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple

import msgspec
import numpy as np

from melld.errors import ConfigError

GZIP_MAGIC = b"\x1f\x8b"
MOST_TOKENS = 10**9
LONGEST_S = 10**9
"""Times of day in seconds since 1970 are longer, and a simulation would first go through all of them."""
TEXT = "utf-8-sig"
"""As spreadsheets write it, too: with a mark at the beginning."""


class Lengths(NamedTuple):
    """Tokens of one request's prompt and answer."""

    prompt_tokens: int
    output_tokens: int


class Workload(msgspec.Struct, frozen=True):
    """Columns of equal length; `arrival_s` ascends from zero or later.  `priority`: empty if it is 0 for all."""

    arrival_s: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    priority: list[int] = []

    @classmethod
    def of(cls, requests: Sequence[tuple[float, Lengths]]) -> "Workload":
        """Return the workload of requests that arrive at these times with these lengths."""
        prompts, outputs = [one.prompt_tokens for _, one in requests], [one.output_tokens for _, one in requests]
        return cls([at_s for at_s, _ in requests], prompts, outputs)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def limited(self, most_tokens: int) -> "Workload":
        """Return the workload with answers cut at `most_tokens` per request, as by vLLM's `max_model_len`.

        A longer prompt stays as it is: the scheduler refuses it.
        """
        room = most_tokens - np.array(self.prompt_tokens, dtype=np.int64)
        output = np.maximum(1, np.minimum(np.array(self.output_tokens, dtype=np.int64), room)).tolist()
        return msgspec.structs.replace(self, output_tokens=output)

    def scaled(self, factor: float) -> "Workload":
        """Return the workload with all lengths times the factor, from one token to `MOST_TOKENS` each."""
        return Workload(
            self.arrival_s,
            [_tokens(tokens * factor) for tokens in self.prompt_tokens],
            [_tokens(tokens * factor) for tokens in self.output_tokens],
            self.priority,
        )

    def stretched(self, rate_per_s: float) -> "Workload":
        """Return the same arrivals, slowed down or sped up to the given mean rate."""
        factor = len(self) / rate_per_s / max(self.arrival_s[-1], 1e-9)
        return msgspec.structs.replace(self, arrival_s=[at_s * factor for at_s in self.arrival_s])

    def until(self, seconds: float) -> "Workload":
        """Return the arrivals before `seconds`."""
        count = bisect.bisect_left(self.arrival_s, seconds)
        return Workload(*(column[:count] for column in msgspec.structs.astuple(self)))

    def thinned(self, part: float, chance: random.Random) -> "Workload":
        """Return the workload with each request kept with probability `part`."""
        kept = [index for index in range(len(self)) if chance.random() < part]
        columns = msgspec.structs.astuple(self)
        return Workload(*([column[index] for index in kept if column] for column in columns))

    def with_lengths(self, lengths: "LogNormal | Sequence[Lengths]", chance: random.Random) -> "Workload":
        """Return the same arrivals with new lengths, drawn from `lengths`."""
        drawn = Workload.of([(at_s, draw(lengths, chance)) for at_s in self.arrival_s])
        return msgspec.structs.replace(drawn, priority=self.priority)

    def with_high(self, part: float, chance: random.Random) -> "Workload":
        """Return the workload with each request of high priority with probability `part`, else of normal."""
        return msgspec.structs.replace(self, priority=[-int(chance.random() < part) for _ in self.arrival_s])


class LogNormal(msgspec.Struct, frozen=True):
    """Independent log-normal lengths: a median and a sigma of the logarithm for prompts and for answers.

    The defaults give means of about 70 and 215 tokens, as published for one-turn chat.
    """

    prompt_median: float = 34.0
    prompt_sigma: float = 1.2
    output_median: float = 143.0
    output_sigma: float = 0.9

    def draw(self, chance: random.Random) -> Lengths:
        """Draw one request's lengths."""
        prompt = chance.normalvariate(math.log(self.prompt_median), self.prompt_sigma)
        output = chance.normalvariate(math.log(self.output_median), self.output_sigma)
        most = math.log(MOST_TOKENS)
        return Lengths(_tokens(math.exp(min(prompt, most))), _tokens(math.exp(min(output, most))))


def draw(lengths: LogNormal | Sequence[Lengths], chance: random.Random) -> Lengths:
    """Draw one request's lengths, from the distribution or (with replacement) from the list."""
    return lengths.draw(chance) if isinstance(lengths, LogNormal) else chance.choice(lengths)


def parse_lengths(text: str) -> LogNormal | list[Lengths]:
    """Parse `lognormal`, `lognormal:PROMPT_MEDIAN,SIGMA,OUTPUT_MEDIAN,SIGMA`, or the path of a file of lengths.

    Raises:
        ConfigError: the numbers are not four positive ones, or the file cannot be used.
    """
    kind, _, numbers = text.partition(":")
    if kind != "lognormal":
        return read_lengths(pathlib.Path(text))
    if not numbers:
        return LogNormal()
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    if len(values) != 4 or not all(0 < value < MOST_TOKENS for value in values):
        raise ConfigError("--lengths", f"{text!r}: expected lognormal:PROMPT_MEDIAN,SIGMA,OUTPUT_MEDIAN,SIGMA")
    return LogNormal(*values)


def poisson(
    rate_per_s: float, seconds: float, lengths: LogNormal | Sequence[Lengths], chance: random.Random
) -> Workload:
    """Return the arrivals of a Poisson process until `seconds`, each with lengths drawn from `lengths`."""
    return _renewal(lambda: chance.expovariate(rate_per_s), seconds, lengths, chance)


def gamma(
    rate_per_s: float, variation: float, seconds: float, lengths: LogNormal | Sequence[Lengths], chance: random.Random
) -> Workload:
    """Return arrivals as `poisson` does, in bursts: the times between them have a Gamma distribution.

    `variation`: the ratio of their standard deviation to their mean; 1 is a Poisson process.
    """
    shape = variation**-2
    return _renewal(lambda: chance.gammavariate(shape, 1 / (shape * rate_per_s)), seconds, lengths, chance)


def _renewal(
    next_s: Callable[[], float], seconds: float, lengths: LogNormal | Sequence[Lengths], chance: random.Random
) -> Workload:
    requests = []
    at_s = next_s()
    while at_s < seconds:
        requests.append((at_s, draw(lengths, chance)))
        at_s += next_s()
    return Workload.of(requests)


def read_trace(path: pathlib.Path) -> Workload:
    """Return the arrivals of a trace file.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or has an invalid line; the error names file and line.
    """
    requests, priority = list[tuple[float, Lengths]](), list[int]()
    last_s = 0.0
    for line, row in _rows(path, ("arrival_s", "prompt_tokens", "output_tokens"), "priority"):
        try:
            at_s, lengths = float(row[0]), _lengths(row[1], row[2])
            priority += map(int, row[3:])
        except ValueError as error:
            raise ConfigError(f"{path}:{line}", f"not a request: {error}") from error
        if not last_s <= at_s < math.inf:
            raise ConfigError(f"{path}:{line}", f"arrival_s {row[0]} is earlier than the line above, or not a time")
        if at_s >= LONGEST_S:
            raise ConfigError(f"{path}:{line}", f"arrival_s {row[0]} must count from the trace's beginning: a date?")
        last_s = at_s
        requests.append((at_s, lengths))
    if not requests:
        raise ConfigError(str(path), "has no requests")
    return msgspec.structs.replace(Workload.of(requests), priority=priority)


def read_lengths(path: pathlib.Path) -> list[Lengths]:
    """Return the rows of a file of lengths; a trace works too.

    Raises:
        ConfigError: as for `read_trace`.
    """
    found = []
    for line, row in _rows(path, ("prompt_tokens", "output_tokens")):
        try:
            found.append(_lengths(row[0], row[1]))
        except ValueError as error:
            raise ConfigError(f"{path}:{line}", f"not a pair of lengths: {error}") from error
    if not found:
        raise ConfigError(str(path), "has no lengths")
    return found


def _tokens(length: float) -> int:
    return max(1, round(min(length, MOST_TOKENS)))


def _lengths(prompt: str, output: str) -> Lengths:
    lengths = Lengths(int(prompt), int(output))
    if not all(0 <= tokens <= MOST_TOKENS for tokens in lengths):
        raise ValueError(f"token counts must lie in 0..{MOST_TOKENS}: {prompt}, {output}")
    return Lengths(max(1, lengths.prompt_tokens), max(1, lengths.output_tokens))


def _rows(path: pathlib.Path, wanted: Sequence[str], *optional: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line numbers and the texts of the wanted columns and of those optional ones that there are."""
    try:
        with _open(path) as file:
            reader = csv.reader(file)
            header = next(reader, [])
            missing = [name for name in wanted if name not in header]
            if missing:
                raise ConfigError(str(path), f"lacks the column {', '.join(missing)} in its header line")
            places = [header.index(name) for name in (*wanted, *optional) if name in header]
            for row in reader:
                if not row:
                    continue
                if len(row) <= max(places):
                    raise ConfigError(f"{path}:{reader.line_num}", "has too few columns")
                yield reader.line_num, [row[place] for place in places]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(str(path), f"cannot be read: {why}") from error


def _open(path: pathlib.Path) -> IO[str]:
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    return gzip.open(path, "rt", encoding=TEXT, newline="") if zipped else path.open(encoding=TEXT, newline="")
