"""Messages between daemon and judge about output constraints, in the same frames as between daemon and worker.

Owns the messages.
"""

import msgspec

MEMORY_BYTES = 1 << 30
"""Memory for compiling, beyond what a judge has at its start."""


class JudgeConstraint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compile this constraint.  Payload: vLLM's `StructuredOutputsParams` as MessagePack.  One at a time."""

    cpu_s: float
    """CPU time after which the kernel kills the judge."""


class JudgeReady(msgspec.Struct, frozen=True, tag=True):
    """The tokenizer is loaded: the judge takes constraints."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result for the last constraint.  Payload, if it is good: the constraint as the worker must compile it."""

    refusal: str = ""
    """Why the constraint cannot be used; empty if it can."""
    code: str = ""
    cpu_s: float = 0.0
    """CPU time of the compilation."""


FromJudge = JudgeReady | Verdict
