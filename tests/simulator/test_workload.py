"""Workloads: files are read exactly or refused in one clear line; generated load matches its parameters and seed."""

import gzip
import pathlib
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.errors import ConfigError
from melld.simulator.workload import (
    MOST_TOKENS,
    Lengths,
    LogNormal,
    Workload,
    gamma,
    parse_lengths,
    poisson,
    read_lengths,
    read_trace,
)

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_bytes(text.encode())
    return path


def test_a_trace_is_read_exactly(tmp_path: pathlib.Path) -> None:
    """Plain, as a spreadsheet writes it, or gzip; columns in any order, further columns ignored."""
    plain = write(tmp_path / "plain.csv", "\ufeff" + HEADER + "0.0,10,20\n1.5,30,0\n")
    zipped = tmp_path / "zipped"
    zipped.write_bytes(gzip.compress(b"note,output_tokens,arrival_s,prompt_tokens\nx,20,0.0,10\nx,0,1.5,30\n"))
    assert read_trace(plain) == read_trace(zipped) == Workload([0.0, 1.5], [10, 30], [20, 1])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "lacks the column arrival_s, prompt_tokens, output_tokens"),
        ("arrival_s,prompt_tokens\n", "lacks the column output_tokens"),
        (HEADER, "has no requests"),
        (HEADER + "0,1\n", ":2: has too few columns"),
        (HEADER + "0,1,x\n", ":2: not a request"),
        (HEADER + "0,1,-5\n", ":2: not a request: token counts must lie in"),
        (HEADER + "0,1,1e3\n", ":2: not a request"),
        (HEADER + "nan,1,1\n", ":2: arrival_s nan"),
        (HEADER + "inf,1,1\n", ":2: arrival_s inf"),
        (HEADER + "2,1,1\n1,1,1\n", ":3: arrival_s 1 is earlier"),
        (HEADER + "1795517876,1,1\n", ":2: arrival_s 1795517876 must count from the trace's beginning: a date?"),
        (HEADER + "0,1," + "9" * 5000 + "\n", ":2: not a request"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: pathlib.Path, text: str, why: str) -> None:
    """The message alone tells the file's author how to correct it."""
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    assert why in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08garbage", b"\x1f\x8b", b"\xff\xfe\x00\x00", b"\x00" * 100])
def test_a_file_that_is_no_table_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
    """A corrupt download is an error message, not a traceback."""
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="bad"):
        read_trace(path)


@given(content=st.binary(max_size=300), zipped=st.booleans())
def test_no_content_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes, zipped: bool) -> None:
    """Any bytes at all are either a workload or a ConfigError."""
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_bytes(gzip.compress(HEADER.encode() + content) if zipped else HEADER.encode() + content)
    try:
        read = read_trace(path)
    except ConfigError:
        return
    assert read.arrival_s == sorted(read.arrival_s)
    assert min(read.prompt_tokens + read.output_tokens) >= 1


def test_a_missing_file_or_a_folder_is_refused(tmp_path: pathlib.Path) -> None:
    """The commonest mistake of all gets the plainest words."""
    for path in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_lengths(path)


@given(st.integers(0, 2**32))
def test_a_seed_determines_the_workload(seed: int) -> None:
    """The same seed draws the same load; another seed another."""
    first, again, other = (poisson(5.0, 20.0, LogNormal(), random.Random(one)) for one in (seed, seed, seed + 1))
    assert first == again != other


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    """An exponential gap has a mean and a deviation of one over the rate."""
    load = poisson(4.0, 5000.0, [Lengths(3, 4)], random.Random(1))
    gaps = [later - earlier for earlier, later in zip(load.arrival_s, load.arrival_s[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert set(load.prompt_tokens) == {3}


def test_lengths_are_scaled_and_limited() -> None:
    """The paper's x10, and vLLM's limit: answers stop early, over-long prompts stay for the scheduler to refuse."""
    scaled = Workload([0.0, 1.0, 2.0], [10, 99, 30], [20, 5, 1]).scaled(10)
    assert scaled == Workload([0.0, 1.0, 2.0], [100, 990, 300], [200, 50, 10])
    assert scaled.limited(250).output_tokens == [150, 1, 1]
    assert scaled.limited(250).prompt_tokens == [100, 990, 300]
    assert Workload([0.0], [10], [20]).scaled(1e308) == Workload([0.0], [MOST_TOKENS], [MOST_TOKENS])
    assert LogNormal(prompt_sigma=1e8).draw(random.Random(1)).prompt_tokens == MOST_TOKENS


def test_a_trace_is_stretched_thinned_and_cut() -> None:
    """Real arrivals at another rate keep their bursts."""
    load = Workload([0.0, 1.0, 10.0, 20.0], [1, 2, 3, 4], [1, 2, 3, 4])
    assert load.stretched(0.1).arrival_s == [0.0, 2.0, 20.0, 40.0]
    assert load.until(10.0) == Workload([0.0, 1.0], [1, 2], [1, 2])
    thinned = load.thinned(0.5, random.Random(3))
    assert 0 < len(thinned) < 4
    assert set(zip(*(thinned.arrival_s, thinned.output_tokens), strict=True)) < {
        (0.0, 1),
        (1.0, 2),
        (10.0, 3),
        (20.0, 4),
    }


def test_log_normal_lengths_are_given_on_the_command_line() -> None:
    """A workload that needs no file at all."""
    assert parse_lengths("lognormal") == LogNormal()
    assert parse_lengths("lognormal:10,1,20,0.5") == LogNormal(10.0, 1.0, 20.0, 0.5)
    for wrong in ("lognormal:", "lognormal:1,2,3", "lognormal:a,b,c,d", "lognormal:0,1,1,1", "lognormal:nan,1,1,1"):
        if wrong == "lognormal:":
            assert parse_lengths(wrong) == LogNormal()
            continue
        with pytest.raises(ConfigError, match="PROMPT_MEDIAN"):
            parse_lengths(wrong)


def test_gamma_arrivals_have_the_requested_rate_and_bursts() -> None:
    """A variation above 1 is bursts at the same mean rate; of 1 it is a Poisson process."""
    for variation in (1.0, 4.0):
        made = gamma(20.0, variation, 5_000.0, LogNormal(), random.Random(1))
        gaps = np.diff([0.0, *made.arrival_s])
        assert len(made) / 5_000.0 == pytest.approx(20.0, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_priorities_stay_with_their_requests(tmp_path: pathlib.Path) -> None:
    """A trace may name them, some may be drawn, and no change of lengths or times loses one."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,priority\n0,10,1,0\n1,20,2,-1\n2,30,3,4\n")
    trace = read_trace(path)
    assert trace.priority == [0, -1, 4]
    chance = random.Random(2)
    for same in (trace.limited(5), trace.scaled(2), trace.stretched(1.0), trace.with_lengths(LogNormal(), chance)):
        assert same.priority == [0, -1, 4]
    assert trace.until(1.5).priority == [0, -1]
    kept = trace.thinned(0.5, chance)
    assert kept.priority == [trace.priority[trace.prompt_tokens.index(tokens)] for tokens in kept.prompt_tokens]
    drawn = poisson(50.0, 100.0, LogNormal(), chance).with_high(0.1, chance).priority
    assert set(drawn) == {0, -1}
    assert drawn.count(-1) / len(drawn) == pytest.approx(0.1, abs=0.02)
