"""What runs in the template process before it forks, and first in each child.

Owns the imports that every worker needs, and what `multiprocessing` leaves to its users: a child's tie to the daemon,
its output, its environment.  The template makes no CUDA context and no thread: either would be broken in a child, which
then starts afresh.  It is `multiprocessing`'s fork server, which imports `engine.preload` first.
"""

import contextlib
import fcntl
import gc
import importlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import resource_tracker
from typing import Self

import msgspec
import psutil
from setproctitle import setproctitle

from melld.engine.image_library import make_importable
from melld.engine.wire.spec import TEMPLATE_TITLE, TEMPLATE_VARIABLE, Program, TemplateSpec, WorkerSpec
from melld.engine.worker.start import die_with_parent, vital

# For a child that has to import everything itself.
ANEW = (
    "import sys; sys.path[:] = {path!r}; from melld.engine.worker.forking import become; "
    "become({program!r}, bytes.fromhex(sys.argv[1]), int(sys.argv[2]))"
)
# What a worker imports before and while it loads a model.  A name that a version of vLLM lacks costs a worker the time
# to import its successor, and nothing else.
IMPORTS = (
    "torch",
    "torch._dynamo",
    "torch.multiprocessing.reductions",
    "transformers",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.pool.flash_maxsim",
    "vllm.v1.structured_output",
    "vllm.v1.worker.worker_base",
    "melld.engine.worker.main",
    "melld.engine.worker.judge",
    "melld.engine.worker.parts",
    "melld.engine.worker.ranks",
    "melld.engine.worker.residency.scheduler",
)
TELL_MODULES = 50
IMPORTS_OF_KIND = {
    "cpu": (
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.attention.backends.cpu_attn",
        "melld.engine.worker.vllm_on_cpu.mends",
    ),
    "cuda": ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"),
}


def prepare() -> None:
    """Make this process the template of the daemon that started it."""
    spec = msgspec.json.decode(os.environ[TEMPLATE_VARIABLE], type=TemplateSpec)
    die_with_parent(spec.daemon_pid)
    os.setpgid(0, 0)  # what a terminal, or `timeout`, sends to the daemon's group is the daemon's to answer
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (spec.output, os.O_WRONLY, (1, 2))):
        opened = os.open(path, flags)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    gc.disable()
    with ImportProgress(len(parts_of(spec.device_kind))) as progress:
        preload(spec.device_kind, progress.part_done)
    setproctitle(TEMPLATE_TITLE)
    gc.collect()
    gc.freeze()  # no child's collector then visits, and so copies, these pages
    gc.enable()


def parts_of(device_kind: str) -> tuple[str, ...]:
    """Return what workers on such devices import."""
    return (*IMPORTS, *IMPORTS_OF_KIND[device_kind])


def preload(device_kind: str, part_done: Callable[[], None] = lambda: None) -> None:
    """Import what workers need, without a CUDA context and without a thread."""
    make_importable()
    for name in parts_of(device_kind):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
        part_done()
    if device_kind == "cpu":
        override_kernels()
        configure_logging()


def override_kernels() -> None:
    """Have vLLM substitute its CPU kernels for Triton's now, rather than in each worker.

    It looks at every name of every module for them (`vllm.triton_utils.dispatcher`): 0.7 s, and in a child 100 MiB of
    pages that it no longer shares with this process.
    """
    from vllm.platforms.cpu import CpuPlatform

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that a library will drop
        CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda _: None)


def configure_logging() -> None:
    """Have vLLM set up its loggers now, rather than in each worker: with a thousand loggers it takes 0.1 s.

    On a GPU vLLM then looks at the devices too, which is not for this process.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


class ImportProgress:
    """Shows import progress in the process title: an importer that is asked for every module and finds none."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._done = self._told = 0

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, *_: object) -> None:
        """Find nothing; report the number of modules now and then."""
        if len(sys.modules) >= self._told + TELL_MODULES:
            self._tell()

    def part_done(self) -> None:
        """Note one more imported part."""
        self._done += 1
        self._tell()

    def _tell(self) -> None:
        self._told = len(sys.modules)
        setproctitle(f"{TEMPLATE_TITLE}: {self._done} of {self._parts} parts imported, {self._told:,} modules")


def begin(program: Program, spec_bytes: bytes, connection: int, output: int, *lent: int) -> None:
    """Become `program`.  `connection`: its end of its wire; `output`: for its output; `lent`: its arena's memory."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if (tracker := resource_tracker.getfd()) is not None:
        os.close(tracker)
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # noqa: SLF001  it has its own
    # The interpreter's default, as under `vllm serve`: the fork server's locks have names, and each worker would start
    # a process to remove that of one lock, which vLLM makes for ranks that it does not have.
    multiprocessing.set_start_method(None, force=True)
    vital(partial(_begin, program, _with_files(spec_bytes, lent), connection, lent))()
    os._exit(1)


def _begin(program: Program, spec_bytes: bytes, connection: int, lent: tuple[int, ...]) -> None:
    tie = die_with_daemon()
    if not has_one_thread(os.getppid()) or not may_use_gpu():  # an import made a thread or a context: slower but safe
        for descriptor in (tie, connection, *lent):
            os.set_inheritable(descriptor, True)
        code = ANEW.format(path=sys.path, program=program)
        os.execv(sys.executable, [sys.executable, "-c", code, spec_bytes.hex(), str(connection)])  # noqa: S606
    become(program, spec_bytes, connection)


def become(program: Program, spec_bytes: bytes, connection: int) -> None:
    """Run `program` in the environment that its specification names."""
    spec = msgspec.msgpack.decode(spec_bytes, type=WorkerSpec)
    os.environ.update(spec.environment)
    make_importable()
    importlib.import_module(f"melld.engine.worker.{program}").main(spec, socket.socket(fileno=connection))


def die_with_daemon() -> int:
    """Have the kernel kill this process when the daemon ends, whatever state either is in; return the tie.

    The parent of this process is the template, which may end alone.  The tie is a pipe that `multiprocessing` made, and
    only the daemon can write to: its kernel signals the owner of the other end when the last writer is gone.
    """
    daemon = multiprocessing.parent_process()
    assert daemon is not None
    tie = daemon.sentinel
    fcntl.fcntl(tie, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(tie, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(tie, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([tie], [], [], 0)[0]:  # the daemon ended before the line above
        os._exit(1)
    return tie


def has_one_thread(pid: int | None = None) -> bool:
    """Return True if the process has one thread: a forked child has only the thread that forked."""
    return bool(psutil.Process(pid).num_threads() == 1)


def may_use_gpu() -> bool:
    """Return True, in a child, if the parent has not initialised CUDA."""
    import torch

    return not torch.cuda._is_in_bad_fork()  # noqa: SLF001


def _with_files(spec_bytes: bytes, lent: tuple[int, ...]) -> bytes:
    """Return the specification with this process's descriptor numbers for its arena."""
    spec = msgspec.msgpack.decode(spec_bytes, type=WorkerSpec)
    if spec.arena is None or not lent:
        return spec_bytes
    return msgspec.msgpack.encode(msgspec.structs.replace(spec, arena=msgspec.structs.replace(spec.arena, files=lent)))
