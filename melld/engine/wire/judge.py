"""Daemon <-> judge: what is said about constraints on a request's output.  Frames as between daemon and worker.

Owns the messages.
"""

import msgspec

MEMORY_BYTES = 1 << 30
"""What compiling may take beside what a judge has when it begins."""


class JudgeConstraint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compile this.  Payload: vLLM's `StructuredOutputsParams` as MessagePack.  One at a time."""

    cpu_s: float
    """The CPU time after which the kernel ends the judge."""


class JudgeReady(msgspec.Struct, frozen=True, tag=True):
    """The tokenizer is loaded: constraints may come."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What became of the last constraint.  Payload, if it is good: the constraint as the worker must compile it."""

    refusal: str = ""
    """Why the constraint cannot be used; empty if it can."""
    code: str = ""
    cpu_s: float = 0.0
    """What compiling it has cost."""


FromJudge = JudgeReady | Verdict
