"""Completions: constraints apply from the first token, and token offsets refer to the text."""

import collections
import contextlib
import copy
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import RequestOutput
from vllm.v1.engine import logprobs

from melld.api.serving.places import Places
from melld.api.serving.streaming import Streaming


class WithoutReasoning:
    """An engine client for texts without reasoning.

    Given a reasoning parser, vLLM would not constrain an output until the reasoning has ended.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.generate = functools.partial(client.generate, reasoning_ended=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Completions(Streaming, OpenAIServingCompletion):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's class, which computes offsets from the lengths of the tokens' own texts alone."""

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], request: CompletionRequest, *more: Any
    ) -> CompletionResponse:
        """See vLLM."""
        if request.logprobs is None:
            return super().request_output_to_completion_response(final_res_batch, request, *more)
        places = [self._places(request, one.prompt, one) for one in final_res_batch for _ in one.outputs]
        own = self._with_places(iter(places).__next__)
        return super(Completions, own).request_output_to_completion_response(final_res_batch, request, *more)

    def completion_stream_generator(
        self,
        request: CompletionRequest,
        engine_inputs: list[Any],
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *more: Any,
        **named: Any,
    ) -> AsyncGenerator[str, None]:
        """See vLLM."""
        make = self._stream_with_places
        if request.logprobs is None:
            make = super().completion_stream_generator
        return make(request, engine_inputs, result_generator, *more, **named)

    async def _stream_with_places(
        self,
        request: CompletionRequest,
        engine_inputs: list[Any],
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *more: Any,
        **named: Any,
    ) -> AsyncGenerator[str, None]:
        places: dict[tuple[int, int], Places] = {}
        told: collections.deque[Places] = collections.deque()
        """Those of the outputs with tokens, in the order in which vLLM reports them."""

        async def results() -> AsyncGenerator[tuple[int, RequestOutput], None]:
            async for prompt, result in result_generator:
                told.clear()
                for output in result.outputs:
                    place = prompt, output.index
                    is_first = place not in places
                    if is_first:
                        text = result.prompt or self._extract_prompt_text(engine_inputs[prompt])
                        places[place] = self._places(request, text, result)
                    if output.token_ids or (is_first and request.echo):
                        told.append(places[place])
                yield prompt, result

        own = self._with_places(told.popleft)
        async with contextlib.aclosing(results()) as all_results:
            stream = super(Completions, own).completion_stream_generator(
                request, engine_inputs, all_results, *more, **named
            )
            async with contextlib.aclosing(stream) as texts:
                async for text in texts:
                    yield text

    def _create_completion_logprobs(self, *, places: Places | None = None, **arguments: Any) -> CompletionLogProbs:
        made = super()._create_completion_logprobs(**arguments)
        if places is not None and (tokenizer := arguments["tokenizer"]) is not None:
            token_ids = arguments["token_ids"]
            texts = logprobs.convert_ids_list_to_tokens(tokenizer, token_ids)
            made.text_offset = places.take(token_ids, texts)
            made.tokens = [text if "\ufffd" in token else token for token, text in zip(made.tokens, texts, strict=True)]
        return made

    def _places(self, request: CompletionRequest, prompt: str | None, result: RequestOutput) -> Places:
        special = frozenset(getattr(self.renderer.tokenizer, "all_special_ids", ()))
        if not request.echo:
            return Places(special, hides_special=request.skip_special_tokens)
        shown = "" if request.return_token_ids else prompt or ""  # as vLLM does
        tokens = len(result.prompt_token_ids or ())
        return Places(special, hides_special=request.skip_special_tokens, prompt=shown, prompt_tokens=tokens)

    def _with_places(self, next_places: Callable[[], Places]) -> "Completions":
        """Return a copy for one answer, which assigns the next offsets to each batch of logprobs."""
        own, make = copy.copy(self), self._create_completion_logprobs

        def make_placed(*, token_ids: Sequence[int], **arguments: Any) -> CompletionLogProbs:
            places = next_places() if token_ids else None
            return make(token_ids=token_ids, places=places, **arguments)

        own._create_completion_logprobs = make_placed  # type: ignore[method-assign, assignment]  # noqa: SLF001
        return own
