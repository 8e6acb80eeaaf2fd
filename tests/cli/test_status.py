"""`melld status`, as a process, against a real control socket: in a pipe, as JSON, and on a terminal."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from melld.control.messages import CONTROL_SOCKET
from melld.control.status import DaemonStatus
from tests.cli.here import melld_here
from tests.cli.plausible import DEFERRED, MOVING, QUEUED, RUNNING, STATUS
from tests.cli.terminal import Terminal
from tests.control.control_daemon import ControlDaemon, Operated
from tests.forked import run_melld
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="melld-") as parent:
        yield Path(parent) / "run"


@pytest.fixture
def daemon(directory: Path) -> Iterator[ControlDaemon]:
    """A control socket that answers with a plausible status."""
    with ControlDaemon(directory, Operated(STATUS)) as running:
        yield running


def status(directory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return melld_here("status", "--runtime-directory", str(directory), *words, env={**os.environ, **environment})


def with_output_tokens(tokens: int) -> DaemonStatus:
    """Return the status a little later."""
    return msgspec.structs.replace(
        STATUS, requests=(msgspec.structs.replace(RUNNING, output_tokens=tokens), *STATUS.requests[1:])
    )


def test_a_pipe_gets_whole_rows_without_colours(daemon: ControlDaemon) -> None:
    """`melld status | grep` finds whole ids and numbers, however narrow the terminal is."""
    words = ("status", "--runtime-directory", str(daemon.directory))
    done = run_melld(*words, env=os.environ | {"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    busy = rows["w0"]
    for fact in (
        "cuda:0",
        "NVIDIA H200",
        "ready",
        "▪▪▪▪□□·",
        "68.4/96 GiB",
        "48+3/256",
        "1,843",
        "127/141 GiB",
        "612 W",
    ):
        assert fact in busy
    running = rows[RUNNING.request].split()
    assert running[1:] == ["w0", "t", "decoding", "1,536", "412", "122", "MiB", "17s", "1"]
    assert rows[QUEUED.request].split()[1:4] == ["-", "-", "queued"]
    assert "its GPU has fallen off the bus" in rows["w2:"]
    assert STATUS.warnings[0] in rows["!"]
    assert "2 of 3 workers ready (1 at rest), 48 running, 1 queued, 1,843 tokens/s, 689 W" in done.stdout
    assert "awake 1.50 worker-hours, asleep 0.50; 99.0% of 1,234 in time; 2 preemptions" in done.stdout
    assert "w0: class L, 51 requests; awake for 840 s (arrival)" in done.stdout
    assert "w1: not needed for 12 s (empty)" in done.stdout
    assert f"{MOVING.request} w0 > w1, 122 MiB, overload, via kv, 0.1 s" in done.stdout
    assert f"{DEFERRED.request} w0 > w1, 1 GiB, overload, deferred, 0.2 s: the link is full" in done.stdout


def test_a_pipe_without_unicode_gets_ascii(daemon: ControlDaemon) -> None:
    """An old terminal or a log collector gets no broken letters, and no traceback."""
    words = [sys.executable, "-m", "melld", "status", "--runtime-directory", str(daemon.directory)]
    old = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=ROOT, env=old, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.isascii()) == (0, True)
    assert "====++." in done.stdout


def test_json_is_what_the_daemon_sent(daemon: ControlDaemon) -> None:
    """Scripts get the documented schema, plus what a newer daemon adds."""
    done = status(daemon.directory, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode(done.stdout, type=DaemonStatus) == STATUS
    assert json.loads(done.stdout) == json.loads(msgspec.json.encode(STATUS))


def test_watched_json_is_one_object_per_line(daemon: ControlDaemon) -> None:
    """`melld status --json --watch` feeds a recorder; it ends with the daemon, with code 3."""
    words = ["--runtime-directory", str(daemon.directory), "--json", "--watch"]
    with subprocess.Popen(
        [sys.executable, "-m", "melld", "status", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert msgspec.json.decode(process.stdout.readline(), type=DaemonStatus) == STATUS
        daemon.context.current = with_output_tokens(500)
        while msgspec.json.decode(process.stdout.readline(), type=DaemonStatus) != daemon.context.current:
            pass
        daemon.stop()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    assert "no daemon running" in said


def test_a_reader_that_has_seen_enough_is_no_error(daemon: ControlDaemon) -> None:
    """`melld status --watch | head` ends quietly."""
    words = f"--watch --runtime-directory {daemon.directory}"
    command = f"{{ {sys.executable} -m melld status {words}; echo $? >&2; }} | head -n 2"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.count("\n"), done.stderr) == (2, "0\n")


def test_no_daemon_is_code_3(directory: Path) -> None:
    """A script waits for a daemon by this code alone; a person sees where it looked."""
    done = status(directory)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"melld status: no daemon running ({directory / CONTROL_SOCKET}: no such socket): "
        "start one with `melld serve`, or set --runtime-directory\n"
    )


def test_another_schema_is_code_1(daemon: ControlDaemon) -> None:
    """A daemon of another version exists, so it is not code 3; its JSON is still available."""
    daemon.context.current = msgspec.defstruct("Other", [("schema", int)])(schema=99)
    done = status(daemon.directory)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "it may be another version of melld" in done.stderr
    assert json.loads(status(daemon.directory, "--json").stdout) == {"schema": 99}


def test_bad_usage_is_code_2(directory: Path, tmp_path: Path) -> None:
    """A wrong word and a broken file are the caller's to fix."""
    assert status(directory, "--jsn").returncode == 2
    (tmp_path / "broken.toml").write_text("[")
    assert melld_here("status", "--config", str(tmp_path / "broken.toml")).returncode == 2


def test_watch_follows_the_daemon_and_ends_with_ctrl_c(daemon: ControlDaemon) -> None:
    """Packing can be watched live; Ctrl-C restores the terminal and is no failure."""
    with Terminal("status", "--watch", "--runtime-directory", str(daemon.directory)) as terminal:
        terminal.read_until("412")
        for tokens in (4_130, 4_150):
            daemon.context.current = with_output_tokens(tokens)
            terminal.read_until(f"{tokens:,}")
        terminal.press("\x03")
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.text
        assert terminal.raw.rindex("\x1b[?1049h") < terminal.raw.rindex("\x1b[?1049l"), "the screen was given back"
        assert terminal.raw.rindex("\x1b[?25l") < terminal.raw.rindex("\x1b[?25h"), "the cursor is there again"


def test_watch_reprints_on_a_terminal_without_cursor_control(daemon: ControlDaemon) -> None:
    """Emacs' shell is one: what is printed again and again can be read, too."""
    words = ("status", "--watch", "--runtime-directory", str(daemon.directory))
    with Terminal(*words, kind="dumb") as terminal:
        terminal.read_until(RUNNING.request)
        terminal.press("\x03")
        assert terminal.exit_code() == 0
        assert "\x1b" not in terminal.raw


def test_watch_ends_with_the_daemon(daemon: ControlDaemon) -> None:
    """Nobody trusts the last picture of a dead daemon."""
    with Terminal("status", "--watch", "--runtime-directory", str(daemon.directory)) as terminal:
        terminal.read_until("412")
        daemon.stop()
        assert terminal.exit_code() == 3
        assert "no daemon running" in terminal.text[terminal.text.rindex("412") :]


def test_watch_without_a_daemon_leaves_the_screen_alone(directory: Path) -> None:
    """The reason stays readable."""
    with Terminal("status", "--watch", "--runtime-directory", str(directory)) as terminal:
        assert terminal.exit_code() == 3
        assert "\x1b[?1049h" not in terminal.raw


def test_eighty_columns_show_every_fact_of_a_worker(daemon: ControlDaemon) -> None:
    """The default terminal is enough; only ids are shortened, visibly."""
    with Terminal("status", "--runtime-directory", str(daemon.directory), columns=80) as terminal:
        assert terminal.exit_code() == 0
    lines = terminal.text.splitlines()
    assert max(map(len, lines)) <= 80
    heading = next(line for line in lines if line.startswith("Worker"))
    assert heading.split() == ["Worker", "Device", "State", "KV", "Reqs", "Tok/s", "Memory", "Power"]
    busy = next(line for line in lines if line.startswith("w0 "))
    assert " ".join(busy.split()) == "w0 cuda:0 ready ▪▪▪▪▪▪▪□·· 68.4/96 GiB 48+3/256 1,843 127 GiB 612 W"
    assert any(line.startswith("chatcmpl-8f3b") and "… " in line for line in lines)


def test_a_full_screen_counts_what_it_cannot_show(daemon: ControlDaemon) -> None:
    """A thousand requests do not push the workers off the screen."""
    many = tuple(msgspec.structs.replace(RUNNING, request=f"cmpl-{number:04}") for number in range(1000))
    daemon.context.current = msgspec.structs.replace(STATUS, requests=many, warnings=(), moves=())
    with Terminal("status", "--watch", "--runtime-directory", str(daemon.directory), lines=20) as terminal:
        terminal.read_until("more")
        terminal.press("\x03")
        assert terminal.exit_code() == 0
    picture = terminal.text[: terminal.text.index("more")].splitlines()
    shown = [line for line in picture if line.startswith("cmpl-")]
    assert picture[-1] == f"and {1000 - len(shown)} "
    assert len(picture) == 20
    assert any(line.startswith("w0 ") for line in picture)


def test_status_commands_import_nothing_heavy(daemon: ControlDaemon) -> None:
    """`melld status` answers instantly: no torch, no vLLM, not even the daemon's web server."""
    code = """
import sys
from melld.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "vllm", "transformers", "aiohttp", "asyncio", "numpy"}
print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    for words in (["status"], ["status", "--json"]):
        command = [sys.executable, "-c", code, *words, "--runtime-directory", str(daemon.directory)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stderr == "0 []\n"
