"""`melld serve --cluster`: a daemon with workers on Ray nodes, whose failures clients do not notice."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import OTHER, RayNodes
from tests.faults.checker import Subject
from tests.faults.conftest import start

pytestmark = pytest.mark.long
TOKENS = 500
"""They last longer than the loss of a machine takes to be seen."""
PROMPTS = ["The sea", "A lamp", "Nobody", "In winter"]


@pytest.fixture(scope="module")
def among(nodes: RayNodes, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A daemon with a worker on each of two machines."""
    flags = ["--cluster", nodes.address, "--device", "cpu", "--set", "cluster.min_machines=2"]
    flags += ["--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf"]
    found = start(demo_model, tmp_path_factory.mktemp("among"), *flags)
    with found.daemon:
        found.daemon.wait_ready()
        yield found


def ask(subject: Subject, words: str) -> dict[str, object]:
    return {"prompt": words, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def test_streams_go_on_when_a_machine_is_lost(nodes: RayNodes, among: Subject) -> None:
    """Exactly, on any worker; the machine's processes end, and it comes back."""
    bodies = [ask(among, words) for words in PROMPTS]
    for body in bodies:
        among.unharmed(body)
    among.until(lambda status: all(worker["state"] == "ready" for worker in status["workers"]))
    readers = [among.read(body) for body in bodies]
    for reader in readers:
        reader.wait_chunks(5)
    lost = {worker["worker"] for worker in among.status()["workers"] if worker["device"].startswith(OTHER)}
    assert lost & {among.worker_of(reader) for reader in readers}
    agent = nodes.of_node(OTHER, "melld: agent")
    os.kill(nodes.of_node(OTHER, "ray::AgentActor"), signal.SIGKILL)
    among.daemon.wait_for(f"machine {OTHER} is lost")
    assert all(reader.is_alive() for reader in readers)
    assert [reader.wait_end().ends for reader in readers] == [["length"]] * len(readers)
    assert [reader.text for reader in readers] == [among.unharmed(body) for body in bodies]
    among.until(lambda status: all(worker["state"] == "ready" for worker in status["workers"]))
    assert agent not in nodes.processes("melld: agent")


def test_streams_go_on_without_launcher_and_head(nodes: RayNodes, among: Subject) -> None:
    """Ray decides nothing that a running request needs.  Then the daemon ends cleanly, and leaves nothing behind."""
    readers = [among.read(ask(among, words)) for words in PROMPTS]
    for reader in readers:
        reader.wait_chunks(5)
    for name in ("melld: launcher", "gcs_server"):
        for pid in nodes.processes(name):
            os.kill(pid, signal.SIGKILL)
    assert [reader.wait_end().text for reader in readers] == [among.unharmed(reader.body) for reader in readers]
    assert among.judge_end() == []
    shutil.rmtree(among.faults)
