"""One daemon for all faults that it survives, and one with little room."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.checker import Subject
from tests.serve.daemon_process import DaemonProcess

KEYS = ("key-of-the-first", "key-of-the-second")
QUEUED, DEADLINE_S = 6, 6.0
SILENCE_S = 3.0
"""A worker that answers no ping for so long is hung."""


def start(model: Path, directory: Path, *flags: str) -> Subject:
    """Start a daemon that logs its decisions and whose workers can be harmed at a named point."""
    faults = directory / "faults"
    faults.mkdir()
    decisions = directory / "decisions.jsonl"
    log = ("--set", f'scheduler.decision_log="{decisions}"', "--set", "server.drain_s=1")
    daemon = DaemonProcess(model, *flags, *log, environment={"MELLD_FAULTS": str(faults)})
    return Subject(daemon, model, decisions, faults)


@pytest.fixture(scope="package")
def subject(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Two workers under a policy that never moves requests.  Its end is judged too."""
    flags = ["--device", "cpu:2", "--kv-bytes", "32MiB", "--set", 'scheduler.policy="most-free"']
    flags += ["--set", "model.vllm.max_num_batched_tokens=512", "--set", "idle.sleep_after_s=inf"]
    flags += ["--set", f"health.ping_timeout_s={SILENCE_S}", "--set", "health.steady_after_s=0"]
    found = start(demo_model, tmp_path_factory.mktemp("subject"), *flags)
    with found.daemon:
        found.daemon.wait_ready()
        yield found
        assert found.judge_end() == []


@pytest.fixture(scope="package")
def crowded(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """One worker with room for three requests of a thousand tokens, a short queue, and two keys."""
    directory = tmp_path_factory.mktemp("crowded")
    model = Path(shutil.copytree(demo_model, directory / "demo"))
    (directory / "keys").write_text("\n".join(KEYS))
    flags = ["--device", "cpu:1", "--kv-bytes", "4MiB", "--api-key-file", str(directory / "keys")]
    flags += ["--set", f"server.max_queued_requests={QUEUED}", "--set", f"server.queue_deadline_s={DEADLINE_S}"]
    flags += ["--set", "server.keep_alive_comment_s=1", "--set", "idle.sleep_after_s=inf"]
    flags += ["--set", "health.ping_timeout_s=60"]  # it is stopped for a while, not hung
    found = start(model, directory, *flags)
    with found.daemon:
        found.daemon.wait_ready()
        yield found
        assert found.judge_end() == []
