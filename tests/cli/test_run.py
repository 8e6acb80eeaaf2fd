"""`melld run` as a separate program on the daemon's control socket: the test decides what is lent."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

from melld.control.messages import Lend, Loan, LoanStep
from melld.control.server import Lasting, OpenCall
from melld.driver.lendable import NothingToLend
from tests.cli.plausible import STATUS
from tests.control.control_daemon import ControlDaemon, Operated
from tests.patience import PATIENCE_S

GPUS = ("GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-2222-3333-4444-555555555555")
PROGRAM = """
import os, select, signal, sys
print(os.getpid(), flush=True)
heard, hear = os.pipe()
os.set_blocking(hear, False)
signal.set_wakeup_fd(hear)
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda *_: None)
print("ready", flush=True)
while True:
    for source in select.select([0, heard], [], [])[0]:
        came = os.read(source, 4096)
        if source == heard:
            print(*(signal.Signals(number).name for number in came), sep="\\n", flush=True)
        elif came:
            print(came.decode(), end="", flush=True)
        else:
            sys.exit()
"""
"""Says its pid, then each signal of those named that comes, and what it is sent.

A signal comes through a pipe: a handler of Python's waits for the end of a read that has just begun.
"""


class Lender:
    """Lends at once or says why not; records requests in `asked` and ended loans in `over`."""

    def __init__(self) -> None:
        self.asked: list[Lend] = []
        self.over: SimpleQueue[str] = SimpleQueue()
        self.came = threading.Semaphore(0)
        self.refusal = ""
        self.loan = Loan(step=LoanStep.LENT, devices=("cuda:0", "cuda:1"), uuids=GPUS, workers=("w0",))

    async def lend(self, asked: Lend, call: OpenCall) -> None:
        self.asked.append(asked)
        self.came.release()
        if self.refusal:
            raise NothingToLend(self.refusal)
        await call.say(self.loan)
        await asyncio.wait({call.left})
        self.over.put("given back")


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="melld-") as parent:
        yield Path(parent) / "run"


def daemon_of(directory: Path, lender: Lender) -> ControlDaemon:
    return ControlDaemon(directory, Operated(STATUS, {"lend": Lasting(Lend, lender.lend)}))


@pytest.fixture
def daemon(directory: Path, lender: Lender) -> Iterator[ControlDaemon]:
    with daemon_of(directory, lender) as running:
        yield running


class Run:
    """A `melld run` and its program's output."""

    def __init__(self, directory: Path, *words: str, flags: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "melld", "run", "--runtime-directory", str(directory), *flags, "--", *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begun(self) -> int:
        """Return the program's pid once it can receive signals."""
        pid = int(self.line())
        assert self.line() == "ready"
        return pid

    def says(self, text: str) -> bool:
        """Whether a further line of its own has this in it; waits for that line."""
        assert self.process.stderr is not None
        return any(text in line for line in self.process.stderr)

    def end(self) -> tuple[int, str, str]:
        """Return the exit code and remaining output once the input has ended."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


def program(*signals: str) -> tuple[str, ...]:
    return sys.executable, "-c", PROGRAM, *signals


def test_the_program_sees_its_devices_and_its_exit_code_is_returned(
    daemon: ControlDaemon, lender: Lender, directory: Path
) -> None:
    """UUIDs, since numbers change where some GPUs are hidden; scripts go on or stop as without melld."""
    code, out, err = Run(directory, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $MELLD_DEVICES; exit 7").end()
    assert (code, out) == (7, f"{','.join(GPUS)} cuda:0,cuda:1\n")
    assert "cuda:0, cuda:1: free after" in err
    assert lender.over.get(timeout=PATIENCE_S) == "given back"
    assert (lender.asked[0].count, lender.asked[0].devices, lender.asked[0].held_s) == (1, (), None)
    assert lender.asked[0].command == "sh"


def test_named_devices_are_requested(daemon: ControlDaemon, lender: Lender, directory: Path) -> None:
    """With `--device`, as in `melld serve`."""
    flags = ("--device", "cuda:0,1", "--wait", "5", "--all")
    assert Run(directory, "true", flags=flags).end()[0] == 0
    [asked] = lender.asked
    assert (asked.devices, asked.wait_s, asked.even_last) == (("cuda:0", "cuda:1"), 5.0, True)


def test_the_program_uses_the_terminal_directly(daemon: ControlDaemon, directory: Path) -> None:
    """Input and output are the program's own."""
    running = Run(directory, "cat")
    assert running.process.stdin is not None
    running.process.stdin.write("one line\n")
    assert running.end()[:2] == (0, "one line\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_is_passed_on(daemon: ControlDaemon, directory: Path, name: str) -> None:
    """`kill` of `melld run` means the program, which may save its state, or live on if it wants to."""
    running = Run(directory, *program(name))
    running.begun()
    running.process.send_signal(getattr(signal, name))
    assert running.line() == name
    assert running.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_program_killed_by_a_signal_exits_with_128_plus_it(
    daemon: ControlDaemon, directory: Path, number: int
) -> None:
    """As in a shell."""
    running = Run(directory, "sleep", "1000") if number != signal.SIGKILL else Run(directory, "sh", "-c", "kill -9 $$")
    if number != signal.SIGKILL:
        wait_for_child(running.process.pid)
        running.process.send_signal(number)
    assert running.end()[0] == 128 + number


def wait_for_child(pid: int) -> int:
    """Wait until the program of a `melld run` has begun: before that, a signal ends `melld run` alone."""
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        pass
    while Path(f"/proc/{children[0]}/exe").resolve() == Path(f"/proc/{pid}/exe").resolve():
        pass
    return int(children[0])


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_stopping_and_continuing_apply_to_both(daemon: ControlDaemon, directory: Path) -> None:
    """Ctrl-Z gives the shell its terminal back, and `fg` resumes the program; the loan stays."""
    running = Run(directory, *program())
    child = running.begun()
    os.kill(running.process.pid, signal.SIGTSTP)
    _, status = os.waitpid(running.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert state_of(child) == "T"
    os.kill(running.process.pid, signal.SIGCONT)
    assert running.process.stdin is not None
    running.process.stdin.write("on\n")
    running.process.stdin.flush()
    assert running.line() == "on"
    assert running.end()[0] == 0


def test_ctrl_c_reaches_the_program_once(daemon: ControlDaemon, directory: Path) -> None:
    """The terminal sends it to both; forwarding it too would cut short a program that is saving."""
    first, second = os.openpty()
    words = [sys.executable, "-m", "melld", "run", "--runtime-directory", str(directory), "--", *program("SIGINT")]
    attached = "import os, sys, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    attached += "os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", attached, *words], stdin=second, stdout=second, stderr=second)
    os.close(second)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(first, 4096)
    os.write(first, b"\x03")
    while seen.count(b"SIGINT") < 1:
        seen += os.read(first, 4096)
    os.write(first, b"more\r")
    while seen.count(b"more") < 2:  # the terminal's echo, and the program's
        seen += os.read(first, 4096)
    os.write(first, b"\x04")
    assert process.wait(PATIENCE_S) == 0
    assert seen.count(b"SIGINT") == 1
    os.close(first)


def test_a_killed_run_ends_its_program_and_returns_its_devices(
    daemon: ControlDaemon, lender: Lender, directory: Path
) -> None:
    """`kill -9` leaves no program on a device that serves again."""
    running = Run(directory, *program())
    child = running.begun()
    running.process.kill()
    assert lender.over.get(timeout=PATIENCE_S) == "given back"
    running.end()
    while Path(f"/proc/{child}").exists() and state_of(child) != "Z":
        time.sleep(0.01)  # no child of ours: there is nothing to wait on


def test_a_program_outlives_the_daemon_and_reports_its_loan_to_the_next(directory: Path, lender: Lender) -> None:
    """Hours of training are not lost to an upgrade, and the next daemon leaves its device alone."""
    with daemon_of(directory, lender):
        running = Run(directory, *program())
        running.begun()
        lender.came.acquire()
    assert running.says("the daemon is gone")
    lender.refusal = "cuda:0 is lent to another"
    with daemon_of(directory, lender):
        assert running.says("without a loan: cuda:0 is lent to another")
        lender.refusal = ""
        assert running.says("the daemon is back")
        code, _, _ = running.end()
        assert lender.over.get(timeout=PATIENCE_S) == "given back"
    assert code == 0
    assert lender.asked[-1].devices == ("cuda:0", "cuda:1")
    assert (lender.asked[-1].held_s or 0) > 0


def test_exit_codes_tell_why_the_program_did_not_run(
    daemon: ControlDaemon, lender: Lender, directory: Path, tmp_path: Path
) -> None:
    """A script that sees 125 to 127 knows that the program has not run, as with `env` and `timeout`."""
    code, _, err = Run(directory, "no-such-program").end()
    assert (code, lender.asked, "program not found: 'no-such-program'" in err) == (127, [], True)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o700)
    assert Run(directory, str(broken)).end()[0] == 126
    lender.refusal = "cuda:1 is lent to `train` (pid 7, ann)"
    code, out, err = Run(directory, "echo", "never").end()
    assert (code, out, err) == (125, "", f"melld run: {lender.refusal}\n")
    code, out, err = Run(tmp_path, "echo", "never").end()
    assert (code, out, "no daemon running" in err) == (125, "", True)


def test_the_reason_for_waiting_is_shown(daemon: ControlDaemon, lender: Lender, directory: Path) -> None:
    """Somebody at the terminal sees why nothing happens yet."""

    async def slowly(_asked: Lend, call: OpenCall) -> None:
        await call.say(Loan(step=LoanStep.WAITING, reason="w0 is the last"))
        for left in (2, 1, 1):
            await call.say(Loan(step=LoanStep.EMPTYING, workers=("w1",), left=left, moved=3 - left))
        await call.say(Loan(step=LoanStep.REFUSED, reason="none came free\x1b[2J"))

    daemon.context.operations["lend"] = Lasting(Lend, slowly)
    code, _, err = Run(directory, "true").end()
    assert code == 125
    assert err.splitlines() == [
        "melld run: waiting: w0 is the last",
        "melld run: draining w1: 2 left, 1 moved",
        "melld run: draining w1: 1 left, 2 moved",
        "melld run: none came free\\x1b[2J",
    ]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("/usr/bin/printf", "a\nb"), "printf 'a\\nb'"),
        (("env", "TOKEN=secret", "true"), "env"),
        (("echo", "train.py", "--token", "secret"), "echo train.py"),
        (("true", "\udcff"), "true '\\udcff'"),
    ],
)
def test_others_see_only_the_program_and_script_names(
    daemon: ControlDaemon, lender: Lender, directory: Path, words: tuple[str, ...], shown: str
) -> None:
    """A token among its arguments is for the program, not for everybody who can read the status."""
    assert Run(directory, *words).end()[0] == 0
    assert lender.asked[0].command == shown
