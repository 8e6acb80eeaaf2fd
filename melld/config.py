"""The frozen configuration: every table and key, with its default and what it means.

`melld.config_text` reads it from a TOML file; `docs/configuration.md` is written from it.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from melld.config_cluster import ClusterConfig
from melld.config_server import ServerConfig
from melld.config_values import Positive, PositiveMilliseconds, PositiveSeconds, Seconds, Table, parse_bytes

SERVED_MODEL_NAME = "served_model_name"


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
    """Its name for clients, or several: `["llama", "gpt-4o"]`; the first stands in answers and metrics.  Default:
    the last part of the path."""
    vllm: Annotated[dict[str, Any], msgspec.Meta(examples=[{"max_model_len": 16384}])] = {}  # noqa: RUF012  a Struct copies it
    """Options of `vllm serve` by their long names: `max_model_len = 16384`.  What melld sets itself is refused."""
    lora: Annotated[tuple[AdapterConfig, ...], msgspec.Meta(examples=[[{"name": "pirate", "path": "/pirate"}]])] = ()
    """LoRA adapters, as `[[model.lora]]`: clients ask for one by its `name`; `path` is a directory, or a name on
    Hugging Face."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """While KV memory is short, the next goes to the model that had the least for its weight and rate of requests."""
    pinned: bool = False
    """Of several models: loaded at the start, and never unloaded for another or when idle."""
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

    count: Positive = 2
    """How many workers."""
    kv_bytes: int | str = "128MiB"
    """The KV cache of each, for one model."""
    memory_bytes: Annotated[int | str | None, msgspec.Meta(examples=["16GiB"])] = None
    """What each may hold of several models, weights and KV, and of one model's weights.  Default: nine tenths of
    the available memory, divided among them."""

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
    """GPUs, by index or UUID.  One named twice gets two workers: then `[model.vllm] kv_cache_memory_bytes` must say
    the memory of each."""
    cpu: CpuDevices | None = None
    per_worker: Annotated[Positive | None, msgspec.Meta(examples=[2])] = None
    """Devices of each worker, which divide every layer among them (tensor parallelism); a divisor of the model's
    attention heads.  Default: as few as hold the weights and leave room for KV."""

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
    """A worker keeps free what its requests add in this time: that of an epoch, a move and a block."""
    prefix_aware: bool = True
    """Prefer, where the targets are kept, a worker that probably has the prompt's beginning cached (`mell-slo`)."""
    roles: Literal["auto", "off"] = "off"
    """`auto`: some workers only compute prompts and hand them over after the first token, while that keeps a tight
    `itl_ms` better (`mell-slo`)."""
    fixed_roles: dict[str, Literal["mixed", "prefill", "decode"]] = {}  # noqa: RUF012  a Struct copies it
    """Roles by worker instead, `--role w0=prefill` each; the others are mixed."""
    decision_log: Annotated[str | None, msgspec.Meta(examples=["/var/log/melld/decisions.jsonl"])] = None
    """A file for all decisions and their facts: docs/decision-log.md."""
    stories_kept: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """How many ended requests `melld why` remembers, some KiB each."""


class PrioritiesConfig(Table, frozen=True, kw_only=True):
    """The classes of requests: high (`priority` below 0), normal (0) and low."""

    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.25
    """Part of a worker's room and pace that others leave to high ones there, if they find a place elsewhere."""
    age_s: PositiveSeconds = 60.0
    """A request that has waited so long goes as one of the next class."""
    hole_s: Seconds = 2.0
    """Longest moves that make room for a large request (an eighth of a worker) at the head of the line; 0: none."""
    suspend: bool = True
    """Where that makes no room for a high request, a low one gives up its place and resumes later."""


class TargetsConfig(Table, frozen=True, kw_only=True):
    """The promise to each request; `mell-slo` keeps as few workers awake as keep it."""

    itl_ms: Annotated[PositiveMilliseconds | None, msgspec.Meta(examples=[50.0])] = None
    """Longest mean time between two tokens of a request.  In each step prompts get what decoding leaves of it (of twice
    as much with `mell-slo`); other policies add no request to a worker whose decoding takes longer.  Default, for
    `mell-slo` alone: 50 ms, or twice a step with one request where that is longer."""
    ttft_s: PositiveSeconds = 2.0
    """Longest time until the first token; four times what the prompt takes alone, if that is longer."""
    attainment: Annotated[float, msgspec.Meta(ge=0.5, lt=1)] = 0.99
    """Part of the requests that `mell-slo` aims to serve within each."""
    shed: bool = False
    """When all workers are busy, send requests away (503) whose first token can no longer come in time.  Else all
    are served, more slowly."""

    @property
    def itl_s(self) -> float | None:
        """Return the configured time between tokens in seconds, or None."""
        return self.itl_ms / 1e3 if self.itl_ms is not None else None


class MigrationConfig(Table, frozen=True, kw_only=True):
    """The moves of running requests."""

    checksum: bool = False
    """Compare copied blocks with the source's; a mismatch cancels the move."""
    link_bytes_per_s: Annotated[int | str | None, msgspec.Meta(examples=["2GiB"])] = None
    """Most that one link (one worker to another) may copy per second: `"2GiB"`."""
    boundaries: Literal["auto", "saved", "default"] = "auto"
    """What links may carry and workers compute for moves in an epoch: `auto`, as measured at the first start while
    idle; `saved`, by `melld profile`; `default`, generous figures."""
    step_slowdown: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """How much longer, as a fraction, steps may become beside tokens of moves."""
    max_moves_per_link: Positive = 4
    """Most moves under way from one worker to another; more wait."""

    @property
    def link_limit_bytes_per_s(self) -> float | None:
        """Return the limit of a link's copies as a number, or None for no limit."""
        if self.link_bytes_per_s is None:
            return None
        return float(parse_bytes(self.link_bytes_per_s, "migration.link_bytes_per_s"))


class IdleConfig(Table, frozen=True, kw_only=True):
    """The rest of a worker that is not needed.

    First it sleeps: its process stays, and answers at once.  Then its process ends, which frees memory and power
    until it is needed.
    """

    sleep_after_s: Annotated[Seconds | None, msgspec.Meta(examples=[60.0])] = None
    """Seconds without requests after which a worker sleeps.  Default: 60; `mell-slo`: as long as staying awake costs
    less than being woken, by how soon it was needed so far."""
    stop_after_s: Seconds = 240.0
    """Seconds asleep after which its process ends; longer if it was needed again soon."""


class HealthConfig(Table, frozen=True, kw_only=True):
    """The signs of a hung worker, which is killed and replaced."""

    ping_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """How long it may leave pings unanswered; it answers them while it computes."""
    step_timeout_s: PositiveSeconds = 300.0
    """How long one step may take."""
    steady_after_s: Seconds = 120.0
    """How long one that has died must work to be trusted again: until then each death doubles the wait for the next
    start, from 1 to 60 s, and it gets what no other has room for."""


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
