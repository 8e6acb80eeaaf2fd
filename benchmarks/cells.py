"""What the simulations of `packing.py` and `slo_table.py` share: machines, and results kept until their source changes.

Owns the files of results under benchmarks/out.  Knows no load and judges nothing.
"""

import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from melld.simulator.catalogue import CARDS, MODELS, kv_capacity_bytes
from melld.simulator.latency import profile_for
from melld.simulator.settings import SimulatorSettings

ROOT = pathlib.Path(__file__).parents[1]
GIB = 2**30
Result = TypeVar("Result")
OTHERS = {"mell-slo": (), "mell-plus": ("slo",)}
"""Folders of policies that a policy does not use; the others use neither."""


def machine_settings(model_name: str, card_name: str, **more: Any) -> SimulatorSettings:
    """Return the settings of GPUs of this card with this model, and what else is given."""
    model, card = MODELS[model_name], CARDS[card_name]
    return SimulatorSettings(
        capacity_bytes=kv_capacity_bytes(model, card),
        bytes_per_token=model.bytes_per_token,
        latency=profile_for(model, card),
        **more,
    )


def kept(path: pathlib.Path, kind: type[Result], make: Callable[[], Result]) -> Result:
    """Return the result in the file; make and keep it if there is none."""
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=kind)
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(result))
    part.rename(path)
    return result


@functools.cache
def source_of(policy: str) -> str:
    """Return a hash of the source that the policy's figures depend on.

    Read once, before the processes part: what runs is what was imported then, whatever is written meanwhile.
    """
    package = ROOT / "melld"
    files = [*(package / "simulator").glob("*.py")]
    files += [package / "simulator" / "data" / "latency.csv", *(package / "scheduler").glob("*.py")]
    others = next((names for known, names in OTHERS.items() if policy.startswith(known)), ("slo", "plus"))
    policies = (package / "scheduler" / "policies").rglob("*.py")
    files += [path for path in policies if path.parent.name not in others]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
