"""GPU readings through the real ctypes path, against a test library with NVML's entry points."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.errors import ConfigError
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import choose, restrict
from melld.kvstore.process_meter import with_children
from tests.patience import PATIENCE_S

SOURCE = Path(__file__).parent / "fake_nvml" / "nvml.c"
ROOT = Path(__file__).parents[2]
PIPES: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
FIRST, SECOND = "GPU-11111111-aaaa", "GPU-22222222-bbbb"


def _build(directory: Path, *flags: str) -> Path:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler to build the fake NVML library with")
    library = directory / "libnvidia-ml.so.1"
    line = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *flags, str(SOURCE), "-o", str(library)]
    subprocess.run(line, check=True)
    return directory


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("nvml"))


class Machine:
    """Two GPUs whose facts a test sets, and the process that reads them."""

    def __init__(self, library: Path, scratch: Path) -> None:
        self._state = scratch / "state"
        self._facts: dict[str, object] = {}
        self._begin()
        environment = os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_STATE": str(self._state)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvstore.fake_nvml.probe"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def renew(self) -> None:
        """Reset everything, including what the process remembers."""
        self._begin()
        self.ask("renew")

    def _begin(self) -> None:
        self._facts = {"count": 2, "topology": 20, "read": 0, "nvlink": 5}
        for index, uuid in enumerate((FIRST, SECOND)):
            gpu = {"uuid": uuid, "name": "NVIDIA Pretend 80GB", "total": 80_000, "free": 50_000, "used": 30_000}
            gpu |= {"power": 123_456, "temperature": 45, "utilisation": 37}
            self._facts |= {f"{index}.{key}": value for key, value in gpu.items()}
        self.set()

    def set(self, **facts: object) -> None:
        """Change facts (`gpu0_power=1` is GPU 0's power; None removes one) atomically, for every later call."""
        for name, value in facts.items():
            key = name.replace("gpu", "", 1).replace("_", ".") if name.startswith("gpu") else name.replace("_", ".")
            self._facts[key] = value
        lines = [f"{key} {value}\n" for key, value in self._facts.items() if value is not None]
        fresh = self._state.with_suffix(".new")
        fresh.write_text("".join(lines))
        fresh.rename(self._state)

    def ask(self, question: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ask": question, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> int:
        """End the process; return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def shared(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(library, tmp_path_factory.mktemp("machine"))
    yield made
    assert made.close() == 0, "the process that reads GPUs ends in good order, whatever they did"


@pytest.fixture
def machine(shared: Machine) -> Machine:
    """A pristine machine; its process is reused."""
    shared.renew()
    return shared


def test_gpus_are_found_with_their_uuids(machine: Machine) -> None:
    """`auto` finds what nvidia-smi shows."""
    found = machine.ask("discover")
    assert [(gpu["index"], gpu["uuid"], gpu["memory_bytes"]) for gpu in found["devices"]] == [
        (0, FIRST, 80_000),
        (1, SECOND, 80_000),
    ]
    assert found["reason"] == ""


def test_a_reading_has_every_value_in_its_unit(machine: Machine) -> None:
    """Status and metrics show watts, bytes, degrees and a share, not NVML's milliwatts and percents."""
    assert machine.ask("read", FIRST, []) == {
        "state": "ok",
        "reason": "",
        "name": "NVIDIA Pretend 80GB",
        "total_bytes": 80_000,
        "used_bytes": 30_000,
        "used_by_others_bytes": 30_000,
        "others": [],
        "power_w": 123.456,
        "temperature_c": 45,
        "utilisation": 0.37,
    }


def test_others_memory_excludes_what_our_processes_hold(machine: Machine) -> None:
    """Another program's memory shrinks a worker's capacity; the worker's own must not."""
    machine.set(gpu0_process="100 20000")
    assert machine.ask("read", FIRST, [[100]])["used_by_others_bytes"] == 10_000
    assert machine.ask("read", FIRST, [[100], [101]])["used_by_others_bytes"] is None, "hidden: unknown, not 0"
    assert machine.ask("read", FIRST, [[101]], [100])["used_by_others_bytes"] is None, "a guest stands for nobody"
    assert machine.ask("read", FIRST, [[101]], [])["others"] == [[100, 20_000]], "who is in the way"
    machine.set(gpu0_process_error=4)
    hidden = machine.ask("read", FIRST, [[100]])
    assert hidden["used_by_others_bytes"] is None
    assert hidden["used_bytes"] == 30_000
    assert "processes: Insufficient Permissions" in hidden["reason"]


def test_workers_are_read_by_their_current_processes(machine: Machine) -> None:
    """No worker counts as foreign on another's GPU; a stopped worker's GPU is still read, with none of ours on it."""
    machine.set(gpu0_process="100 20000", gpu1_process="200 30000")

    def others_bytes(*running: tuple[str, int, list[str]]) -> dict[str, tuple[int, int | None]]:
        read = machine.ask("workers", running)
        return {name: (one["pid"], one["device"]["used_by_others_bytes"]) for name, one in read.items()}

    first, second = ("w0", 100, [FIRST]), ("w1", 200, [SECOND])
    assert others_bytes(first, second) == {"w0": (100, 10_000), "w1": (200, 0)}
    assert others_bytes(second) == {"w0": (100, 30_000), "w1": (200, 0)}
    machine.set(gpu0_process="101 25000")
    assert others_bytes(("w0", 101, [FIRST]), second) == {"w0": (101, 5_000), "w1": (200, 0)}


def test_a_worker_of_several_gpus_is_read_by_the_rank_on_each(machine: Machine) -> None:
    """Its own process has no context, and each rank one on its own GPU: still it is known what others hold there."""
    made = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); "
    with subprocess.Popen([sys.executable, "-c", made * 2 + "print(flush=True); input()"], **PIPES) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        _, first, second = with_children(worker.pid)
        machine.set(gpu0_process=f"{first} 20000", gpu1_process=f"{second} 30000")
        (read,) = machine.ask("workers", [("w0", worker.pid, [FIRST, SECOND])]).values()
        worker.communicate(b"\n\n\n")
    assert read["device"]["used_by_others_bytes"] == 10_000


def test_a_sibling_s_context_on_this_gpu_is_not_foreign(machine: Machine) -> None:
    """A worker that reads this GPU's blocks through the host must not shrink the capacity of the worker here."""
    machine.set(gpu0_process="100 20000")
    assert machine.ask("read", FIRST, [], [100, 999])["used_by_others_bytes"] == 10_000


@pytest.mark.parametrize(
    ("value", "field"), [("power", "power_w"), ("temperature", "temperature_c"), ("total", "total_bytes")]
)
@pytest.mark.parametrize("code", [3, 4, 999])
def test_a_value_that_the_gpu_lacks_is_unknown(machine: Machine, value: str, field: str, code: int) -> None:
    """A card without a power sensor is served like any other, and shows no false 0 W."""
    machine.set(**{f"gpu0_{value}_error": code})
    reading = machine.ask("read", FIRST, [])
    assert reading["state"] == "ok"
    assert reading[field] is None
    assert reading["utilisation"] == 0.37
    assert bool(reading["reason"]) == (code != 3), "only a surprising error needs an explanation"


def test_an_old_driver_without_a_function_can_still_be_read(tmp_path: Path) -> None:
    """Drivers may be older than melld's pynvml."""
    old = Machine(_build(tmp_path, "-DOLD_DRIVER"), tmp_path)
    reading = old.ask("read", FIRST, [])
    assert (reading["state"], reading["temperature_c"], reading["power_w"]) == ("ok", None, 123.456)
    assert "Function Not Found" in reading["reason"]
    assert old.close() == 0


@pytest.mark.parametrize("code", [15, 16, 28])
def test_a_gpu_lost_at_run_time_is_reported_and_the_others_are_read(machine: Machine, code: int) -> None:
    """The supervisor quarantines one card; the metrics of the rest stay."""
    assert machine.ask("read", FIRST, [])["state"] == "ok"
    machine.set(gpu0_error=code)
    lost = machine.ask("read", FIRST, [])
    assert (lost["state"], lost["used_bytes"]) == ("lost", None)
    assert lost["reason"]
    assert machine.ask("read", SECOND, [])["state"] == "ok"
    assert [gpu["uuid"] for gpu in machine.ask("discover")["devices"]] == [SECOND]
    machine.set(gpu0_error=None)
    assert machine.ask("read", FIRST, [])["state"] == "ok", "after a reset it is found again"


def test_a_gpu_lost_between_two_values_is_lost(machine: Machine) -> None:
    """Half a reading of a dying card is not passed off as a healthy one."""
    machine.set(gpu0_temperature_error=15)
    reading = machine.ask("read", FIRST, [])
    assert (reading["state"], reading["power_w"]) == ("lost", None)


def test_a_gpu_that_has_left_the_machine_is_lost(machine: Machine) -> None:
    """Hot-removed, or hidden from the container: the UUID is no longer found."""
    assert machine.ask("read", SECOND, [])["state"] == "ok"
    machine.set(count=1)
    assert machine.ask("read", SECOND, [])["state"] == "lost"


def test_without_a_driver_there_are_no_gpus_and_a_reason(machine: Machine) -> None:
    """A machine with a broken driver says so instead of silently serving on the CPU."""
    machine.set(init=9)
    assert machine.ask("discover") == {"devices": [], "reason": "Driver Not Loaded"}
    assert machine.ask("read", FIRST, [])["state"] == "unavailable"
    machine.set(init=18)
    assert "version mismatch" in machine.ask("discover")["reason"]
    machine.set(init=None)
    assert len(machine.ask("discover")["devices"]) == 2, "once the driver is there, so are its GPUs"


def test_a_driver_that_is_reloaded_is_found_again(machine: Machine) -> None:
    """An administrator may update the driver without restarting the daemon."""
    assert machine.ask("read", FIRST, [])["state"] == "ok"
    machine.set(gpu0_error=1)
    assert machine.ask("read", FIRST, [])["state"] == "unavailable"
    machine.set(gpu0_error=None)
    assert machine.ask("read", FIRST, [])["state"] == "ok"


def test_without_the_library_there_are_no_gpus_and_a_reason(tmp_path: Path) -> None:
    """The usual laptop: nothing is raised, nothing is logged as a fault."""
    with contextlib.suppress(OSError):
        import ctypes

        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has a real NVML library")
    bare = Machine(tmp_path, tmp_path)
    assert bare.ask("discover") == {"devices": [], "reason": "NVML Shared Library Not Found"}
    assert bare.ask("read", FIRST, [])["state"] == "unavailable"
    assert bare.ask("link", FIRST, SECOND)["proximity"] is None
    assert bare.close() == 0


def test_topology_says_how_near_two_gpus_are(machine: Machine) -> None:
    """A migration prefers the neighbour under one switch, and knows when the bus cannot carry it."""
    expected = {"proximity": 20, "peer_read": True, "nvlink": False}
    assert machine.ask("link", FIRST, SECOND) == expected
    machine.set(topology=50, read=2, nvlink_error=3)
    assert machine.ask("link", FIRST, SECOND) == expected | {"proximity": 50, "peer_read": False, "nvlink": None}
    machine.set(topology=77)
    assert machine.ask("link", FIRST, SECOND)["proximity"] is None, "a level that a later driver may invent"
    machine.set(gpu1_error=15)
    assert machine.ask("link", FIRST, SECOND) == dict.fromkeys(expected)


def test_a_hanging_gpu_delays_only_itself(machine: Machine, tmp_path: Path) -> None:
    """A dying card can take seconds to respond; the loop and the other cards' readings do not wait for it."""
    fifo = tmp_path / "hang"
    os.mkfifo(fifo)
    machine.set(gpu0_wait=fifo)
    for uuids in ([FIRST, SECOND], []):  # twice: the second poll joins the open question, it does not ask again
        readings = machine.ask("poll", uuids, 0.2)
        assert (readings[FIRST]["state"], readings[SECOND]["state"]) == ("late", "ok")
        assert readings[FIRST]["reason"] == "no answer within 0.2 s"
    machine.set(gpu0_wait=None)
    fifo.write_text("go on")
    assert machine.ask("poll", [FIRST, SECOND], 20.0)[FIRST]["state"] == "ok"


def test_a_gpu_that_hangs_forever_does_not_delay_the_end(library: Path, tmp_path: Path) -> None:
    """SIGTERM must end the daemon although the driver never answers."""
    machine = Machine(library, tmp_path)
    os.mkfifo(tmp_path / "hang")
    machine.set(gpu0_wait=tmp_path / "hang")
    assert machine.ask("poll", [FIRST], 0.05)[FIRST]["state"] == "late"
    assert machine.close() == 0


DEVICES = [Device(index=index, uuid=uuid) for index, uuid in enumerate((FIRST, SECOND))]


def test_gpus_are_named_by_index_uuid_or_uuid_prefix() -> None:
    """The configuration takes what nvidia-smi prints, in the operator's order."""
    assert choose(DEVICES, [1, 0]) == DEVICES[::-1]
    assert choose(DEVICES, [SECOND, "GPU-1111"]) == DEVICES[::-1]
    assert choose(DEVICES, [0, FIRST]) == [DEVICES[0]] * 2, "two workers on one GPU"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([2], "no GPU 2; there: 0"),
        (["GPU-"], "no GPU 'GPU-'"),
        (["nonsense"], "no GPU 'nonsense'"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_known_ones(wanted: list[int | str], message: str) -> None:
    """A typo lists the GPUs that exist, and starts nothing."""
    with pytest.raises(ConfigError, match=message):
        choose(DEVICES, wanted)


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, [0, 1]), ("", []), ("1", [1]), ("1,0", [1, 0]), (f"{SECOND}, 0", [1, 0]), ("0,9,1", [0]), ("-1,0", [])],
)
def test_cuda_visible_devices_is_obeyed_as_by_cuda(visible: str | None, left: list[int]) -> None:
    """A batch system that hands out one GPU of eight is not overrun."""
    assert [device.index for device in restrict(DEVICES, visible)] == left


def test_the_library_s_topology_says_what_copies_share(machine: Machine) -> None:
    """Two GPUs below one switch and two below another: copies across share the path between."""
    uuids = [FIRST, SECOND, "GPU-c", "GPU-d"]
    machine.set(count=4, topology=50, gpu2_uuid="GPU-c", gpu3_uuid="GPU-d")
    machine.set(**{f"topology_{one}_{other}": 10 for one, other in ((0, 1), (1, 0), (2, 3), (3, 2))})
    shared = machine.ask("segments", uuids)
    across = [[one, other] for one in (FIRST, SECOND) for other in ("GPU-c", "GPU-d")]
    assert sorted(across) in shared.values()
    assert len(shared) == 2
    machine.set(gpu3_error=15)
    assert machine.ask("segments", uuids), "a GPU that is lost takes nothing from what is known of the others"
