"""The frozen configuration: every table and key, with its default and what it means.

`melld.config_text` reads it from a TOML file; `docs/configuration.md` is written from it.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from melld.config_server import ServerConfig
from melld.config_values import Port, Positive, PositiveMilliseconds, PositiveSeconds, Seconds, Table, parse_bytes

SERVED_MODEL_NAME = "served_model_name"


class ClusterConfig(Table, frozen=True, kw_only=True):
    """Workers on every machine of a Ray cluster, in place of this machine's alone: docs/cluster.md."""

    short_form: ClassVar[str] = "address"

    address: Annotated[str | None, msgspec.Meta(examples=["auto", "10.0.0.2:6379"])] = None
    """Of Ray's head node; `auto`: the cluster that this machine has joined.  Default: no cluster."""
    devices_per_machine: Literal["all"] | Positive = "all"
    """How many devices to use of each machine: GPUs, or for CPU devices what it has of the resource `melld_device`."""
    min_machines: Positive = 1
    """How many machines must have joined before the workers are started."""
    start_timeout_s: PositiveSeconds = 120.0
    """How long that may take, and later the start of melld's agent on one machine."""
    listen: Annotated[str | None, msgspec.Meta(examples=["10.0.0.1"])] = None
    """Address of this machine for its agents.  `0.0.0.0`: all.  Default: the one that Ray knows it by."""
    port: Port = 0
    """The port there.  0: a free one."""
    silence_s: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """Silence after which a machine is lost."""
    return_idle: bool = False
    """Give the devices of stopped workers back to Ray, and take devices again to start them.  After five starts without
    a free one, only `melld resume` tries again."""
    kv: Literal["tokens", "nixl"] = "tokens"
    """How requests move between machines: by their tokens, or by their KV where that was measured to be faster."""
    kv_interface: Annotated[str | None, msgspec.Meta(examples=["eth1", "mlx5_0:1"])] = None
    """The network of `nixl`, a trusted one, by the name of its interface, the same on all machines."""
    allow_open_cluster: bool = False
    """Use a cluster without `RAY_AUTH_MODE=token`."""


class AdapterConfig(Table, frozen=True, kw_only=True):
    """`[[model.lora]]`: a LoRA adapter, which clients ask for by its name."""

    name: str
    path: str
    """Directory of `adapter_config.json` and its weights, or a name on Hugging Face."""


class ModelConfig(Table, frozen=True, kw_only=True):
    """A model to serve."""

    short_form: ClassVar[str] = "path"
    hint: ClassVar[str] = "; options of vLLM stand in [model.vllm]"

    path: Annotated[str, msgspec.Meta(examples=["/models/Llama-3.1-8B-Instruct"])]
    """Directory of the model, or its name on Hugging Face."""
    name: Annotated[str | tuple[str, ...] | None, msgspec.Meta(examples=["llama"])] = None
    """Its name for clients, or several: `["llama", "gpt-4o"]`; answers and metrics have the first.  Default: the last
    part of the path."""
    vllm: Annotated[dict[str, Any], msgspec.Meta(examples=[{"max_model_len": 16384}])] = {}  # noqa: RUF012  a Struct copies it
    """Options of `vllm serve` by their long names: `max_model_len = 16384`.  What melld sets itself is refused."""
    lora: Annotated[tuple[AdapterConfig, ...], msgspec.Meta(examples=[[{"name": "pirate", "path": "/pirate"}]])] = ()
    """LoRA adapters, as `[[model.lora]]`, each with the `name` that clients ask for, and a `path` like the model's."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Of several models: its share while KV memory is short, beside its rate of requests."""
    pinned: bool = False
    """Of several models: loaded at the start, and never unloaded."""
    keep_alive_s: Annotated[Seconds | None, msgspec.Meta(examples=[300.0])] = None
    """Seconds without requests until it is unloaded, in place of `[idle]`.  0: at once.  `inf`: never."""

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
    """How many workers."""
    kv_bytes: int | str = "128MiB"
    """The KV cache of each, with one model."""
    memory_bytes: Annotated[int | str | None, msgspec.Meta(examples=["16GiB"])] = None
    """What each may hold: weights and KV of several models, or the weights of one.  Default: nine tenths of the
    available memory, divided among them."""

    @property
    def kv_cache_bytes(self) -> int:
        """Return the KV cache of each worker, in bytes."""
        return parse_bytes(self.kv_bytes, "devices.cpu.kv_bytes")

    @property
    def memory_limit_bytes(self) -> int | None:
        """Return what each device may hold of several models, in bytes; None: as much as there is."""
        return None if self.memory_bytes is None else parse_bytes(self.memory_bytes, "devices.cpu.memory_bytes")


class DevicesConfig(Table, frozen=True, kw_only=True):
    """`cuda` or `cpu`; neither: all GPUs, else two CPU devices."""

    cuda: Annotated[tuple[int | str, ...] | None, msgspec.Meta(examples=[[0, 1]])] = None
    """GPUs, by index or UUID.  One named twice gets two workers, each with `[model.vllm] kv_cache_memory_bytes`."""
    cpu: CpuDevices | None = None
    per_worker: Annotated[Positive | None, msgspec.Meta(examples=[2])] = None
    """Devices of each worker, which divide every layer among them (tensor parallelism); a divisor of the model's
    attention heads.  Default: as few as hold the weights and leave room for KV."""

    lent_kv_bytes: Annotated[int | str | None, msgspec.Meta(examples=["24GiB"])] = None
    """KV memory of each GPU that `[[models]]` lend each other: docs/several-models.md."""

    @property
    def lent_bytes(self) -> int:
        """Return the KV memory of each GPU that is lent, in bytes; 0: none."""
        return 0 if self.lent_kv_bytes is None else parse_bytes(self.lent_kv_bytes, "devices.lent_kv_bytes")

    @property
    def group_size(self) -> int:
        """Return the devices of each worker."""
        return self.per_worker or 1


class SchedulerConfig(Table, frozen=True, kw_only=True):
    """The placement of requests."""

    policy: str = "mell-slo"
    """One of docs/scheduling.md.  `most-free` spreads over all workers."""
    epoch_ms: Annotated[float, msgspec.Meta(ge=1, le=60_000)] = 100.0
    """Period of re-planning."""
    headroom_s: Seconds = 0.5
    """A worker keeps free what its requests add in this time."""
    prefix_aware: bool = True
    """Prefer a worker that probably has the prompt's beginning cached (`mell-slo`)."""
    roles: Literal["auto", "off"] = "off"
    """`auto`: some workers only compute prompts, while that keeps a tight `itl_ms` better (`mell-slo`)."""
    fixed_roles: dict[str, Literal["mixed", "prefill", "decode"]] = {}  # noqa: RUF012  a Struct copies it
    """Roles by worker instead, `--role w0=prefill` each; the others are mixed."""
    decision_log: Annotated[str | None, msgspec.Meta(examples=["/var/lib/melld/decisions.jsonl"])] = None
    """A file for all decisions: docs/decision-log.md."""
    stories_kept: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """How many ended requests `melld why` remembers, some KiB each."""


class PrioritiesConfig(Table, frozen=True, kw_only=True):
    """High (`priority` below 0), normal (0) and low requests: docs/scheduling.md."""

    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.25
    """Part of a worker's room and pace that others leave to the high ones there, if they find room elsewhere."""
    age_s: PositiveSeconds = 60.0
    """Each such wait lifts a request by a class."""
    hole_s: Seconds = 2.0
    """How long moves may take that make room for a large request; 0: none are made."""
    suspend: bool = True
    """Suspend a low request where a high one finds no room otherwise."""


class TargetsConfig(Table, frozen=True, kw_only=True):
    """The promise to each request; `mell-slo` keeps as few workers awake as keep it."""

    itl_ms: Annotated[PositiveMilliseconds | None, msgspec.Meta(examples=[50.0])] = None
    """Longest mean time between two tokens of a request.  In each step prompts get what decoding leaves of it (of twice
    as much with `mell-slo`).  Default, for `mell-slo` alone: 50 ms, or twice a lone step where that is longer."""
    ttft_s: PositiveSeconds = 2.0
    """Longest time until the first token; four times what the prompt takes alone, if that is longer."""
    attainment: Annotated[float, msgspec.Meta(ge=0.5, lt=1)] = 0.99
    """Part of the requests that `mell-slo` aims to serve so."""
    shed: bool = False
    """When all workers are busy, send requests away (503) whose first token can no longer come in time."""

    @property
    def itl_s(self) -> float | None:
        """Return the configured time between tokens in seconds, or None."""
        return self.itl_ms / 1e3 if self.itl_ms is not None else None


class MigrationConfig(Table, frozen=True, kw_only=True):
    """The moves of running requests."""

    checksum: bool = False
    """Compare copied blocks with the source's; a mismatch cancels the move."""
    link_bytes_per_s: Annotated[int | str | None, msgspec.Meta(examples=["2GiB"])] = None
    """Most that may be copied from one worker to another per second: `"2GiB"`."""
    step_slowdown: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """How much longer, as a fraction, steps may become by tokens of moves."""
    max_moves_per_link: Positive = 4
    """Most moves at a time from one worker to another."""

    @property
    def link_limit_bytes_per_s(self) -> float | None:
        """Return the limit of a link's copies as a number, or None for no limit."""
        if self.link_bytes_per_s is None:
            return None
        return float(parse_bytes(self.link_bytes_per_s, "migration.link_bytes_per_s"))


class IdleConfig(Table, frozen=True, kw_only=True):
    """A worker that is not needed first sleeps: its process stays, and answers at once.  Then its process ends."""

    sleep_after_s: Annotated[Seconds | None, msgspec.Meta(examples=[60.0])] = None
    """Seconds without requests after which a worker sleeps.  Default: 60; `mell-slo`: as long as staying awake costs
    less than being woken."""
    stop_after_s: Seconds = 240.0
    """Seconds asleep after which its process ends; longer if it was needed again soon. Of several models: dozing; 0:
    none dozes."""
    host_cache_bytes: Annotated[int | str | None, msgspec.Meta(examples=["64GiB"])] = None
    """Of several models on GPUs: the machine's memory for weights of those that doze, by vLLM's sleep mode; their
    requests move by tokens. Default: none dozes."""

    @property
    def cached_bytes(self) -> int:
        """Return `host_cache_bytes` as a number, or 0."""
        return 0 if self.host_cache_bytes is None else parse_bytes(self.host_cache_bytes, "idle.host_cache_bytes")


class HealthConfig(Table, frozen=True, kw_only=True):
    """The signs of a hung worker, which is killed and replaced."""

    ping_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """How long it may leave pings unanswered while it neither computes nor reads; else `step_timeout_s`."""
    step_timeout_s: PositiveSeconds = 300.0
    """How long one step may take."""
    load_stall_s: PositiveSeconds = 300.0
    """How long one that loads its model may neither compute nor read anything."""
    steady_after_s: Seconds = 120.0
    """How long one that has died must work to be trusted again.  Until then each death doubles the wait for its next
    start, from 1 to 60 s, and it gets only what no other has room for."""


class Config(Table, frozen=True, kw_only=True):
    """The whole configuration."""

    model: ModelConfig
    models: tuple[ModelConfig, ...] = ()
    """`[[models]]`, in place of `[model]`, which then is the first of them."""
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
        """Return all models, the one that requests without a model's name get first."""
        return self.models or (self.model,)

    def alone(self, model: ModelConfig) -> "Config":
        """Return what one of the models, by itself, would be served with."""
        idle = self.idle
        if model.keep_alive_s is not None and len(self.served) == 1:
            idle = IdleConfig(sleep_after_s=model.keep_alive_s, stop_after_s=0.0)
        return msgspec.structs.replace(self, model=model, models=(), idle=idle)
