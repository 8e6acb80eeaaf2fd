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
    """A request with a budget in row 0, and one without in row 1."""
    marks = SimpleNamespace(reasoning_start_token_ids=[7], reasoning_end_token_ids=[8])
    holder = ThinkingBudgetStateHolder(marks, 4, 0, torch.device("cpu"), False)
    holder.sync_batch(BatchUpdate(2, removed=[], added=[(0, THINKS, [7], []), (1, DOES_NOT, [1], [])], moved=[]))
    return holder


def rows_with_a_budget(holder: Any, *moved: tuple[int, int, MoveDirectionality]) -> set[int]:
    """Row 0 has ended, and these have moved: vLLM does not name a row as removed that another moves into."""
    holder.sync_batch(BatchUpdate(1, removed=[], added=[], moved=list(moved)))
    return set(holder._state)


def test_a_budget_ends_with_its_request() -> None:
    """The end of a thought is never forced into the answer of a request that took an ended one's place."""
    holder = holder_of_two()
    forget_budgets(holder)
    assert rows_with_a_budget(holder, (1, 0, MoveDirectionality.UNIDIRECTIONAL)) == set()


@pytest.mark.parametrize(("direction", "rows"), [("UNIDIRECTIONAL", {2}), ("SWAP", {1})])
def test_a_budget_goes_where_its_request_goes(direction: str, rows: set[int]) -> None:
    """A thought that is moved within the batch still ends when its budget is spent."""
    holder = holder_of_two()
    forget_budgets(holder)
    row = next(iter(rows))
    assert rows_with_a_budget(holder, (0, row, MoveDirectionality[direction])) == rows


def test_vllm_still_needs_the_fix() -> None:
    """The day when it does not, `forget_budgets` can go."""
    assert rows_with_a_budget(holder_of_two(), (1, 0, MoveDirectionality.UNIDIRECTIONAL)) == {0}
