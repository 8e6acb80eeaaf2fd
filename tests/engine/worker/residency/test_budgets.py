"""Budgets for thinking, which a runner keeps by the rows of its batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from melld.engine.worker.residency.runner import forget_budgets

THINKS, DOES_NOT = SamplingParams(thinking_token_budget=2), SamplingParams()


def holder_of_two() -> ThinkingBudgetStateHolder:
    """Return a request with a budget in row 0, and one without in row 1."""
    marks = SimpleNamespace(reasoning_start_token_ids=[7], reasoning_end_token_ids=[8])
    holder = ThinkingBudgetStateHolder(marks, 4, 0, torch.device("cpu"), False)
    holder.sync_batch(BatchUpdate(2, removed=[], added=[(0, THINKS, [7], []), (1, DOES_NOT, [1], [])], moved=[]))
    return holder


def rows_with_a_budget(holder: Any, *moved: tuple[int, int, MoveDirectionality]) -> set[int]:
    """End row 0 and move these: vLLM does not report a row as removed if another moves into it."""
    holder.sync_batch(BatchUpdate(1, removed=[], added=[], moved=list(moved)))
    return set(holder._state)


def test_a_budget_ends_with_its_request() -> None:
    """The end of a thought is never forced on the request that took an ended one's row."""
    holder = holder_of_two()
    forget_budgets(holder)
    assert rows_with_a_budget(holder, (1, 0, MoveDirectionality.UNIDIRECTIONAL)) == set()


@pytest.mark.parametrize(("direction", "rows"), [("UNIDIRECTIONAL", {2}), ("SWAP", {1})])
def test_a_budget_moves_with_its_request(direction: str, rows: set[int]) -> None:
    """A thought that changes rows still ends when its budget is spent."""
    holder = holder_of_two()
    forget_budgets(holder)
    row = next(iter(rows))
    assert rows_with_a_budget(holder, (0, row, MoveDirectionality[direction])) == rows


def test_vllm_still_needs_the_fix() -> None:
    """Once it does not, `forget_budgets` can go."""
    assert rows_with_a_budget(holder_of_two(), (1, 0, MoveDirectionality.UNIDIRECTIONAL)) == {0}
