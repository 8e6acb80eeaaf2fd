"""`melld simulate --models FILE`: several models on shared devices, under the Landlord and under what others do.

Owns the file's schema and the output.  Never simulates itself: `melld.simulator.models` does.
"""

import argparse
import math
import pathlib
import random
import sys
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from melld.errors import ConfigError
from melld.ids import ModelName
from melld.landlord.granules import granule_bytes_for
from melld.simulator.catalogue import ACTIVATION_BYTES, BLOCK_TOKENS, MEMORY_UTILISATION, card_by_name, model_by_name
from melld.simulator.models.experiment import TENANCIES, run_tenancy
from melld.simulator.models.measures import WARM_UP_S, ModelsReport
from melld.simulator.models.setting import RatedModel, Setting, arrivals
from melld.simulator.workload import LogNormal, parse_lengths

CHAT = LogNormal(88.0, 1.1, 240.0, 0.83)
"""Means of about 161 and 338 tokens: ShareGPT, as MuxServe has it."""
DEFAULT_SHARING = "lending,split,collated"
OTHERS: dict[str, Any] = {
    **dict.fromkeys(("model", "capacity_bytes", "bytes_per_token", "step_ms", "itl_target_ms", "ttft_target_s")),
    **dict.fromkeys(("link_rate", "machines", "machine_link_rate", "lose_machine_s")),
    **dict.fromkeys(("policy", "retire_after_s", "rate", "high_part", "decision_log")),
    "length_factor": 1.0,
    "variation": 1.0,
    "wake_s": 0.0,
    "failure_rate": 0.0,
    "paper_slots": False,
}
"""What says nothing to several models, each with its default."""


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    model: str
    rate: float
    keep_alive_s: float = 300.0
    pinned: bool = False
    weight: float = 1.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: list[_Row]


def run_models(arguments: argparse.Namespace) -> int:
    """Simulate and print.

    Raises:
        ConfigError: flags that cannot be combined, or an unusable file.
    """
    names = _sharing(arguments)
    if arguments.seconds == math.inf or arguments.seconds <= WARM_UP_S:
        raise ConfigError(
            "--seconds", f"needed with --models, and above {WARM_UP_S:.0f}: earlier requests do not count"
        )
    for other, default in OTHERS.items():
        if getattr(arguments, other) != default:
            raise ConfigError("--" + other.replace("_", "-"), "cannot be combined with --models")
    setting = _setting(arguments)
    lengths = CHAT if arguments.lengths is None else parse_lengths(arguments.lengths)
    load = arrivals(setting.models, arguments.seconds, lengths, random.Random(arguments.seed))
    reports = [run_tenancy(name, setting, load) for name in names]
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.encode({"sharing": reports}) + b"\n")
    else:
        print(_table(reports, setting))
    return 0


def _sharing(arguments: argparse.Namespace) -> list[str]:
    names = [name.strip() for name in (arguments.sharing or DEFAULT_SHARING).split(",")]
    for name in names:
        if name not in TENANCIES:
            raise ConfigError("--sharing", f"{name!r} is not one of {', '.join(TENANCIES)}")
    return list(dict.fromkeys(names))


def _setting(arguments: argparse.Namespace) -> Setting:
    rows = read_models(arguments.models)
    card = card_by_name(arguments.gpu or "a100-80g")
    served = tuple(
        RatedModel(ModelName(row.name), model_by_name(row.model), row.rate, row.keep_alive_s, row.pinned, row.weight)
        for row in rows
    )
    granule_bytes = granule_bytes_for(BLOCK_TOKENS * one.model.bytes_per_token for one in served)
    for one in served:
        needs_bytes = one.model.weight_bytes + ACTIVATION_BYTES + 2 * granule_bytes
        if needs_bytes > card.memory_bytes * MEMORY_UTILISATION:
            raise ConfigError("--gpu", f"{one.name} does not fit on {card.name}")
    return Setting(served, card, arguments.gpus or 1, arguments.epoch_ms / 1e3, arguments.slots)


def read_models(path: pathlib.Path) -> list[_Row]:
    """Return the models of the file.

    Raises:
        ConfigError: it cannot be read, or does not describe models.
    """
    try:
        rows = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).models
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(str(path), f"not a file of models: {error}") from error
    names = [row.name for row in rows]
    if len(rows) < 2 or len(set(names)) < len(names):
        raise ConfigError(str(path), "needs two [[models]] or more, each with a name of its own")
    for row in rows:
        if not 0 < row.rate < math.inf:
            raise ConfigError(str(path), f"{row.name}: rate must be above zero: {row.rate}")
        if not 0 < row.weight < math.inf:
            raise ConfigError(str(path), f"{row.name}: weight must be above zero: {row.weight}")
        if not row.keep_alive_s >= 0:
            raise ConfigError(str(path), f"{row.name}: keep_alive_s must be at least 0: {row.keep_alive_s}")
    return rows


def _table(reports: Sequence[ModelsReport], setting: Setting) -> str:
    lines: list[tuple[str, Callable[[ModelsReport], str]]] = [
        ("within 8 times its time alone", lambda r: f"{r.attainment:.1%}"),
        ("requests per second", lambda r: f"{r.requests_per_s:.2f}"),
        ("times its time alone, median", lambda r: f"{r.slowdown_p50:.1f}"),
        ("  99th percentile", lambda r: f"{r.slowdown_p99:.1f}"),
        ("device-seconds", lambda r: f"{r.device_seconds:.0f}"),
        ("preemptions", lambda r: f"{r.preemptions}"),
        ("models loaded, woken", lambda r: f"{r.loads}"),
    ]
    heading = f"{len(setting.models)} models on {setting.devices} x {setting.card.name}, {reports[0].requests} requests"
    width = max(len(label) for label, _ in lines)
    rows = [heading, "", " " * width + "".join(f"  {report.tenancy:>10}" for report in reports)]
    rows += [f"{label:<{width}}" + "".join(f"  {show(report):>10}" for report in reports) for label, show in lines]
    return "\n".join(rows)
