"""The frozen configuration: every table and key, with its default and meaning.

`melld.config_text` reads it from a TOML file; `docs/configuration.md` is written from it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from melld.config_server import ServerConfig
from melld.config_values import Port, Positive, PositiveMilliseconds, PositiveSeconds, Seconds, Table, parse_bytes

SERVED_MODEL_NAME = "served_model_name"
LIVE = {"weight": 1.0, "pinned": False, "keep_alive_s": None}
"""Settings that a loaded model follows."""


class ClusterConfig(Table, frozen=True, kw_only=True):
    """Run workers on every machine of a Ray cluster instead of on this machine alone: docs/cluster.md."""

    short_form: ClassVar[str] = "address"

    address: Annotated[str | None, msgspec.Meta(examples=["auto", "10.0.0.2:6379"])] = None
    """Address of the Ray head node; `auto`: the cluster this machine has joined.  Default: no cluster."""
    devices_per_machine: Literal["all"] | Positive = "all"
    """Devices to use per machine: GPUs, or for CPU devices the amount of its `melld_device` resource."""
    min_machines: Positive = 1
    """Machines that must have joined before any worker starts."""
    start_timeout_s: PositiveSeconds = 120.0
    """Timeout for those machines to join, and for starting the melld agent on a machine."""
    listen: Annotated[str | None, msgspec.Meta(examples=["10.0.0.1"])] = None
    """Address that agents connect to on this machine.  `0.0.0.0`: all.  Default: the address Ray uses for it."""
    port: Port = 0
    """Port that agents connect to.  0: any free port."""
    silence_s: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """A machine silent for this long is considered lost."""
    kv: Literal["tokens", "nixl"] = "tokens"
    """How requests move between machines: by recomputing their tokens, or by copying KV where that measured faster."""
    kv_interface: Annotated[str | None, msgspec.Meta(examples=["eth1", "mlx5_0:1"])] = None
    """Network interface for `nixl`, with the same name on all machines.  It must be on a trusted network."""
    allow_open_cluster: bool = False
    """Allow a cluster without `RAY_AUTH_MODE=token`."""


class AdapterConfig(Table, frozen=True, kw_only=True):
    """`[[model.lora]]`: a LoRA adapter, which clients request by name."""

    name: str
    path: str
    """Directory with `adapter_config.json` and the weights, or a Hugging Face name."""


class ModelConfig(Table, frozen=True, kw_only=True):
    """A model to serve."""

    short_form: ClassVar[str] = "path"
    hint: ClassVar[str] = "; vLLM options go in [model.vllm]"

    path: Annotated[str, msgspec.Meta(examples=["/models/Llama-3.1-8B-Instruct"])]
    """Model directory, or its name on Hugging Face."""
    name: Annotated[str | tuple[str, ...] | None, msgspec.Meta(examples=["llama"])] = None
    """Name or names that clients use: `["llama", "gpt-4o"]`; responses and metrics show the first.  Default: the last
    part of the path."""
    vllm: Annotated[dict[str, Any], msgspec.Meta(examples=[{"max_model_len": 16384}])] = {}  # noqa: RUF012  a Struct copies it
    """`vllm serve` options by their long names: `max_model_len = 16384`.  Those that melld sets itself are rejected."""
    lora: Annotated[tuple[AdapterConfig, ...], msgspec.Meta(examples=[[{"name": "pirate", "path": "/pirate"}]])] = ()
    """LoRA adapters, as `[[model.lora]]`, each with the `name` that clients request and a `path` like the model's."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """With several models: its share of KV memory when that is short, weighed with its request rate."""
    pinned: bool = False
    """With several models: load at startup and never unload."""
    keep_alive_s: Annotated[Seconds | None, msgspec.Meta(examples=[300.0])] = None
    """Seconds without requests before it is unloaded; overrides `[idle]`.  0: immediately.  `inf`: never."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that clients may use, in the order given."""
        given = self.name if self.name is not None else self.vllm_option(SERVED_MODEL_NAME)
        if given is None:
            return (self.path.rstrip("/").rsplit("/", 1)[-1],)
        return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))

    def vllm_option(self, name: str) -> Any:
        """Return an option of `[model.vllm]`, spelt with `_` or `-`, or None if it is not given."""
        return self.vllm.get(name, self.vllm.get(name.replace("_", "-")))


class CpuDevices(Table, frozen=True, kw_only=True):
    """`cpu = {count = 2, kv_bytes = "128MiB"}`, or `cpu = 2`: workers on the CPU, one thread each."""

    short_form: ClassVar[str] = "count"

    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 2
    """Number of workers."""
    kv_bytes: int | str = "128MiB"
    """KV cache per worker, with a single model."""
    memory_bytes: Annotated[int | str | None, msgspec.Meta(examples=["16GiB"])] = None
    """Memory limit per worker: weights and KV with several models, weights alone with one.  Default: 90 % of available
    memory, divided among the workers."""

    @property
    def kv_cache_bytes(self) -> int:
        """Return the KV cache of each worker, in bytes."""
        return parse_bytes(self.kv_bytes, "devices.cpu.kv_bytes")

    @property
    def memory_limit_bytes(self) -> int | None:
        """Return the memory limit of each device in bytes, or None for no limit."""
        return None if self.memory_bytes is None else parse_bytes(self.memory_bytes, "devices.cpu.memory_bytes")


class DevicesConfig(Table, frozen=True, kw_only=True):
    """Set `cuda` or `cpu`; by default melld uses all GPUs, or two CPU devices if there are none."""

    cuda: Annotated[tuple[int | str, ...] | None, msgspec.Meta(examples=[[0, 1]])] = None
    """GPUs, by index or UUID.  A GPU listed twice gets two workers; then set `[model.vllm] kv_cache_memory_bytes`
    (per worker)."""
    cpu: CpuDevices | None = None
    per_worker: Annotated[Positive | None, msgspec.Meta(examples=[2])] = None
    """Devices per worker (tensor parallelism); must divide the model's number of attention heads.  Default: as few as
    hold the weights and leave room for KV."""

    lent_kv_bytes: Annotated[int | str | None, msgspec.Meta(examples=["24GiB"])] = None
    """KV memory per GPU that `[[models]]` share by lending it to each other: docs/several-models.md."""

    @property
    def lent_bytes(self) -> int:
        """Return the lent KV memory per GPU in bytes; 0: none."""
        return 0 if self.lent_kv_bytes is None else parse_bytes(self.lent_kv_bytes, "devices.lent_kv_bytes")

    @property
    def group_size(self) -> int:
        """Return the number of devices per worker."""
        return self.per_worker or 1


class SchedulerConfig(Table, frozen=True, kw_only=True):
    """How requests are placed."""

    policy: str = "mell-slo"
    """A policy from docs/scheduling.md.  `most-free` spreads requests over all workers."""
    epoch_ms: Annotated[float, msgspec.Meta(ge=1, le=60_000)] = 100.0
    """Interval between re-planning passes."""
    headroom_s: Seconds = 0.5
    """Keep enough KV memory free on each worker for this much growth of its requests."""
    prefix_aware: bool = True
    """Prefer a worker that probably has the prompt's prefix cached (`mell-slo`)."""
    roles: Literal["auto", "off"] = "off"
    """`auto`: dedicate some workers to prefill whenever that helps meet a tight `itl_ms` (`mell-slo`)."""
    fixed_roles: dict[str, Literal["mixed", "prefill", "decode"]] = {}  # noqa: RUF012  a Struct copies it
    """Fixed roles by worker, one `--role w0=prefill` each; all other workers are mixed."""
    decision_log: Annotated[str | None, msgspec.Meta(examples=["/var/lib/melld/decisions.jsonl"])] = None
    """File that every decision is logged to: docs/decision-log.md."""
    stories_kept: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """Finished requests that `melld why` remembers, a few KiB each."""


class PrioritiesConfig(Table, frozen=True, kw_only=True):
    """High (`priority` below 0), normal (0) and low priority requests: docs/scheduling.md."""

    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.25
    """Fraction of a worker's memory and speed reserved for its high priority requests while others fit elsewhere."""
    age_s: PositiveSeconds = 60.0
    """A waiting request rises one priority class each time this elapses."""
    hole_s: Seconds = 2.0
    """Time limit for moves that make room for a large request; 0: never move requests for that."""
    suspend: bool = True
    """Suspend a low priority request if a high priority one fits no other way."""


class TargetsConfig(Table, frozen=True, kw_only=True):
    """Latency targets per request; `mell-slo` keeps only as many workers awake as it takes to meet them."""

    itl_ms: Annotated[PositiveMilliseconds | None, msgspec.Meta(examples=[50.0])] = None
    """Maximum mean time between a request's tokens.  In each step, prefill gets the time that decoding leaves of it (of
    twice as much with `mell-slo`).  Default, with `mell-slo` only: 50 ms, or twice a lone request's step if longer."""
    ttft_s: PositiveSeconds = 2.0
    """Maximum time to first token, or four times what the prompt takes alone if that is longer."""
    attainment: Annotated[float, msgspec.Meta(ge=0.5, lt=1)] = 0.99
    """Fraction of requests for which `mell-slo` aims to meet both targets."""
    shed: bool = False
    """When all workers are busy, reject (503) requests whose first token would already be late."""

    @property
    def itl_s(self) -> float | None:
        """Return the configured time between tokens in seconds, or None."""
        return self.itl_ms / 1e3 if self.itl_ms is not None else None


class MigrationConfig(Table, frozen=True, kw_only=True):
    """How running requests are moved."""

    checksum: bool = False
    """Verify copied blocks against the source; a mismatch cancels the move."""
    link_bytes_per_s: Annotated[int | str | None, msgspec.Meta(examples=["2GiB"])] = None
    """Maximum copy rate from one worker to another, per second: `"2GiB"`."""
    step_slowdown: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """How much recomputing moved tokens may lengthen a step, as a fraction."""
    max_moves_per_link: Positive = 4
    """Maximum concurrent moves from one worker to another."""

    @property
    def link_limit_bytes_per_s(self) -> float | None:
        """Return the copy rate limit of a link, or None for no limit."""
        if self.link_bytes_per_s is None:
            return None
        return float(parse_bytes(self.link_bytes_per_s, "migration.link_bytes_per_s"))


class IdleConfig(Table, frozen=True, kw_only=True):
    """An idle worker first sleeps (its process stays and wakes instantly), then its process exits."""

    sleep_after_s: Annotated[Seconds | None, msgspec.Meta(examples=[60.0])] = None
    """Seconds without requests before a worker sleeps.  Default: 60; with `mell-slo`, as long as staying awake costs
    less than waking up again."""
    stop_after_s: Seconds = 240.0
    """Seconds asleep before its process exits.  With several models, seconds of dozing; 0: never doze."""
    host_cache_bytes: Annotated[int | str | None, msgspec.Meta(examples=["64GiB"])] = None
    """With several models on GPUs: host memory for the weights of dozing models, by vLLM's sleep mode; requests then
    move by tokens.  Default: never doze."""

    @property
    def cached_bytes(self) -> int:
        """Return `host_cache_bytes` as a number, or 0."""
        return 0 if self.host_cache_bytes is None else parse_bytes(self.host_cache_bytes, "idle.host_cache_bytes")


class HealthConfig(Table, frozen=True, kw_only=True):
    """When to consider a worker hung; hung workers are killed and replaced."""

    ping_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """Time without a ping reply while the worker neither computes nor reads; otherwise `step_timeout_s` applies."""
    step_timeout_s: PositiveSeconds = 300.0
    """Maximum duration of a step."""
    load_stall_s: PositiveSeconds = 300.0
    """Time without any computing or reading while the worker loads its model."""
    steady_after_s: Seconds = 120.0
    """How long a restarted worker must run without dying before it is trusted again.  Until then it only gets requests
    that fit nowhere else, and each death doubles the delay before its next start, from 1 to 60 s."""


class Config(Table, frozen=True, kw_only=True):
    """The whole configuration."""

    model: ModelConfig
    models: tuple[ModelConfig, ...] = ()
    """`[[models]]` instead of `[model]`; `model` is then the first of them."""
    server: ServerConfig = ServerConfig()
    devices: DevicesConfig = DevicesConfig()
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    priorities: PrioritiesConfig = PrioritiesConfig()
    targets: TargetsConfig = TargetsConfig()
    migration: MigrationConfig = MigrationConfig()
    idle: IdleConfig = IdleConfig()
    health: HealthConfig = HealthConfig()

    @property
    def served(self) -> tuple[ModelConfig, ...]:
        """Return all models, the default for requests that name none first."""
        return self.models or (self.model,)

    def alone(self, model: ModelConfig) -> "Config":
        """Return the configuration for serving one of the models by itself."""
        idle = self.idle
        if model.keep_alive_s is not None and len(self.served) == 1:
            idle = IdleConfig(sleep_after_s=model.keep_alive_s, stop_after_s=0.0)
        return msgspec.structs.replace(self, model=model, models=(), idle=idle)


def kept_of(served: Sequence[ModelConfig], wanted: Sequence[ModelConfig]) -> list[int | None]:
    """Match each wanted model to a served one, ignoring `LIVE` settings; None: it must be loaded."""
    lasting = [msgspec.structs.replace(one, **LIVE) for one in served]
    sought = [msgspec.structs.replace(one, **LIVE) for one in wanted]
    return [lasting.index(one) if one in lasting else None for one in sought]
