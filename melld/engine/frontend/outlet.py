"""The plain middle of a stream: events written as soon as their tokens arrive, without vLLM's objects for each.

Owns the switch between vLLM's serving class, which makes events from outputs, and events that differ from the previous
one only in their text.  For these, the new text replaces the old one; nothing here knows the format.

    the call's task:  output ──► vLLM's serving class ──► event ──► client    the first, the last, what is not plain
    output handler:   text ──► Outlet ──► event ──► client                    between them: the task waits for an output

Afterwards the serving class gets everything that it has missed as one output, the catch-up, whose events are dropped:
its counts, texts and parsers are correct whenever it resumes.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

from melld.engine.frontend.moulds import CONTENT, Kind, KnownMoulds, Mould, Sink, mould_of, plain_part
from melld.engine.frontend.plain_outputs import CatchUp, decoded, is_added, is_alone, is_plain, parses_nothing, piece

_UNHEARD = object()


class Outlet:
    """The shortcut of one call's stream.

    It is open while the task that writes the stream waits for an output of the call's only request, after two events
    that differed only in their texts, or one like those of a stream before.  `is_raw`: no parser stands between the
    model's text and the client.  `keeps_texts`: the serving class's last events tell all texts.
    """

    def __init__(self, *, is_raw: bool, known: KnownMoulds, keeps_texts: bool = True) -> None:
        self.ahead = 0
        """Events written here minus those dropped: the serving class's count is this much too low."""
        self._is_raw = is_raw
        self._known = known
        self._keeps_texts = keeps_texts
        self._is_open = False
        self._says_more = False  # whether an output has held more than the next text
        self._catches_up = False
        self._sink: Sink | None = None
        self._task: asyncio.Task[Any] | None = None
        self._queue: Any = None
        self._state: Any = None
        self._make_output: Any = None
        self._mould: Mould | None = None
        self._kind: Kind = None
        self._sample: tuple[Mould | None, Kind] = None, None
        self._skips_empty: bool | None = None
        """Whether an output without text produces no event; None until one has been seen."""
        self._events: list[str] = []
        """Those for the output that the serving class is handling."""
        self._number: int | None = None
        self._parsers: list[Any] = []
        self._parse: Any = None
        self._arguments: dict[str, Any] = {}
        self._message: Any = _UNHEARD
        self._answers: deque[Any] = deque()
        """The parser's next answers, for input that it has already seen."""
        self._early: tuple[str, list[int], Any] | None = None
        """What the parser has seen and the serving class has not: text, tokens, message."""
        self._is_idle = False
        """Whether the parser now passes on all text as content."""
        self._undecoded: list[str] = []
        """Texts sent to the client of which the detokenizer does not know yet."""
        self._unseen = CatchUp()
        self._added = 0  # tokens of the output that the serving class is handling, which its parser is not to see

    # -- joined to vLLM --------------------------------------------------------------------------------------------

    def opened(self, queue: Any, state: Any) -> None:
        """Take vLLM's collector and state of a new request; leave a second or unusual request to vLLM."""
        if self._queue is not None:
            self.close()
        elif state is not None and queue.aggregate and is_alone(state) and is_plain(state):
            self._state, self._make_output = state, state.make_request_output
            state.make_request_output = self._output
            if not state.detokenizer.stop:  # otherwise vLLM may find that the request ends here
                state.plain = self
        self._queue = queue

    def close(self) -> None:
        """Leave the rest of the stream to vLLM."""
        self._is_open = False
        if self._state is not None:
            self.hand_back()
            del self._state.make_request_output
            self._state.plain = None
            self._state = None

    def watch(self, parser: Any) -> None:
        """Record what a parser of the stream answers."""
        parse = parser.parse_delta

        def parse_delta(**arguments: Any) -> Any:
            if not self._answers:
                arguments["delta_token_ids"] = arguments["delta_token_ids"][self._added :]
                self._parse, self._arguments = parse, arguments
                self._answers.append(parse(**arguments))
            self._message = self._answers.popleft()
            if isinstance(self._message, Exception):
                raise self._message
            return self._message

        parser.parse_delta = parse_delta
        self._parsers.append(parser)

    async def through(
        self, outputs: AsyncGenerator[Any, None], turn: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a request as the serving class is to see them, awaiting a `turn` before each."""
        async with contextlib.aclosing(outputs):
            with contextlib.closing(self):
                while (output := await self._next(outputs)) is not None:
                    if self._is_ready() and self._is_told_late(output.outputs[0]):
                        continue
                    await turn()
                    for part in self._pieces(output):
                        self._events.clear()
                        self._message = _UNHEARD
                        yield part
                        self._answers.clear()
                        if not self._catches_up and not output.finished:
                            self._learn(part.outputs[0].text)

    async def _next(self, outputs: AsyncGenerator[Any, None]) -> Any:
        is_ready = self._is_ready()
        if not self._unseen.ids:
            idle = is_ready and self._kind == CONTENT and parses_nothing(self._parse, self._arguments)
            if idle != self._is_idle:
                self._is_idle, self._skips_empty = idle, idle or None
        self._is_open = is_ready and self._queue.output is None
        try:
            return await anext(outputs, None)
        finally:
            self._is_open = False

    # -- joined to the stream --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def leading_to(self, sink: Sink) -> Iterator[None]:
        """Write to `sink` during this block, whose task writes all other events."""
        self._sink, self._task = sink, asyncio.current_task()
        try:
            yield
        finally:
            self._sink = self._parse = None
            self.close()
            while self._parsers:
                del self._parsers.pop().parse_delta  # a cycle that only the garbage collector would free

    def drops_event(self) -> bool:
        """Return True if the serving class's next event has already been written."""
        self.ahead -= self._catches_up
        return self._catches_up

    def heard(self, event: str, number: int | None) -> None:
        """Record an event of the serving class, and its sequence number if it has one."""
        self._events.append(event)
        self._number = number

    # -- open ------------------------------------------------------------------------------------------------------

    def _is_ready(self) -> bool:
        """Return True if all events so far are written, or will be before the next output is handled."""
        if self._state is None or self._mould is None or self._sink is None or self._sink.is_paused:
            return False
        return asyncio.current_task() is self._task

    def _is_told_late(self, made: Any) -> bool:
        """Send the client an output that vLLM processed before this was open."""
        return self._early is None and not self._says_more and self._is_told(made.text, made.token_ids)

    def add(self, token_ids: list[int]) -> None:
        """See `Plain`."""
        text = decoded(self._state.detokenizer, token_ids)
        self._undecoded.append(text)
        if (self._is_open and self._is_told(text, token_ids)) or is_added(self._queue.output, text, token_ids):
            return
        del self._undecoded[-1]
        self.hand_back()
        self._state.detokenizer.output_text += text
        self._queue.put(self._make_output(list(token_ids), None, None, None))

    def hand_back(self) -> None:
        """See `Plain`."""
        detokenizer, text = self._state.detokenizer, "".join(self._undecoded)
        detokenizer.output_text += text
        detokenizer._last_output_text_offset += len(text)  # noqa: SLF001
        self._undecoded.clear()

    def _output(
        self, new_token_ids: list[int], pooling_output: Any, finish_reason: Any, *more: Any, **named: Any
    ) -> Any:
        """Stand in for the state's `make_request_output`; return None if the client already has the output."""
        self._says_more |= finish_reason is not None or any(more) or any(named.values())
        if self._is_open:
            if not self._says_more:
                detokenizer = self._state.detokenizer
                offset = detokenizer._last_output_text_offset  # noqa: SLF001
                if self._is_told(detokenizer.get_next_output_text(False, True), new_token_ids):
                    return None
                detokenizer._last_output_text_offset = offset  # noqa: SLF001  left to vLLM
            self._is_open = False
        return self._make_output(new_token_ids, pooling_output, finish_reason, *more, **named)

    def _is_told(self, text: str, token_ids: list[int]) -> bool:
        """Send the text to the client; return False if that cannot be done, and close until vLLM has sent it."""
        try:
            if self._write(text) if self._is_raw or self._is_idle else self._is_parsed_told(text, token_ids):
                self._unseen.ids += token_ids
                self._unseen.texts.append(text)
                return True
        except Exception as error:  # noqa: BLE001  raised where the request's outputs are read, which aborts it
            self._queue.put(error)
        self._is_open = False
        return False

    def _is_parsed_told(self, text: str, token_ids: list[int]) -> bool:
        assert self._sink is not None
        if self._sink.is_paused:
            return False
        try:
            message = self._parse(**self._arguments | {"delta_text": text, "delta_token_ids": token_ids})
        except Exception as error:  # noqa: BLE001  raised where the serving class parses
            message = error
        if message is None:
            return True
        part = None if isinstance(message, Exception) else plain_part(message)
        if part is not None and part[0] == self._kind and self._write(part[1]):
            self._unseen.add_message(message, part[1])
            return True
        self._early = text, token_ids, message
        return False

    def _write(self, text: str) -> bool:
        if not text and self._skips_empty is not False:
            return self._skips_empty is True
        assert self._sink is not None
        assert self._mould is not None
        number = 0 if self._number is None else self._number + 1
        if not self._sink.send(self._mould.cast(text, number)):
            return False
        if self._number is not None:
            self._number = number
        self.ahead += 1
        return True

    # -- handing back ----------------------------------------------------------------------------------------------

    def _pieces(self, output: Any) -> Iterator[Any]:
        """Yield the catch-up, what the parser has seen early, and the rest of the output.

        The last output only has the tokens of the catch-up added, which are counted, if no event tells its text.
        """
        first = output.outputs[0]
        if self._unseen.ids and not (self._keeps_texts or self._early or first.finish_reason is None):
            self._added, first.token_ids = len(self._unseen.ids), [*self._unseen.ids, *first.token_ids]
        elif self._unseen.ids:
            if not self._is_idle:
                self._answers.append(self._unseen.message_of(self._kind[0]) if self._kind else None)
            self._catches_up = True
            yield self._unseen.output(output)
            self._catches_up = False
            self._unseen = CatchUp()
        if self._early is not None:
            (text, token_ids, message), self._early = self._early, None
            self._answers.append(message)
            if len(first.token_ids) > len(token_ids) or first.finish_reason is not None:
                yield piece(output, text, token_ids)
                first.text, first.token_ids = first.text[len(text) :], first.token_ids[len(token_ids) :]
        yield output

    def _learn(self, text: str) -> None:
        """Compare the output that the serving class has just handled with the one before it."""
        kind: Kind = None
        if not self._is_raw:
            if self._message is None and not self._events:
                return
            part = None if self._message is _UNHEARD else plain_part(self._message)
            if part is None:
                self._mould, self._sample = None, (None, None)
                return
            kind, text = part
        if kind != self._kind:
            self._kind, self._skips_empty = kind, None
        if not text:
            self._skips_empty = not self._events
            return
        mould = mould_of(self._events[-1], text, self._number, kind) if self._events else None
        alone = mould if len(self._events) == 1 else None
        if mould is not None and mould != self._mould:
            is_proved = alone is not None and (alone, kind) == self._sample
            mould = mould if self._known.trusts(mould, kind, is_proved=is_proved) else None
        self._mould = mould
        self._sample = alone, kind
