"""GPU memory on its way to a worker, through the daemon and the template, over a test library."""

import asyncio
import os
from pathlib import Path
from typing import Any

from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ARGUMENTS, CPU_ENVIRONMENT
from melld.engine.fleet.arena import GpuArena
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.host.intake import Intake
from melld.engine.host.local import LocalHost
from melld.engine.host.template import TemplateProcess
from melld.engine.wire import messages as wire
from melld.engine.wire.spec import WorkerSpec
from tests.engine.fake_cuda import build
from tests.forked import ROOT, run_python
from tests.patience import PATIENCE_S

GRANULE_BYTES, NBYTES = 2 << 20, 258 << 20


class Tenant:
    """A worker whose KV is lent, and its messages."""

    def __init__(self, model: Path, template: TemplateProcess, arena: GpuArena) -> None:
        spec = WorkerSpec(
            worker="w0",
            model_path=str(model),
            device_kind="cpu",
            engine_arguments={**CPU_ARGUMENTS, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": NBYTES},
            environment=dict(CPU_ENVIRONMENT),
            arena=arena.spec(),
        )
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.process = WorkerProcess(
            spec, LocalHost(template), lambda said, _: self.heard.put_nowait(said), self.heard.put_nowait, Intake()
        )

    async def hear(self, kind: type) -> Any:
        """Return the next message of this kind; an unexpected end fails."""
        while not isinstance(said := await asyncio.wait_for(self.heard.get(), PATIENCE_S), kind):
            assert not isinstance(said, wire.WorkerFailed | WorkerEnded), said
        return said


PROGRAM = """
import asyncio, ctypes, pathlib, sys
from multiprocessing import util
from tests.engine.host.test_lent_files import lend_twice
from tests.nursery import fork_templates
ctypes.CDLL(sys.argv[2])  # forks find it by its name from now on, as others do by LD_LIBRARY_PATH
util.spawnv_passfds = fork_templates(1)
asyncio.run(lend_twice(pathlib.Path(sys.argv[1])))
"""


def test_each_worker_gets_its_device_s_memory_at_birth(demo_model: Path, tmp_path: Path) -> None:
    """The daemon keeps what it passes on: a killed worker's successor gets the same memory."""
    library = build(tmp_path)
    environment = COMMON_ENVIRONMENT | CPU_ENVIRONMENT | {"LD_LIBRARY_PATH": str(library.parent)}
    done = run_python("-c", PROGRAM, str(demo_model), str(library), env=os.environ | environment, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "both were lent it\n"), done.stderr


async def lend_twice(model: Path) -> None:
    """Start two workers one after the other, each with the memory, which it uses and gives back."""
    arena = GpuArena("GPU-1", NBYTES, GRANULE_BYTES)
    assert len(arena.spec().files) == 2
    template = TemplateProcess("cpu")
    try:
        for _ in range(2):
            tenant = Tenant(model, template, arena)
            ready = await tenant.hear(wire.WorkerReady)
            assert (ready.arena_failure, ready.kv_handle) == ("", b"")
            assert ready.kv_failure == "lent GPU memory cannot be read by siblings"
            tenant.process.send(wire.GrantGranules((5, 6)))
            tenant.process.send(wire.TakeGranules(1, 2, 0.0))
            returned = await tenant.hear(wire.GranulesReturned)
            assert sorted(returned.granules) == [5, 6]
            tenant.process.kill("the test is over")
            await tenant.hear(WorkerEnded)
    finally:
        template.stop()
        arena.close()
    print("both were lent it")  # noqa: T201  the test reads it
