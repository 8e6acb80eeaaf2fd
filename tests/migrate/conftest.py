"""A daemon whose requests are moved, and whose workers are harmed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.migrate.live import THINKS, Bench, Operator
from tests.serve.daemon_process import DaemonProcess


@pytest.fixture
def operator(daemon: DaemonProcess) -> Iterator[Operator]:
    """The operator of the file's daemon, which ends with both workers ready and idle."""
    operator = Operator(daemon)
    yield operator
    operator.wait_ready()
    operator.wait_idle()


@pytest.fixture(scope="package")  # at rest it would take 2 % of a processor to the end
def bench(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two workers under a policy that never moves requests."""
    faults = tmp_path_factory.mktemp("faults")
    flags = ["--device", "cpu:2", "--kv-bytes", "64MiB", "--set", 'scheduler.policy="most-free"']
    flags += ["--set", "idle.sleep_after_s=inf", "--set", "health.steady_after_s=0"]
    flags += ["--set", "health.ping_timeout_s=4"]  # a worker that is stopped is known to be hung so soon
    flags += ["--set", "model.vllm.max_num_batched_tokens=512"]  # a prompt of 3,000 tokens takes six steps
    flags += THINKS
    with DaemonProcess(demo_model, *flags, environment={"MELLD_FAULTS": str(faults)}) as daemon:
        bench = Bench(daemon.wait_ready(), faults)
        bench.operator.wait_linked(daemon)
        yield bench


@pytest.fixture
def left_as_it_was(bench: Bench) -> Iterator[None]:
    """The bench, without faults and with both workers ready and idle again after a test that harms them."""
    yield
    for left in bench.faults.iterdir():
        left.unlink()
    bench.operator.wait_ready()
    bench.operator.wait_idle()
