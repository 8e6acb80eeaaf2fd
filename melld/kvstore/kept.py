"""The kinds of state that models keep for a request between steps, and how such a request can move.

The single table behind refused copies, `melld check-config`, the startup log and docs/models.md.  Never imports vLLM:
`engine/layers.py` reads its descriptions of a model's layers.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class Kind(NamedTuple):
    """A kind of memory that a layer keeps."""

    told: str
    """Display text, as in `KV with state`; empty for what most models keep."""
    is_copied: bool
    """Its blocks are known to hold everything the next step needs, so a move may copy them."""
    is_bounded: bool = False
    """It does not grow with the request, or only up to a window."""


KINDS = {
    "FullAttentionSpec": Kind("", is_copied=True),
    "MLAAttentionSpec": Kind("latent vectors", is_copied=True),
    "SlidingWindowSpec": Kind("windows", is_copied=True, is_bounded=True),
    "ChunkedLocalAttentionSpec": Kind("chunks", is_copied=True, is_bounded=True),
    "MambaSpec": Kind("state", is_copied=True, is_bounded=True),
    "CrossAttentionSpec": Kind("an encoder's output", is_copied=False, is_bounded=True),
}
"""By vLLM's class for a layer's blocks (vllm.v1.kv_cache_interface)."""
UNTRIED = Kind("untested kind of KV", is_copied=False)
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


class Kept(msgspec.Struct, frozen=True):
    """The memory of one request on each device of a worker: up to `fixed_bytes`, plus `token_bytes` per token.

    `kinds`: what the layers keep, in order; empty if the model keeps nothing, like an encoder.
    """

    kinds: tuple[str, ...] = ()
    token_bytes: float = 0.0
    fixed_bytes: int = 0


def uncopied(kinds: Iterable[str]) -> list[str]:
    """Return the kinds that prevent KV from being copied, as text; empty if none does."""
    return [kind.told for kind in map(kind_of, kinds) if not kind.is_copied]


def are_known(kinds: Iterable[str]) -> bool:
    """Return True if requests with these kinds can move at all; otherwise they stay where they are."""
    return all(name in KINDS for name in kinds)


def kind_of(name: str) -> Kind:
    """Return the kind with this name."""
    return KINDS.get(name, UNTRIED)


def moves_text(kept: Kept, generates: bool, kv_refusal: str = "", refusal: str = "") -> str:
    """Return how requests of the model move, as in `KV with state, 65 MB + 20 KB a token`.

    `generates`: True if it generates tokens, False if it pools; `kv_refusal`: why its KV is not copied, whatever the
    model; `refusal`: why nothing moves at all.
    """
    if refusal or not are_known(kept.kinds):
        return f"none: {refusal or UNTRIED.told}"
    if not generates:
        return "none: each finishes in one step" + ("" if kept.kinds else ", without KV")
    if why := ", ".join(uncopied(kept.kinds)) or kv_refusal:
        return f"tokens, not KV ({why})"
    beside = [kind.told for kind in map(kind_of, kept.kinds) if kind.told]
    way = f"KV with {' and '.join(beside)}" if beside else "KV"
    sizes = [_size(kept.fixed_bytes)] if kept.fixed_bytes else []
    sizes += [f"{_size(kept.token_bytes)} a token"] if kept.token_bytes else []
    return ", ".join([way, *filter(None, [" + ".join(sizes)])])


def _size(size: float) -> str:
    unit, name = next((unit for unit in UNITS if size >= unit[0]), UNITS[-1])
    return f"{size / unit:.3g} {name}"
