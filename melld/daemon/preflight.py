"""Startup checks that run before anything slow, and startup progress messages."""

import asyncio
import logging
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from melld.config import Config
from melld.control.status import SERVING, DaemonStatus, WorkerState, WorkerStatus
from melld.daemon.model import ServedModel
from melld.daemon.systemd import own_command
from melld.driver.idle import SLEEP_AFTER_S
from melld.engine.fleet.place import Place
from melld.engine.model_files import answer_formats
from melld.errors import ConfigError, MelldError
from melld.ids import WorkerId
from melld.nearest import did_you_mean, nearest
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.names import POLICIES
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.priorities import Priorities
from melld.scheduler.roles import Role, RoleSettings
from melld.scheduler.scheduler import SchedulerSettings
from melld.scheduler.targets import Targets, promised

A_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
"""A model's name on Hugging Face, perhaps with the quantization of a GGUF file."""
WHAT_A_MODEL_IS = "a model directory has config.json, weights (*.safetensors) and a tokenizer"


NEVER_S = 1e9
"""Longer than any daemon runs: a decision log, being JSON, has no infinity."""
INTERVAL_S = 5.0
log = logging.getLogger(__name__)


class CannotListen(MelldError):
    """The address is taken, or is none of this machine's."""


def scheduler_settings(config: Config) -> SchedulerSettings:
    """Return the scheduler's part of the configuration."""
    priorities = config.priorities
    return SchedulerSettings(
        cluster=ClusterSettings(
            horizon_s=_finite(config.scheduler.headroom_s),
            targets=promised_by(config),
            retire_after_s=retire_after_s(config),
            priorities=Priorities(
                headroom=priorities.headroom,
                age_s=_finite(priorities.age_s),
                hole_s=_finite(priorities.hole_s),
                suspend=priorities.suspend,
            ),
            roles=RoleSettings(
                auto=config.scheduler.roles == "auto",
                fixed={WorkerId(worker): Role(role) for worker, role in config.scheduler.fixed_roles.items()},
            ),
        ),
        max_waiting=config.server.max_queued_requests,
        wait_deadline_s=_finite(config.server.queue_deadline_s),
    )


def promised_by(config: Config) -> Targets:
    """Return the targets of requests."""
    keys = config.targets
    itl_s = None if keys.itl_s is None else _finite(keys.itl_s)
    return promised(itl_s, _finite(keys.ttft_s), keys.shed, keys.attainment)


def retire_after_s(config: Config) -> float | None:
    """Return how long idle workers stay awake; None: the policy decides."""
    if config.idle.sleep_after_s is not None:
        return _finite(config.idle.sleep_after_s)
    return None if config.scheduler.policy == MellSlo.name else SLEEP_AFTER_S


def _finite(seconds: float) -> float:
    return min(seconds, NEVER_S)


def check_roles(config: Config, workers: Collection[str]) -> None:
    """Raise `ConfigError` for the role of an unknown worker."""
    for worker in config.scheduler.fixed_roles:
        if worker not in workers:
            raise ConfigError("[scheduler] fixed_roles", f"{worker!r} is not one of the workers {', '.join(workers)}")


def check_model(path: str) -> None:
    """Check that a model's directory can be read and describes one.  Names and URLs are vLLM's to find.

    Raises:
        ConfigError: there is no model.
    """
    try:
        _check_model(Path(path), path)
    except OSError as error:
        raise ConfigError("[model] path", f"{error.filename or path}: {error.strerror}") from error


def _check_model(directory: Path, path: str) -> None:
    shown, description = path or "''", directory / "config.json"
    if directory.is_dir():
        if not description.is_file():
            raise ConfigError("[model] path", f"{shown} has no config.json: {WHAT_A_MODEL_IS}{_model_near(directory)}")
        try:
            msgspec.json.decode(description.read_bytes(), type=dict)
        except msgspec.MsgspecError as error:
            raise ConfigError("[model] path", f"{description} is not JSON: {error}") from error
    elif directory.exists():
        hint = f"; to use it as the configuration, pass --config {shown}" if directory.suffix == ".toml" else ""
        raise ConfigError("[model] path", f"{shown} is a file: {WHAT_A_MODEL_IS}{hint}")
    elif path.startswith((".", "/", "~")) or not ("://" in path or A_NAME.fullmatch(path)):
        home = directory.expanduser() if path.startswith("~/") else directory
        hint = f"; did you mean {str(home)!r}?" if home.is_dir() else _model_near(directory)
        raise ConfigError("[model] path", f"no such directory: {shown}: {WHAT_A_MODEL_IS}{hint}")


def _model_near(wrong: Path) -> str:
    """Return a hint at a model inside the directory, or next to it under a similar name."""
    inside = sorted(one.parent for one in wrong.glob("*/config.json"))
    if inside:
        return f"; did you mean {str(inside[0])!r}?"
    near = nearest(wrong.name, (one.parent.name for one in wrong.parent.glob("*/config.json")))
    return f"; did you mean {str(wrong.parent / near)!r}?" if near else ""


def check_policy(policy: str) -> None:
    """Raise `ConfigError` for an unknown scheduling policy."""
    if policy not in POLICIES:
        hint = did_you_mean(policy, POLICIES)
        raise ConfigError("[scheduler] policy", f"{policy!r} is not one of {', '.join(POLICIES)}{hint}")


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that a taken port is found before anything slow."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    except UnicodeError:  # `127.0..1`
        raise CannotListen(f"cannot listen on {host}:{port}: not a valid host name") from None
    return listener


def url_of(listeners: Sequence[socket.socket]) -> str:
    """Return the API's address for people: the first network address, else a Unix socket."""
    networked = [one for one in listeners if one.family in (socket.AF_INET, socket.AF_INET6)]
    if not networked:
        return f"unix:{listeners[0].getsockname()}"
    host, port = networked[0].getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  a name for people, not an address to bind
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


CHAT = ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64')
_EXAMPLES = {
    "openai_serving_chat": CHAT,
    "openai_serving_transcription": ("/v1/audio/transcriptions", ""),
    "serving_embedding": ("/v1/embeddings", '"input": "Hello"'),
    "serving_scores": ("/rerank", '"query": "Hello", "documents": ["Good morning", "A table"]'),
    "serving_classification": ("/classify", '"input": "Hello"'),
}


def example_of(serving: object) -> tuple[str, str]:
    """Return an example call that these serving classes answer: its path and a part of its body, if JSON."""
    served = (call for name, call in _EXAMPLES.items() if getattr(serving, name, None) is not None)
    return next(served, ("/pooling", '"input": "Hello"'))


def ready_text(
    url: str,
    model: str,
    needs_key: bool,
    example: tuple[str, str],
    directory: str | None,
    missing: Sequence[WorkerStatus] = (),
) -> str:
    """Return the ready message, with lines to paste.

    `example`: a call that the model answers: its path and a part of its body, if JSON.  `directory`: the configured
    runtime directory.  `missing`: the workers that do not serve.
    """
    command = "melld" if shutil.which("melld") else own_command()
    key = ' -H "Authorization: Bearer $MELLD_API_KEY"' if needs_key else ""
    where = f" --runtime-directory {shlex.quote(directory)}" if directory else ""
    path, question = example
    body = f"-H 'Content-Type: application/json'{key} \\\n            -d '{{\"model\": \"{model}\", {question}}}'"
    body = body if question else f"-F model={shlex.quote(model)} -F file=@speech.wav{key}"
    at = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost" if url.startswith("unix:") else url
    told = ((one.worker, one.device, one.state, one.reason or one.why) for one in missing)
    without = "".join(f"\n  without {worker} on {device}, {state}: {why}" for worker, device, state, why in told)
    return f"""melld: ready{without}

  API     {url}/v1
  try     curl -s {at}{path} {body}
  status  {command} status --watch{where}
"""


def ready_lines(models: Sequence[ServedModel], status: DaemonStatus, directory: str | None, *, needs_key: bool) -> str:
    """Say how requests move, where the API is, with a call to try, and which workers do not serve."""
    first = next(model for model in models if model.serving is not None)
    moves = "".join(f"melld: {one.name} moves: {one.moves}\n" for one in models if one.has_been_warm)
    missing = [one for one in status.workers if one.state not in SERVING]
    return moves + ready_text(status.url, first.name, needs_key, example_of(first.serving), directory, missing)


class StartProgress:
    """The progress of one start of the daemon.  `imports` reports those of the workers' template."""

    def __init__(
        self, places: Callable[[], Collection[Place]], say: Callable[[str], None], imports: Callable[[], str]
    ) -> None:
        self._places = places
        self._say = say
        self._imports = imports
        self._began_s = time.monotonic()
        self._awaited = 0

    def begun(self, config: Config) -> None:
        """Say what is loaded, and where."""
        where = ", ".join(dict.fromkeys(place.slot.device for place in self._places()))
        if (cluster := config.cluster).address is not None:
            self._awaited = cluster.min_machines
            where = f"the machines of the Ray cluster at {cluster.address} ({cluster.min_machines} required)"
        self._say(f"melld: loading {', '.join(model.path for model in config.served)} on {where}")
        for model in config.served:
            if (formats := answer_formats(model)).says_something:
                self._say(f"melld: {model.names[0]}: {formats}")

    def became_ready(self, place: Place) -> None:
        """Say that this worker is ready."""
        self._say(f"melld: {place.slot.worker} is ready on {place.slot.device} ({self._elapsed_s:.1f} s)")

    async def run(self) -> None:
        """Report every `INTERVAL_S` on the workers that are not ready."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._say(f"melld: {self._elapsed_s:.0f} s: {self.line()}")

    def line(self) -> str:
        """Describe the workers that are not ready, grouped by what they are doing."""
        by_doing: dict[str, list[str]] = {}
        for place in self._places():
            if not place.is_ready and place.state is not WorkerState.STOPPED:
                by_doing.setdefault(place.doing, []).append(place.slot.worker)
        joined = len({place.slot.machine for place in self._places()})
        if joined < self._awaited:
            return f"waiting for machines to join ({joined} of {self._awaited})"
        parts = [f"{', '.join(workers)} {doing}" for doing, workers in by_doing.items()]
        return "; ".join(filter(None, ["; ".join(parts) or "preparing the API", self._imports()]))

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
