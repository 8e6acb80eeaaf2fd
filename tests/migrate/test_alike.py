"""The comparison of answers that the random histories use."""

import pytest

from tests.migrate.live import alike

ANSWER = {"choices": {0: {"text": "so", "logprobs": [{"token": "so", "logprob": -0.25}], "finish": "length"}}}


def changed(**of_choice: object) -> dict[str, object]:
    return {"choices": {0: ANSWER["choices"][0] | of_choice}}


@pytest.mark.parametrize(("logprob", "same"), [(-0.25, True), (-0.250004, True), (-0.251, False)])
def test_only_log_probabilities_may_differ_slightly(logprob: float, same: bool) -> None:
    """Kernels round; a wrong KV block does more than that."""
    assert alike(ANSWER, changed(logprobs=[{"token": "so", "logprob": logprob}]), 1e-4) is same


@pytest.mark.parametrize(
    "other",
    [changed(text="se"), changed(logprobs=[]), changed(finish="stop"), changed(logprobs=[{"token": "x"}]), {}],
)
def test_nothing_else_may_differ(other: object) -> None:
    """A token more, less or other is an altered answer."""
    assert not alike(ANSWER, other, 1e-4)
