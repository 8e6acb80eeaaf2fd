"""`melld simulate`: what it prints, what it writes, and what it refuses."""

import json
import pathlib

import pytest

from melld.cli import main
from melld.simulator.experiment import ALL_POLICIES
from tests.decisions.audit import Auditor
from tests.effort import is_long

LOAD = ["simulate", "--poisson", "2", "--lengths", "lognormal", "--length-factor", "4", "--seconds", "60"]


def test_the_table_has_a_column_per_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that anybody runs: policies side by side."""
    assert main([*LOAD, "--policy", "best-fit,worst-fit"]) == 0
    printed = capsys.readouterr().out
    assert "best-fit" in printed
    assert "worst-fit" in printed
    assert "ratio to the lower bound" in printed


def test_equal_seeds_print_equal_bytes(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Scripts compare; so the JSON is the same to the byte, and another seed is another run."""
    printed = []
    brief = [*LOAD[:-1], "60" if is_long() else "5"]
    for seed in ("1", "1", "2"):
        assert main([*brief, "--json", "--seed", seed, "--policy", ",".join(ALL_POLICIES)]) == 0
        printed.append(capsysbinary.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    reports = json.loads(printed[0])["policies"]
    assert [report["policy"] for report in reports] == list(ALL_POLICIES)


def test_the_decision_log_can_be_audited(tmp_path: pathlib.Path) -> None:
    """The flag writes what the independent auditor reads."""
    log = tmp_path / "decisions.jsonl"
    assert main([*LOAD, "--policy", "load-balance", "--link-rate", "1GiB", "--decision-log", str(log)]) == 0
    with log.open("rb") as lines:
        auditor = Auditor().read(lines)
    assert auditor.faults == []
    assert auditor.kinds["finish"] > 50


def test_a_decision_log_can_be_replayed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log reproduces its decisions; another policy shows the first difference."""
    log = tmp_path / "decisions.jsonl"
    flags = ["--link-rate", "1GiB", "--policy", "mell-plus", "--epoch-ms", "250"]
    assert main([*LOAD, *flags, "--decision-log", str(log)]) == 0
    capsys.readouterr()
    assert main(["simulate", "--replay", str(log)]) == 0
    replay = ["simulate", "--replay", str(log), "--policy"]
    assert "decisions of mell-plus: all match the log" in capsys.readouterr().out
    assert main([*replay, "best-fit", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["step"] > 0
    assert main([*replay, "best-fit,mell-plus"]) == 2
    log.write_bytes(log.read_bytes()[:-7])
    assert main(["simulate", "--replay", str(log)]) == 0, "its last line is cut off"
    capsys.readouterr()
    for broken in ('{"at": 1', '{"at": 1\n', '{"at": 1}\n', '{"at": 1, "kind": "worker", "step": 1}\n', ""):
        log.write_text(broken)
        assert main([*replay, "best-fit"]) == 1
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "required"),
        (["--poisson", "0"], "above zero"),
        (["--poisson", "1"], "requires --lengths and --seconds"),
        (["--poisson", "nan", "--lengths", "lognormal", "--seconds", "1"], "above zero"),
        (["--poisson", "1", "--trace", "x"], "not allowed with"),
        ([*LOAD[1:], "--policy", "fastest"], "'fastest' is not one of"),
        ([*LOAD[1:], "--policy", "best-fit,worst-fit", "--decision-log", "x"], "one --policy"),
        ([*LOAD[1:], "--capacity-bytes", "1GiB"], "--bytes-per-token"),
        ([*LOAD[1:], "--capacity-bytes", "1", "--bytes-per-token", "1", "--gpu", "l4"], "cannot be combined"),
        ([*LOAD[1:], "--capacity-bytes", "15", "--bytes-per-token", "1"], "less than one block"),
        ([*LOAD[1:], "--model", "llama-2-13b", "--gpu", "l4"], "does not fit"),
        ([*LOAD[1:], "--gpu", "abacus"], "neither a known card"),
        ([*LOAD[1:], "--gpus", "0"], "above zero"),
        ([*LOAD[1:], "--slots", "0"], "from 1 to"),
        ([*LOAD[1:], "--slots", "1000000000000"], "from 1 to"),
        ([*LOAD[1:], "--variation", "1e200"], "from 0.01 to 100"),
        ([*LOAD[1:], "--variation", "1e-200"], "from 0.01 to 100"),
        ([*LOAD[1:], "--failure-rate", "1"], "must be at least 0 and below 1"),
        ([*LOAD[1:], "--rate", "2"], "is for --trace"),
    ],
)
def test_nonsensical_flags_are_bad_usage(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a line that says which flag."""
    assert main(["simulate", *words]) == 2
    assert why in capsys.readouterr().err


def test_an_unusable_file_fails_with_one_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, the file and the line, no traceback."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,2\n1,one,2\n")
    for path in (trace, tmp_path / "nowhere"):
        assert main(["simulate", "--trace", str(path)]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert str(path) in said
    assert main([*LOAD, "--decision-log", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """The way in for somebody who only knows the program's name."""
    assert main(["fly"]) == 2
    assert "simulate" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert "simulate" in capsys.readouterr().out


@pytest.mark.parametrize("torn", ['{"at": "x", "kind": "arrive", "request": "a"}', '{"kind": "arrive"}', "[]", "{"])
def test_a_torn_log_fails_with_one_line(torn: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reader learns what is wrong with the file, not where melld stumbled over it."""
    log = tmp_path / "decisions.jsonl"
    log.write_text(torn + "\n")
    assert main(["why", "a", "--log", str(log)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
