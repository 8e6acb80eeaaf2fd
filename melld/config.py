"""The frozen configuration, from one TOML file; command-line flags override it.

An unknown key or a bad value raises a `ConfigError` that says where.  This module parses text; `melld.cli` reads the
file and the environment.
"""

import re
import tomllib
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from melld.config_reading import read_tables
from melld.errors import ConfigError

MIB = 1 << 20
LARGEST_SIZE = 1 << 63
MOST_PRIORITY = 100
"""The largest number of a `priority`: enough to order a machine's clients by, while a time given by mistake is told."""
SERVED_MODEL_NAME = "served_model_name"
TOML_HINT = 'a line is KEY = VALUE with text in quotes, such as host = "127.0.0.1" or port = 8000, below its [table]'
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": MIB, "GIB": 1 << 30}

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Priority = Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
PositiveMilliseconds = Annotated[float, msgspec.Meta(gt=0)]
DIGEST = "sha256:<64 hex digits>"
SECRET = {"secret": True}
"""Marks a key whose value never appears in an error: it may be an API key."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; unknown keys are refused and every value is checked."""


class ClientConfig(_Table, frozen=True, kw_only=True):
    """`[[server.clients]]`: a key with a name, and how urgent its requests are."""

    key: Annotated[str, msgspec.Meta(examples=[DIGEST], extra=SECRET)]
    """Its digest."""
    name: str
    """For the status and the decision log.  Keys with one name are one client."""
    priority: Priority | None = None
    """Of requests that ask for none.  Default: 0, or the most urgent that they may ask for."""
    min_priority: Priority | None = None
    """The most urgent that they may ask for.  Default: `[server] min_priority`, or `priority` if that is lower."""


class ServerConfig(_Table, frozen=True, kw_only=True):
    """The HTTP API with its limits, and the control socket."""

    host: str = "127.0.0.1"
    """Where the API listens.  Beyond loopback it needs a key.  A socket unit of systemd overrides it and `port`."""
    port: Port = 8000
    """TCP port; 0 takes a free one."""
    api_key_file: Annotated[str | None, msgspec.Meta(examples=["/etc/melld/api-keys"], extra=SECRET)] = None
    """A file with a key per line, plain or as `sha256:` and its hex digest."""
    api_keys: Annotated[tuple[str, ...], msgspec.Meta(examples=[[DIGEST]], extra=SECRET)] = ()
    """Such digests; plain keys belong in `api_key_file`."""
    clients: Annotated[
        tuple[ClientConfig, ...],
        msgspec.Meta(examples=[[{"key": DIGEST, "name": "chat", "priority": -1}]], extra=SECRET),
    ] = ()
    """Keys with names, as `[[server.clients]]`: `key` (such a digest), `name`, `priority` of requests that
    ask for none, `min_priority`: the most urgent that they may ask for.  Lower goes first."""
    allow_remote_without_key: bool = False
    """Listen beyond loopback even without a key."""
    runtime_directory: Annotated[str | None, msgspec.Meta(examples=["/run/melld"])] = None
    """Directory of the control socket, mode 0700.  Default: `$RUNTIME_DIRECTORY`, else `$XDG_RUNTIME_DIR/melld`, else
    `/tmp/melld-<uid>`."""
    max_body_bytes: Positive = 8 * MIB
    """Largest body, also after decompression (413)."""
    max_header_bytes: Positive = 8 << 10
    """Largest header (431)."""
    max_headers: Positive = 128
    """Most headers (431)."""
    header_timeout_s: PositiveSeconds = 10.0
    """How long a client may take to send the headers (408)."""
    body_timeout_s: PositiveSeconds = 30.0
    """How long it may take to send the body (408)."""
    max_concurrent_requests: Positive = 1024
    """Most calls that run or wait at a time (429)."""
    max_queued_requests: Positive = 1024
    """Most requests that wait for room; then the newest of the client with most of them gets a 429."""
    queue_deadline_s: PositiveSeconds = 300.0
    """How long a request may wait for room before it begins (503)."""
    min_priority: Annotated[int | None, msgspec.Meta(examples=[0])] = None
    """The most urgent `priority` that clients may ask for; lower goes first.  Default: 0 with several keys."""
    max_prompts_per_call: Positive = 256
    """Most prompts in one call."""
    max_choices: Positive = 128
    """Largest `n`."""
    max_prompt_logprobs: Positive = 10_000
    """Most prompt tokens times (logprobs + 1) of a call, half a kilobyte each; all calls may have sixteen times
    as many."""
    max_repeated_prompt_tokens: Positive = 1_000_000
    """Most prompt tokens times `n`."""
    max_message_parts: Positive = 3000
    """Most messages, parts and tool calls of a call; a thousand stop all streams for about 10 ms."""
    max_tool_arguments: Positive = 1 << 19
    """Most characters in the arguments of a conversation's tool calls."""
    max_stop_strings: Positive = 64
    """Most stop strings in one call."""
    max_json_depth: Positive = 64
    """Deepest nesting in a body."""
    max_constraint_bytes: Positive = 128 << 10
    """Largest constraint on an output, such as a JSON schema; all tools together may have eight times as much."""
    constraint_cpu_s: PositiveSeconds = 2.0
    """CPU time to compile a constraint (400)."""
    slow_reader_s: PositiveSeconds = 30.0
    """A stream that its client does not read for this long ends, with its request."""
    keep_alive_comment_s: PositiveSeconds = 15.0
    """A stream silent for this long gets a comment line, so that no proxy cuts it."""
    keep_alive_s: PositiveSeconds = 75.0
    """How long an idle connection is kept."""
    extra_roles: Annotated[tuple[str, ...], msgspec.Meta(examples=[["critic"]])] = ()
    """Roles that the model's chat template knows beside OpenAI's."""
    allow_internal_media_urls: bool = False
    """Fetch images named by URL from addresses that are not public, too."""
    drain_s: Seconds = 30.0
    """How long requests may continue after SIGTERM."""


class AdapterConfig(_Table, frozen=True, kw_only=True):
    """`[[model.lora]]`: a LoRA adapter, which clients ask for by its name."""

    name: str
    path: str
    """Directory of `adapter_config.json` and its weights, or a name on Hugging Face."""


class ModelConfig(_Table, frozen=True, kw_only=True):
    """What is served."""

    short_form: ClassVar[str] = "path"
    hint: ClassVar[str] = "; options of vLLM stand in [model.vllm]"

    path: Annotated[str, msgspec.Meta(examples=["/models/Llama-3.1-8B-Instruct"])]
    """Directory of the model, or its name on Hugging Face."""
    name: Annotated[str | tuple[str, ...] | None, msgspec.Meta(examples=["llama"])] = None
    """Its name for clients, or several: `["llama", "gpt-4o"]`; answers and metrics carry the first.  Default: the last
    part of the path."""
    vllm: Annotated[dict[str, Any], msgspec.Meta(examples=[{"max_model_len": 16384}])] = {}
    """Options of `vllm serve` by their long names: `max_model_len = 16384`.  What melld sets itself is refused."""
    lora: Annotated[tuple[AdapterConfig, ...], msgspec.Meta(examples=[[{"name": "pirate", "path": "/pirate"}]])] = ()
    """LoRA adapters, as `[[model.lora]]`: clients ask for one by its `name`; `path` is a directory, or a name on
    Hugging Face."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """While KV memory is short, the next goes to the model that had the least for its weight and rate of requests."""
    pinned: bool = False
    """Of several models: loaded at the start, and never unloaded for another or when idle."""
    keep_alive_s: Annotated[Seconds | None, msgspec.Meta(examples=[300.0])] = None
    """Seconds without requests after which it is unloaded, in place of `[idle]`; the next request loads it.  0: at
    once.  `inf`: never."""

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


class CpuDevices(_Table, frozen=True, kw_only=True):
    """`cpu = {count = 2, kv_bytes = "128MiB"}`, or `cpu = 2`: workers on the CPU, one thread each."""

    short_form: ClassVar[str] = "count"

    count: Positive = 2
    """How many workers."""
    kv_bytes: int | str = "128MiB"
    """The KV cache of each, for one model."""
    memory_bytes: Annotated[int | str | None, msgspec.Meta(examples=["16GiB"])] = None
    """What each may hold of several models, weights and KV together, and of one model's weights.  Default: nine tenths
    of the memory that is available at the start, divided among them."""

    @property
    def kv_cache_bytes(self) -> int:
        """Return the KV cache of each worker, in bytes."""
        return parse_bytes(self.kv_bytes, "devices.cpu.kv_bytes")

    @property
    def memory_limit_bytes(self) -> int | None:
        """Return what each device may hold of several models, in bytes; None: as much as there is."""
        return None if self.memory_bytes is None else parse_bytes(self.memory_bytes, "devices.cpu.memory_bytes")


class DevicesConfig(_Table, frozen=True, kw_only=True):
    """`cuda` or `cpu`; neither: all GPUs, else two CPU devices."""

    cuda: Annotated[tuple[int | str, ...] | None, msgspec.Meta(examples=[[0, 1]])] = None
    """GPUs, by index or UUID.  One that is named twice gets two workers: then set the memory of each by
    `[model.vllm] kv_cache_memory_bytes`."""
    cpu: CpuDevices | None = None
    per_worker: Annotated[Positive | None, msgspec.Meta(examples=[2])] = None
    """Devices of each worker: they divide every layer of the model among them (tensor parallelism).  The model's
    attention heads must be a multiple of it.  Default: as few as hold the weights and leave room for KV."""

    @property
    def group_size(self) -> int:
        """Return the devices of each worker."""
        return self.per_worker or 1


class SchedulerConfig(_Table, frozen=True, kw_only=True):
    """How requests are placed."""

    policy: str = "mell-slo"
    """One of docs/scheduling.md.  `most-free` spreads over all workers."""
    epoch_ms: Annotated[float, msgspec.Meta(ge=1, le=60_000)] = 100.0
    """Period of re-planning."""
    headroom_s: Seconds = 0.5
    """A worker keeps free what its requests add in this time: that of an epoch, a move and a block."""
    prefix_aware: bool = True
    """Among workers that keep the targets, prefer one that probably has the prompt's beginning in its prefix cache
    (`mell-slo`)."""
    roles: Literal["auto", "off"] = "off"
    """`auto`: some workers only compute prompts and hand them over after the first token, while that keeps a tight
    `itl_ms` better (`mell-slo`)."""
    fixed_roles: dict[str, Literal["mixed", "prefill", "decode"]] = {}
    """Roles by worker instead, `--role w0=prefill` each; the others are mixed."""
    decision_log: Annotated[str | None, msgspec.Meta(examples=["/var/log/melld/decisions.jsonl"])] = None
    """A file for all decisions and their facts: docs/decision-log.md."""
    stories_kept: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """How many ended requests `melld why` remembers, some KiB each."""


class PrioritiesConfig(_Table, frozen=True, kw_only=True):
    """What the classes of requests mean: high (`priority` below 0), normal (0) and low."""

    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.25
    """Part of a worker's room and pace that others leave to high ones there, as long as they find a place elsewhere."""
    age_s: PositiveSeconds = 60.0
    """A request that has waited so long goes as one of the next class; so nobody starves."""


class TargetsConfig(_Table, frozen=True, kw_only=True):
    """What each request is promised; `mell-slo` keeps as few workers awake as keep it."""

    itl_ms: Annotated[PositiveMilliseconds | None, msgspec.Meta(examples=[50.0])] = None
    """Longest mean time between two tokens of a request.  In each step prompts get what decoding leaves of it (of twice
    as much with `mell-slo`); other policies add no request to a worker whose decoding takes longer.  Default, for
    `mell-slo` alone: 50 ms, or twice a step with one request where that is longer."""
    ttft_s: PositiveSeconds = 2.0
    """Longest time until the first token; four times what the prompt takes alone, if that is longer."""
    attainment: Annotated[float, msgspec.Meta(ge=0.5, lt=1)] = 0.99
    """Part of the requests that `mell-slo` aims to serve within each of the two."""
    shed: bool = False
    """When all workers are busy, send requests away (503) whose first token can no longer come in time, so that the
    others are served in time.  Else all are served, more slowly."""

    @property
    def itl_s(self) -> float | None:
        """Return the configured time between tokens in seconds, or None."""
        return self.itl_ms / 1e3 if self.itl_ms is not None else None


class MigrationConfig(_Table, frozen=True, kw_only=True):
    """How running requests are moved."""

    checksum: bool = False
    """Compare copied blocks with the source's; a mismatch cancels the move."""
    link_bytes_per_s: Annotated[int | str | None, msgspec.Meta(examples=["2GiB"])] = None
    """Most that one link (one worker to another) may copy per second: `"2GiB"`."""
    boundaries: Literal["auto", "saved", "default"] = "auto"
    """What links may carry and workers compute for moves in an epoch.  `auto`: as measured, at the first start while
    idle.  `saved`: as measured by `melld profile`.  `default`: generous figures, fitted to no machine."""
    step_slowdown: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """How much longer, as a fraction, steps may become beside tokens that are computed for moves."""
    max_moves_per_link: Positive = 4
    """Most moves under way from one worker to another; more wait."""

    @property
    def link_limit_bytes_per_s(self) -> float | None:
        """Return the limit of a link's copies as a number, or None for no limit."""
        if self.link_bytes_per_s is None:
            return None
        return float(parse_bytes(self.link_bytes_per_s, "migration.link_bytes_per_s"))


class IdleConfig(_Table, frozen=True, kw_only=True):
    """What happens to a worker that is not needed.

    First it sleeps: its process stays, and answers at once when needed.  Then its process ends, which frees memory and
    power; requests that need it wait until it has loaded the weights.
    """

    sleep_after_s: Annotated[Seconds | None, msgspec.Meta(examples=[60.0])] = None
    """Seconds without requests after which a worker sleeps.  Default: 60; `mell-slo`: as long as staying awake costs
    less than being woken, by how soon it was needed so far."""
    stop_after_s: Seconds = 240.0
    """Seconds asleep after which its process ends; longer if it was needed again soon."""


class HealthConfig(_Table, frozen=True, kw_only=True):
    """When a worker counts as hung, and is killed and replaced."""

    ping_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """How long it may leave pings unanswered; it answers them while it computes."""
    step_timeout_s: PositiveSeconds = 300.0
    """How long one step may take."""
    steady_after_s: Seconds = 120.0
    """How long one that has died must work to be trusted again: until then each death doubles the wait for the next
    start, from 1 to 60 s, and it gets what no other has room for."""


class Config(_Table, frozen=True, kw_only=True):
    """The whole configuration."""

    model: ModelConfig
    models: tuple[ModelConfig, ...] = ()
    """`[[models]]`, in place of `[model]`, which then is the first of them."""
    server: ServerConfig = ServerConfig()
    devices: DevicesConfig = DevicesConfig()
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


def parse_bytes(size: int | str, where: str) -> int:
    """Return the bytes of an integer or a string such as `"128MiB"`; raise `ConfigError` naming `where` otherwise."""
    value: float
    if isinstance(size, int):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(where, f"{size!r} is not a size such as 134217728 or '128MiB'")
        value = float(match[1]) * _UNITS[match[2].upper()]
    if not 0 < value < LARGEST_SIZE:
        raise ConfigError(
            where, f"{str(size)[:40]} is not a size such as 134217728 or '128MiB': above zero, below 8 EiB"
        )
    return int(value)


def parse_config(text: str, where: str, overrides: dict[str, Any] | None = None) -> Config:
    """Return the configuration in `text` (TOML), with `overrides` (dotted key -> value) applied.

    Raises:
        ConfigError: the text is not TOML, a key is unknown, a value is of the wrong type or out of range.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(where, f"not TOML: {error}; {TOML_HINT}") from error
    for dotted, value in (overrides or {}).items():
        _lay_over(tables, dotted, value)
    _name_first_model(tables, where)
    config = read_tables(tables, Config, where)
    _check_together(config, where)
    return config


def _name_first_model(tables: dict[str, Any], where: str) -> None:
    """Make the first of `[[models]]` the model of whoever knows only one."""
    models = tables.get("models")
    if not isinstance(models, list | tuple) or not models:
        return
    if "model" in tables:
        raise ConfigError(
            where, "[model] and [[models]] (or --model): one model is named by the first, several by the second"
        )
    tables["model"] = models[0]


def _lay_over(tables: dict[str, Any], dotted: str, value: object) -> None:
    *path, key = dotted.split(".")
    table = tables
    for name in path:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(dotted, f"{name} is not a table")
    table[key] = value


def _check_names(model: ModelConfig, where: str) -> None:
    served = model.vllm_option(SERVED_MODEL_NAME)
    if served is not None and model.name is not None:
        raise ConfigError(where, f"[model] has a name, and [model.vllm] a {SERVED_MODEL_NAME}: keep one of them")
    key, given = ("model.name", model.name) if served is None else (f"model.vllm.{SERVED_MODEL_NAME}", served)
    names = given if isinstance(given, list | tuple) else (given,)
    if given is not None and (not names or not all(isinstance(name, str) and name for name in names)):
        raise ConfigError(where, f'[{key}] wants a name, or a list of names, such as ["llama", "gpt-4o"]')


def _check_models(models: tuple[ModelConfig, ...], where: str) -> None:
    owners: dict[str, ModelConfig] = {}
    for model in models:
        _check_names(model, where)
        for name in (*model.names, *(adapter.name for adapter in model.lora)):
            if name in owners:
                raise ConfigError(
                    where,
                    f"[[models]] {owners[name].path} and {model.path} are both called {name!r}: rename one",
                )
            owners[name] = model


def _check_keys(server: ServerConfig, where: str) -> None:
    digests = [("api_keys", digest) for digest in server.api_keys]
    for name, digest in digests + [("clients.key", client.key) for client in server.clients]:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            why = f"holds something other than {DIGEST}, as `printf %s KEY | sha256sum` prints them"
            raise ConfigError(where, f"[server.{name}] {why}")
    for client in server.clients:
        if not re.fullmatch(r"[\w.-]{1,64}", client.name):
            raise ConfigError(where, "[server.clients.name] wants at most 64 letters, digits and - . _")
        least, own = client.min_priority, client.priority
        if least is not None and own is not None and own < least:
            why = f"{client.name} has min_priority {least}: its priority is that or more, not {own}"
            raise ConfigError(where, f"[server.clients] {why}")


def _check_together(config: Config, where: str) -> None:
    _check_models(config.served, where)
    if config.devices.cuda is not None and config.devices.cpu is not None:
        raise ConfigError(where, "[devices] has both cuda and cpu: keep one, such as cuda = [0, 1] or cpu = 2")
    if config.devices.cuda is not None and not config.devices.cuda:
        raise ConfigError(where, "[devices] cuda is empty: name GPUs, such as [0, 1], or leave it out for all of them")
    if config.devices.group_size > 1 and len(config.served) > 1:
        raise ConfigError(where, "[devices] per_worker above 1 is for one model: several models share single devices")
    if config.devices.cpu is not None:
        _ = config.devices.cpu.kv_cache_bytes, config.devices.cpu.memory_limit_bytes
    _ = config.migration.link_limit_bytes_per_s
    _check_keys(config.server, where)
