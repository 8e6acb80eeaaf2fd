"""The template process: it has imported what every worker needs, and forks a worker when the daemon asks.

Owns the imports and its children.  It makes no CUDA context and no thread: either would be broken in a child.  It reads
no model and holds no request.

    daemon ──SpawnWorker + descriptors────► template ──fork──► worker.main
           ◄──WorkerForked, WorkerExited──┘

The kernel kills the template when the daemon ends, and the workers when the template ends, whatever the cause.
"""

import contextlib
import gc
import importlib
import os
import selectors
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Self

import msgspec
import psutil
from setproctitle import setproctitle

from melld.engine.image_library import make_importable
from melld.engine.wire import spec as wire
from melld.engine.worker.start import die_with_parent, vital

# For a child that has to import everything itself.
ANEW = (
    "import sys; sys.path[:] = {path!r}; from melld.engine.worker.template import begin; "
    "begin({program!r}, bytes.fromhex(sys.argv[1]), int(sys.argv[2]))"
)
# What a worker imports before and while it loads a model.  A name that a version of vLLM lacks costs a worker the time
# to import its successor, and nothing else.
IMPORTS = (
    "torch",
    "torch._dynamo",
    "torch.multiprocessing.reductions",
    "transformers",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.structured_output",
    "vllm.v1.worker.worker_base",
    "melld.engine.worker.main",
    "melld.engine.worker.judge",
    "melld.engine.worker.parts",
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


def main(descriptor: int, daemon_pid: int, device_kind: str) -> None:
    """Run the template, in the workers' environment.  `descriptor`: its end of a `SOCK_SEQPACKET` pair."""
    die_with_parent(daemon_pid)
    setproctitle("melld: template of the workers")
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    gc.disable()
    with ImportProgress(partial(tell, control), len(parts_of(device_kind))) as progress:
        preload(device_kind, progress.part_done)
    gc.collect()
    gc.freeze()  # no child's collector then visits, and so copies, these pages
    gc.enable()
    Template(control).serve()


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
    """Have vLLM put its CPU's kernels in the place of Triton's now, and not again in each worker.

    It looks at every name of every module for them (`vllm.triton_utils.dispatcher`): 0.7 s, and in a child 100 MiB of
    pages that it no longer shares with this process.
    """
    from vllm.platforms.cpu import CpuPlatform

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that a library will drop
        CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda _: None)


def configure_logging() -> None:
    """Have vLLM set its loggers up now, and not again in each worker: it takes 0.1 s once there are a thousand.

    On a GPU vLLM then looks at the devices too, which is not for this process.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


def has_one_thread() -> bool:
    """Return True if this process has one thread: a forked child has only the thread that forked."""
    return bool(psutil.Process().num_threads() == 1)


def may_use_gpu() -> bool:
    """Return True, in a child, if the parent has not initialised CUDA."""
    import torch

    return not torch.cuda._is_in_bad_fork()  # noqa: SLF001


def _with_files(spec: wire.WorkerSpec, lent: list[int]) -> wire.WorkerSpec:
    """Return the specification with the numbers that the descriptors of its arena have here."""
    if spec.arena is None or not lent:
        return spec
    return msgspec.structs.replace(spec, arena=msgspec.structs.replace(spec.arena, files=tuple(lent)))


def begin(program: wire.Program, spec_bytes: bytes, descriptor: int) -> None:
    """Become `program`, in a child.  `descriptor`: its end of its wire."""
    spec = msgspec.msgpack.decode(spec_bytes, type=wire.WorkerSpec)
    os.environ.update(spec.environment)
    make_importable()
    importlib.import_module(f"melld.engine.worker.{program}").main(spec, socket.socket(fileno=descriptor))


class ImportProgress:
    """Reports import progress inside the block: a finder that is asked for every module and finds none."""

    def __init__(self, say: Callable[[wire.TemplateImporting], None], parts: int) -> None:
        self._say = say
        self._parts = parts
        self._done = self._told = 0

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, *_: object) -> None:
        """Find nothing; say how many modules there are when many have come."""
        if len(sys.modules) >= self._told + TELL_MODULES:
            self._tell()

    def part_done(self) -> None:
        """Note that one more part is imported."""
        self._done += 1
        self._tell()

    def _tell(self) -> None:
        self._told = len(sys.modules)
        self._say(wire.TemplateImporting(done=self._done, parts=self._parts, modules=self._told))


def tell(control: socket.socket, message: wire.FromTemplate) -> None:
    """Send a message to the daemon; exit if the daemon is gone."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.send(msgspec.msgpack.encode(message))


class Template:
    """The template's loop: fork on request, and report children that end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[int, int]] = {}  # descriptor of the child's end: its number and pid

    def serve(self) -> None:
        """Serve until the daemon closes its end; the children end with this process."""
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    packet, descriptors, _, _ = socket.recv_fds(
                        self._control, wire.MAX_MESSAGE_BYTES, wire.MAX_DESCRIPTORS
                    )
                    if not packet:
                        return
                    self._fork(msgspec.msgpack.decode(packet, type=wire.SpawnWorker), descriptors)
                else:
                    self._reap(key.fd)

    def _fork(self, asked: wire.SpawnWorker, descriptors: list[int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        template_pid, is_whole = os.getpid(), has_one_thread()
        try:
            pid = os.fork()
        except OSError as error:  # no process or memory is left: this process must go on, or all its children end
            os.write(descriptors[1], f"OSError: {error}\n".encode())
            for descriptor in descriptors:
                os.close(descriptor)
            tell(self._control, wire.WorkerExited(number=asked.number, exit_code=1))
            return
        if pid == 0:
            vital(partial(self._become, asked, descriptors, template_pid, is_whole))()
            os._exit(1)  # a child must never go on as a second template
        for descriptor in descriptors:
            os.close(descriptor)
        end = os.pidfd_open(pid)
        self._children[end] = (asked.number, pid)
        self._selector.register(end, selectors.EVENT_READ)
        tell(self._control, wire.WorkerForked(number=asked.number, pid=pid))

    def _become(self, asked: wire.SpawnWorker, descriptors: list[int], template_pid: int, is_whole: bool) -> None:
        """Become the program, in the child."""
        die_with_parent(template_pid)
        connection, log, *lent = descriptors
        os.dup2(log, 1)
        os.dup2(log, 2)
        self._selector.close()
        self._control.close()
        for descriptor in (log, *self._children):
            os.close(descriptor)
        told = msgspec.msgpack.encode(_with_files(asked.spec, lent))
        if not is_whole or not may_use_gpu():  # an import made a thread or a context: start afresh, slower but safe
            for descriptor in (connection, *lent):
                os.set_inheritable(descriptor, True)
            code = ANEW.format(path=sys.path, program=asked.program)
            os.execv(sys.executable, [sys.executable, "-c", code, told.hex(), str(connection)])  # noqa: S606
        begin(asked.program, told, connection)

    def _reap(self, end: int) -> None:
        number, pid = self._children.pop(end)
        self._selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        tell(self._control, wire.WorkerExited(number=number, exit_code=os.waitstatus_to_exitcode(status)))
