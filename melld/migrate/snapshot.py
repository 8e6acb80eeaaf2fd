"""The state that travels with a request when it changes its worker.

Owns the frozen facts alone: no vLLM, no torch, no I/O.  `engine/worker/residency` makes and consumes them; the daemon
passes them on as bytes and reads only the request's id and sizes.

    source                                             destination
    facts(request) ──────────► block ids so far ─────► reserve, copy full blocks      (the source decodes on)
    freeze, snapshot ────────► the last of it ───────► copy the rest, attach
    release ◄──────────────────────────────────────── committed
"""

import enum

import msgspec

from melld.errors import MelldError
from melld.kvstore.kept import UNTRIED

WARM_SUFFIX = "#warm"
"""Suffix of the id of a shadow request, which computes blocks at the destination of a move by tokens."""


class Phase(enum.StrEnum):
    """Phase of a request on its worker, as the worker's own scheduler sees it."""

    WAITING = "waiting"  # no tokens computed yet: queued or preempted
    PREFILLING = "prefilling"  # some of its known tokens are computed
    DECODING = "decoding"  # one token per step


class Via(enum.StrEnum):
    """Way of a move: carry the KV blocks, or only the tokens, from which the destination recomputes them."""

    KV = "kv"
    TOKENS = "tokens"


class MoveRefusal(enum.StrEnum):
    """Why a request, or its KV, cannot be moved."""

    UNKNOWN = "not on this worker"
    POOLING = "it is an embedding or scoring request"
    PROMPT_EMBEDDINGS = "its prompt is embeddings, not tokens"
    STREAMING_INPUT = "its prompt is still being streamed in"
    KV_CONNECTOR = "the worker has a KV connector"
    SPECULATIVE = "the worker drafts tokens from beyond the end of a part of its prompt"
    AUXILIARY_OUTPUT = "the worker collects auxiliary outputs"
    KV_LAYOUT = "the model's KV cache is of a kind that is not known to be copied in whole"
    UNTRIED_KV = UNTRIED.told
    STATES = "its states are not all in blocks: they depend on drafts, or on parts of blocks"
    PROMPT_LOGPROBS = "its prompt log-probabilities are half collected"
    LORA_ABSENT = "its LoRA adapter cannot be loaded"
    INCOMPATIBLE = "the two workers do not run the same model in the same way"
    GRAMMAR = "its output grammar does not take the tokens it has produced"
    ALREADY_THERE = "the worker holds a request of this id"
    ALREADY_LEAVING = "it is on its way already"
    PREEMPTED = "it was preempted since room was made for it"


class MoveRefused(MelldError):
    """The request cannot be moved.  Nothing has changed: it keeps running where it is."""

    status = 409
    code = "move_refused"

    def __init__(self, request: str, reason: MoveRefusal) -> None:
        super().__init__(f"request {request} cannot be moved: {reason.value}")
        self.reason = reason


class NoRoom(MelldError):
    """The destination lacks blocks, or a place in its batch, for the request.  Nothing has changed."""

    def __init__(self, request: str, needed_blocks: int, free_blocks: int, free_slots: int) -> None:
        super().__init__(f"no room for {request}: {needed_blocks} blocks, {free_blocks} free, {free_slots} places free")


class RequestFacts(msgspec.Struct, frozen=True):
    """Present state of a request, and which of its blocks are final.

    `full_block_ids[group]` are the source's ids of blocks that are full and computed; they may be copied while the
    request decodes, and are final as long as `block_epoch` stays the same (vLLM's preemption frees blocks).  0 is no
    block: behind a sliding window nothing is kept.
    `in_prompt`: its first token is neither out nor in the step under way.
    """

    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    full_block_ids: tuple[tuple[int, ...], ...]
    block_epoch: int
    in_prompt: bool = False

    @property
    def full_blocks(self) -> int:
        """Return the number of blocks that can be copied."""
        return sum(len(group) for group in self.full_block_ids)


class RequestSnapshot(msgspec.Struct, frozen=True, gc=False):
    """The state of a frozen request: with the bytes of `block_ids` it continues on any worker that has reserved room.

    The reservation brought what its client asked for, which the daemon keeps.
    `block_ids[group]` cover `num_computed_tokens`; the last block may be partly filled.  Of a group that keeps a state
    instead, the only one holds the state after these tokens.
    `generator_state` is the state of a seeded request's generator where the runner keeps one (vLLM's V1 runner; V2
    draws from seed and position).  `prefill_stats` are the counts of vllm.v1.metrics.stats.PrefillStats, None
    once they have been reported; `events` are those not reported yet.  `priority` is more urgent than its client's once
    it has waited for too long.  `engine` names model, version and layout.
    """

    request: str
    output_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    block_epoch: int
    num_preemptions: int
    priority: int
    generator_state: bytes | None
    prefill_stats: tuple[int, ...] | None
    events: tuple[tuple[int, float], ...]
    engine: str

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and output tokens together."""
        return self.num_prompt_tokens + len(self.output_token_ids)


class Reservation(msgspec.Struct, frozen=True):
    """Room reserved on the destination.

    `block_ids[group]` are the destination's; the first `reused_blocks[group]` came with their bytes from its prefix
    cache and must not be written.  A group that keeps a state has one, for the state that the snapshot names.
    """

    block_ids: tuple[tuple[int, ...], ...]
    reused_blocks: tuple[int, ...]


class CopyPlan:
    """Record of which blocks of one request have been copied and which are missing.

    Blocks are known by their place in the request; 0 is none, as behind a sliding window.  A preemption on the source
    (another `block_epoch`) invalidates all copies.  All groups' blocks share one pool of ids, so a pull ignores groups.
    """

    def __init__(self, reservation: Reservation) -> None:
        self._reused_blocks = reservation.reused_blocks
        self._copied: set[tuple[int, int]] = set()
        self._epoch: int | None = None

    def missing(
        self, block_ids: tuple[tuple[int, ...], ...], block_epoch: int, reservation: Reservation
    ) -> tuple[list[int], list[int], frozenset[tuple[int, int]]]:
        """Return the blocks of these still to copy, those to copy them into, and their places, to pass to `copied`."""
        if block_epoch != self._epoch:
            self._copied.clear()
            self._epoch = block_epoch
        places = [
            (group, place)
            for group, ids in enumerate(block_ids)
            for place in range(self._reused_blocks[group], min(len(ids), len(reservation.block_ids[group])))
            if (group, place) not in self._copied and ids[place] and reservation.block_ids[group][place]
        ]
        source = [block_ids[group][place] for group, place in places]
        destination = [reservation.block_ids[group][place] for group, place in places]
        return source, destination, frozenset(places)

    def copied(self, places: frozenset[tuple[int, int]], block_epoch: int) -> None:
        """Mark the places as copied, unless the source has freed its blocks since."""
        if block_epoch == self._epoch:
            self._copied |= places
