"""Ends requests whose own parameters rule out every token: vLLM would continue with token 0.

`allowed_token_ids`, `bad_words` and `min_tokens` each forbid tokens.  The sampler picks a forbidden token only if no
other is left, so a forbidden token in an output proves the contradiction.  Grammars are not checked here: workers end a
request whose grammar is violated.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.sampling_params import SamplingParams

from melld.engine.fleet.step_outputs import Step
from melld.errors import NoTokenLeft
from melld.ids import RequestId

_FIELDS = ("allowed_token_ids", "bad_words", "min_tokens")


class Mask:
    """The tokens that one request's parameters forbid, and the end of its output so far."""

    def __init__(self, params: SamplingParams, vocabulary: int) -> None:
        self._fields = [name for name in _FIELDS if getattr(params, name)]
        words = params.bad_words_token_ids or []
        self._words = [word for word in words if len(word) > 1]
        self._longest = max(map(len, self._words), default=1)
        # vLLM lets structured output end before `min_tokens`.
        stops = params.all_stop_token_ids if params.structured_outputs is None else ()
        self._stops = {token for token in stops if 0 <= token < vocabulary}
        self._min_tokens = params.min_tokens
        self._is_forbidden = np.full(vocabulary, params.allowed_token_ids is not None)
        self._is_forbidden[params.allowed_token_ids or []] = False
        self._is_forbidden[[word[0] for word in words if len(word) == 1 and word[0] < vocabulary]] = True
        self._count = 0
        self._last: list[int] = []

    def check_first(self) -> None:
        """Refuse parameters that forbid every first token.

        Raises:
            NoTokenLeft: they do.
        """
        is_forbidden = self._is_forbidden.copy()
        if self._min_tokens:
            is_forbidden[list(self._stops)] = True
        if is_forbidden.all():
            raise NoTokenLeft(self._fields, 0)

    def check(self, tokens: Iterable[int]) -> None:
        """Take the request's next tokens.

        Raises:
            NoTokenLeft: one of them is forbidden.
        """
        for token in tokens:
            is_early = self._count < self._min_tokens and token in self._stops
            self._last = [*self._last, token][-self._longest :]
            if is_early or self._is_forbidden[token] or any(self._last[-len(word) :] == word for word in self._words):
                raise NoTokenLeft(self._fields, self._count)
            self._count += 1


class Masks:
    """The masks of all requests that need one."""

    def __init__(self, states: Mapping[str, Any], vocabulary: int) -> None:
        """`states`: vLLM's state of each unfinished request, by request id."""
        self._states = states
        self._vocabulary = vocabulary
        self._masks: WeakKeyDictionary[Any, Mask] = WeakKeyDictionary()

    def add(self, request: str, params: SamplingParams | None) -> None:
        """Watch the request's outputs if its parameters may forbid all tokens.

        Raises:
            NoTokenLeft: they forbid every first token.
        """
        if params is None or not (
            params.allowed_token_ids or params.bad_words or (params.min_tokens and params.stop_token_ids)
        ):
            return
        mask = Mask(params, self._vocabulary)
        mask.check_first()
        state = self._states.get(request)
        if state is not None and params.thinking_token_budget is None:  # vLLM forces the tokens that end it
            self._masks[state] = mask

    def watched(self, requests: Iterable[RequestId]) -> list[RequestId]:
        """Return those of these requests that have a mask."""
        return [one for one in requests if self._states.get(one) in self._masks] if self._masks else []

    def sift(self, step: Step) -> Step:
        """Return the step without forbidden tokens; each one's error is raised where its request's outputs are read."""
        if self._masks:
            step.outputs = list(self._allowed(step.outputs))
        return step

    def _allowed(self, outputs: Iterable[Any]) -> Iterator[Any]:
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is not None and (mask := self._masks.get(state)) is not None:
                try:
                    mask.check(output.new_token_ids)
                except NoTokenLeft as error:
                    state.queue.put(error)
                    continue
            yield output
