"""Builds long answers in pieces, so that many logprobs, embeddings or choices do not block the event loop.

vLLM builds all logprobs of an answer at once, and pydantic all of its JSON.  Here the logprobs of a non-streamed answer
are left out at first and built in pieces; long lists are left out of the JSON and inserted in pieces.  The result
equals vLLM's byte for byte.
"""

import copy
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from openai.types.responses.response_output_text import Logprob as ResponsesLogprob
from pydantic import BaseModel
from pydantic_core import to_json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

from melld.engine.frontend.turns import Turns

PIECE = 500
"""Values built or written per loop iteration: one to three milliseconds."""


class Unmade(msgspec.Struct, frozen=True):
    """Logprobs that have yet to be built."""

    stands_in: BaseModel
    """The placeholder, or the one item of the list that is the placeholder."""
    make: Callable[..., Any]
    arguments: dict[str, Any]
    source: str
    """The argument that holds vLLM's logprobs, by token."""


# The method of a serving class, its argument with vLLM's log-probabilities, and what stands in for a result.
_LATE: tuple[tuple[str, str, Callable[[], BaseModel] | None], ...] = (
    ("_create_chat_logprobs", "top_logprobs", ChatCompletionLogProbs),
    ("_create_completion_logprobs", "top_logprobs", CompletionLogProbs),
    ("_create_response_logprobs", "logprobs", None),
)


def _width(logprobs: Any) -> int:
    """Return the number of logprobs of one token."""
    return 1 + len(logprobs[-1] or ()) if logprobs else 1


class LongAnswer:
    """A non-streamed answer of vLLM."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._unmade: dict[int, Unmade] = {}

    def leaving_out(self, handler: Any) -> Any:
        """Return vLLM's serving class without long logprobs, which `encode` adds."""
        own = copy.copy(handler)
        for method, source, empty in _LATE:
            if hasattr(handler, method):
                setattr(own, method, self._late(getattr(handler, method), source, empty))
        return own

    def _late(self, make: Callable[..., Any], source: str, empty: Callable[[], BaseModel] | None) -> Callable[..., Any]:
        def make_or_leave(**arguments: Any) -> Any:
            if len(arguments["token_ids"]) * _width(arguments[source]) <= PIECE:
                return make(**arguments)
            stands_in = ResponsesLogprob.model_construct() if empty is None else empty()
            self._unmade[id(stands_in)] = Unmade(stands_in, make, arguments, source)
            return [stands_in] if empty is None else stands_in

        return make_or_leave

    async def encode(self, answer: BaseModel, dump: dict[str, Any]) -> bytes:
        """Return what `model_dump_json` with these arguments would return for the complete answer."""
        if not self._unmade and self._weight(answer) <= PIECE:  # most are: nothing to look for
            return answer.model_dump_json(**dump).encode()
        return b"".join([piece async for piece in self._written(answer, dump)])

    async def _written(self, model: BaseModel, dump: dict[str, Any]) -> AsyncIterator[bytes]:
        mark, left_out = secrets.token_hex(16), list[Any]()
        short = self._shortened(model, mark, left_out)
        if not left_out:  # its parts are short: no turn of its own
            yield short.model_dump_json(**dump).encode()
            return
        await self._turns.mine()
        texts = re.split(f'"{mark}([0-9]+)"', short.model_dump_json(warnings=False, **dump))
        yield texts[0].encode()
        for index, text in zip(texts[1::2], texts[2::2], strict=True):
            value = left_out[int(index)]
            pieces = self._late_json(value, dump) if isinstance(value, Unmade) else self._list_json(value, dump)
            async for piece in pieces:
                yield piece
            yield text.encode()

    async def _list_json(self, values: list[Any], dump: dict[str, Any]) -> AsyncIterator[bytes]:
        separator = b"["
        for stretch in self._stretches(values):
            yield separator
            separator = b","
            await self._turns.mine()
            if len(stretch) == 1 and isinstance(stretch[0], BaseModel):
                async for piece in self._written(stretch[0], dump):
                    yield piece
            else:
                yield _inner_json(stretch, dump)
        yield b"]"

    async def _late_json(self, unmade: Unmade, dump: dict[str, Any]) -> AsyncIterator[bytes]:
        """Build and write one stretch at a time, so that the objects of written stretches are freed."""
        tokens, logprobs = unmade.arguments["token_ids"], unmade.arguments[unmade.source]
        step = max(1, PIECE // _width(logprobs))
        written: dict[str, list[bytes]] = {}
        begun: dict[str, Any] = {}
        for start in range(0, len(tokens), step):
            await self._turns.mine()
            stretch = {"token_ids": tokens[start : start + step], unmade.source: logprobs[start : start + step]}
            made = unmade.make(**unmade.arguments | stretch | begun)
            if isinstance(made, CompletionLogProbs):
                begun = {"initial_text_offset": made.text_offset[-1] + len(made.tokens[-1])}
            lists = (
                {"": made}
                if isinstance(made, list)
                else {name: getattr(made, name) for name in type(made).model_fields}
            )
            for name, values in lists.items():
                written.setdefault(name, []).append(_inner_json(values, dump))
        opening = b"{"
        for name, pieces in written.items():
            if name:
                yield opening + to_json(name) + b":"
            for index, piece in enumerate(pieces):
                yield b"," if index else b"["
                yield piece
            yield b"]"
            opening = b","
        if "" not in written:
            yield b"}"

    def _shortened(self, model: BaseModel, mark: str, left_out: list[Any]) -> BaseModel:
        """Return the model with placeholders for long values, which go to `left_out`."""
        changed: dict[str, Any] = {}
        for name, value in model.__dict__.items():
            if not isinstance(value, BaseModel | list):
                continue
            first = value[0] if isinstance(value, list) and value else value
            unmade = self._unmade.get(id(first))
            if unmade is None and self._weight(value) <= PIECE:
                continue
            if isinstance(value, BaseModel) and unmade is None:
                changed[name] = self._shortened(value, mark, left_out)
            elif isinstance(value, list) or unmade is not None:
                changed[name] = f"{mark}{len(left_out)}"
                left_out.append(value if unmade is None else unmade)
        return model.model_copy(update=changed) if changed else model

    def _stretches(self, values: list[Any]) -> Iterator[list[Any]]:
        """Split the values into stretches of about a piece."""
        start, weight = 0, 0
        for index, value in enumerate(values):
            more = self._weight(value)
            if index > start and weight + more > PIECE:
                yield values[start:index]
                start, weight = index, 0
            weight += more
        yield values[start:]

    def _weight(self, value: Any) -> int:
        """Count the values inside, up to a little more than a piece."""
        if id(value) in self._unmade:
            return PIECE + 1
        if not isinstance(value, BaseModel | list):
            return 1 + (len(value) if isinstance(value, dict) else 0)
        weight = 1
        for one in value if isinstance(value, list) else value.__dict__.values():
            weight += 1 if one is None or isinstance(one, str | int | float) else self._weight(one)
            if weight > PIECE:
                break
        return weight


def _inner_json(values: list[Any], dump: dict[str, Any]) -> bytes:
    """Return the JSON of a list without its brackets."""
    return to_json(values, inf_nan_mode="null", **{"by_alias": False} | dump)[1:-1]
