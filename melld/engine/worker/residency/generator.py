"""CPU sampling generators that can undo a draw.

Owns a fix of vLLM 0.32.0 on the CPU: its V1 runner samples for every row of a batch, even for a partly computed prompt,
discards that sample and rewinds the row's generator by `set_offset`, which CPU generators lack: a seeded request with a
chunked prompt crashed the engine.  This generator returns to its state before the step.  Never used on a GPU.
"""

from typing import Any

import torch


class RewindableGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator whose draws since `mark` are undone by `set_offset`."""

    def __new__(cls) -> "RewindableGenerator":
        """Create the generator on the CPU: torch.Generator takes its device on creation."""
        generator: RewindableGenerator = super().__new__(cls, device="cpu")
        return generator

    def mark(self) -> None:
        """Remember this state."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        """Return an offset for the runner to subtract from; `set_offset` ignores the result."""
        return 0

    def set_offset(self, offset: int) -> None:  # noqa: ARG002  any offset means: before this step
        """Return to the marked state.  `mark` runs before every step whose sample may be discarded."""
        self.set_state(self._marked)


def make_generators_rewindable(runner: Any) -> None:
    """Have this CPU runner (vllm.v1.worker.gpu_model_runner) keep `RewindableGenerator`s and mark them in time."""
    update_states = runner._update_states  # noqa: SLF001

    def update_and_mark(scheduler_output: Any) -> Any:
        result = update_states(scheduler_output)
        if runner.input_batch.generators:
            _mark(runner, scheduler_output.num_scheduled_tokens)
        return result

    runner._update_states = update_and_mark  # noqa: SLF001


def _mark(runner: Any, scheduled_tokens: dict[str, int]) -> None:
    batch = runner.input_batch
    for index, generator in batch.generators.items():
        state = runner.requests[batch.req_ids[index]]
        rewindable = generator
        if not isinstance(generator, RewindableGenerator):
            rewindable = RewindableGenerator()
            rewindable.set_state(generator.get_state())
            batch.generators[index] = state.generator = rewindable
        if state.num_computed_tokens + scheduled_tokens[state.req_id] < state.num_tokens:
            rewindable.mark()
