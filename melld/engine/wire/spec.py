"""Everything that a worker process and its template get at their start.

Owns the shapes, without I/O.
"""

from typing import Any, Literal

import msgspec

Program = Literal["main", "judge"]
"""What a process can become: `main` of the module `melld.engine.worker.<program>`."""
TEMPLATE_VARIABLE = "MELLD_TEMPLATE"
TEMPLATE_TITLE = "melld: template of the workers"
"""The name of the process.  While it imports, a colon and its progress follow."""


class CopyRules(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's rules for copying KV from its siblings (`[migration]`)."""

    checksum: bool = False
    """True to compare both sides after a copy."""
    bytes_per_s: float | None = None
    """Limit of bytes per second over one link; None: no limit."""


class ArenaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory that its workers share, each using the granules granted to it."""

    nbytes: int
    granule_bytes: int
    path: str = ""
    """CPU: `/proc/PID/fd/N`, of the daemon's memory file."""
    inode: int = 0
    """Detects another file of another process with that number."""
    chunks: tuple[int, ...] = ()
    """CUDA: the sizes of the chunks that it is made of."""
    files: tuple[int, ...] = ()
    """The descriptors of these chunks in the process that has this specification."""


class StepLimit(msgspec.Struct, frozen=True):
    """The maximum time of a step with decoding requests; prompts are chunked to fit.

    `seconds`, or `lone_steps` times a step with one request where that is longer.
    """

    seconds: float
    lone_steps: float = 0.0


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker process gets at its start."""

    worker: str
    model_path: str
    device_kind: str
    """`cuda` or `cpu`."""
    visible_devices: tuple[str, ...] = ()
    """CUDA: UUIDs, this worker's own first, then its peers', so that their memory can be mapped."""
    engine_arguments: dict[str, Any] = {}
    """vLLM's engine arguments by name (`vllm.engine.arg_utils.AsyncEngineArgs`)."""
    environment: dict[str, str] = {}
    copy_rules: CopyRules = CopyRules()
    kv_interface: str | None = None
    """The network interface, as UCX names it, over which workers of other machines read its KV; None: they do not."""
    arena: ArenaSpec | None = None
    """Memory for its KV, of which it uses what it is granted; None: it has its own."""
    step_limit: StepLimit | None = None
    """None: prompts take what vLLM gives them."""
    ttft_s: float = 2.0
    """The target of first tokens, by which prompts take turns."""
    age_s: float = 60.0
    """A request that has waited on the worker for so long goes before all others there."""

    @property
    def own_devices(self) -> tuple[str, ...]:
        """Return the UUIDs of the worker's own GPUs."""
        return self.visible_devices[: self.engine_arguments.get("tensor_parallel_size", 1)]

    @property
    def has_ranks(self) -> bool:
        """Return True if the worker computes in one process per device."""
        return bool(self.engine_arguments.get("tensor_parallel_size", 1) > 1)


class TemplateSpec(msgspec.Struct, frozen=True):
    """Settings of the template process, as JSON in its environment."""

    device_kind: str
    daemon_pid: int
    output: str
    """The path of the pipe for what it prints."""
