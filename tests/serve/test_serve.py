"""What an operator relies on in `melld serve`: its start, its workers' lives, its end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from melld.daemon.preflight import WHAT_A_MODEL_IS
from tests.migrate.live import GREEDY, Operator, Stream
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.serve.manager import forget_heard, hear_until, manager_at
from tests.worker_faults import slowed

SOON_STEADY = ("--set", "health.steady_after_s=0")
TOO_FAST = ("--set", "targets.itl_ms=0.01", "--set", f"targets.ttft_s={PATIENCE_S}")
"""A pace that no worker has.  First tokens may be late on a slow machine, against which another worker does help."""
QUESTION = [{"role": "user", "content": "Tell me about block tables."}]


@contextlib.asynccontextmanager
async def client_of(daemon: DaemonProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def answer(client: openai.AsyncOpenAI, seed: int, max_tokens: int) -> str:
    stream = await client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        max_tokens=max_tokens,
        seed=seed,
        temperature=0.9,
        stream=True,  # type: ignore[arg-type]
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or read
        return True


async def until(condition: Any, deadline_s: float = PATIENCE_S) -> None:
    """Check again and again until it holds."""
    async with asyncio.timeout(deadline_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  another process: asking is the only way
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """The service manager of the daemon to be harmed."""
    with manager_at(tmp_path_factory.mktemp("manager") / "notify") as manager:
        yield manager


@pytest.fixture(scope="module")
def own(demo_model: Path, manager: socket.socket) -> Iterator[DaemonProcess]:
    """A daemon to be harmed."""
    flags = ("--device", "cpu:2", "--kv-bytes", "64MiB", "--set", "server.drain_s=1", *SOON_STEADY, *TOO_FAST)
    told = {"NOTIFY_SOCKET": manager.getsockname()}
    with DaemonProcess(demo_model, *flags, environment=told, harmable=True) as process:
        yield process.wait_ready()


class TestTargets:
    def test_an_unreachable_pace_wakes_no_further_worker(self, own: DaemonProcess) -> None:
        """More workers would not help: all are served on one, and the other stays asleep."""
        operator, streams = Operator(own), []
        with slowed(own.faults):
            for _ in range(3):
                streams.append(Stream(own, GREEDY))
                streams[-1].wait_chunks(12)
            workers = [one["worker"] for stream in streams for one in operator.requests_of(stream)]
            others = [worker for worker in operator.status()["workers"] if worker["worker"] not in workers]
        assert len(workers) == 3
        assert [worker["why"].partition(";")[0] for worker in others] == ["not needed"]
        answers = [stream.result() for stream in streams]
        assert answers[0] == answers[1] == answers[2]
        assert answers[0].usage["completion_tokens"] == GREEDY["max_tokens"]


class TestWorkersLives:
    async def test_a_killed_worker_s_streams_go_on_with_the_same_tokens(self, own: DaemonProcess) -> None:
        """A crash costs a client a short pause, not its answer."""
        async with client_of(own) as client:
            unharmed = await asyncio.gather(*(answer(client, seed, 50) for seed in range(4)))

            def is_decoding() -> bool:
                requests = own.status()["requests"]
                return len(requests) == 4 and all(request["output_tokens"] > 10 for request in requests)

            with slowed(own.faults):
                harmed = asyncio.gather(*(answer(client, seed, 50) for seed in range(4)))
                await until(is_decoding)
                status = own.status()
                busy = status["requests"][0]["worker"]
                os.kill(next(one["pid"] for one in status["workers"] if one["worker"] == busy), signal.SIGKILL)
            assert await harmed == unharmed

    async def test_a_killed_worker_comes_back(self, own: DaemonProcess) -> None:
        """The daemon heals by itself."""

        def ready() -> list[Any]:
            return [worker for worker in own.status()["workers"] if worker["state"] == "ready"]

        await until(lambda: bool(ready()))  # the test before may have killed the other
        victim = ready()[-1]
        os.kill(victim["pid"], signal.SIGKILL)

        def is_back() -> bool:
            back = [worker for worker in ready() if worker["worker"] == victim["worker"]]
            return bool(back and back[0]["pid"] != victim["pid"] and back[0]["restarts"] >= 1)

        await until(is_back)

    async def test_a_stop_signal_lets_requests_end_then_tells_the_rest(
        self, own: DaemonProcess, manager: socket.socket
    ) -> None:
        """SIGTERM drains to its deadline; a cut stream says so, to the manager too; the exit code is 0."""
        async with client_of(own) as client:
            with slowed(own.faults):
                short = asyncio.create_task(answer(client, 1, 5))
                long = asyncio.create_task(answer(client, 2, 10_000))
                await until(lambda: any(r["output_tokens"] > 10 for r in own.status()["requests"]))
                pids = [worker["pid"] for worker in own.status()["workers"] if worker["pid"]]
                forget_heard(manager)
                own.process.send_signal(signal.SIGTERM)
                assert await short
                with pytest.raises(openai.APIError):
                    await long
                assert await asyncio.to_thread(own.wait_end) == 0
            hear_until(manager, "STOPPING=1")
            await until(lambda: all(is_gone(pid) for pid in pids))


class TestEnds:
    def test_a_bad_engine_argument_ends_the_start_with_one_clear_line(self, demo_model: Path) -> None:
        """A typo gets an explanation, not a traceback."""
        wrong = ("--set", "model.vllm.max_model_length=3")
        with DaemonProcess(demo_model, "--device", "cpu:1", *wrong) as process:
            assert process.wait_end() == 2
        why = "vLLM has no such option; did you mean 'max_model_len'?"
        assert process.lines[-1:] == [f"melld serve: [model.vllm] max_model_length: {why}"]

    def test_a_directory_without_a_model_ends_the_start_with_one_clear_line(self, tmp_path: Path) -> None:
        """So does a wrong path."""
        with DaemonProcess(tmp_path) as process:
            assert process.wait_end() == 2
        assert process.lines == [f"melld serve: [model] path: {tmp_path} has no config.json: {WHAT_A_MODEL_IS}"]

    def test_a_corrupt_model_ends_the_start_with_its_reason(self, demo_model: Path, tmp_path: Path) -> None:
        """Unreadable weights are named, and the exit code says failed."""
        for file in demo_model.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "model.safetensors").write_bytes(b"no weights")
        with DaemonProcess(tmp_path, "--device", "cpu:1") as process:
            assert process.wait_end() == 1
        assert process.lines[-1].startswith("melld serve: worker w0 on cpu:0 failed to start: ")

    def test_a_taken_port_is_reported_at_once(self, demo_model: Path) -> None:
        """Two daemons do not fight over a port."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with DaemonProcess(demo_model, "--port", str(port)) as process:
                assert process.wait_end() == 1, "it may be free later: a service manager may try again"
        assert process.lines == [f"melld serve: cannot listen on 127.0.0.1:{port}: Address already in use"]


def test_the_daemon_s_first_line_comes_before_importing_torch() -> None:
    """`melld status` and `check-config` start at once: the package itself brings no torch along."""
    code = "import sys, json, melld.driver.driver, melld.engine.fleet.fleet; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
