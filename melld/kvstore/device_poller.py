"""Asyncio reader of all devices, each with a deadline.

Owns one lane per device, so that a slow GPU (a lost one takes seconds) delays no other.  A lane asks in a daemon
thread, one question at a time: a driver call cannot be cancelled, and must not delay the exit of the process.  The
thread stays: one for each question would hold the event loop while it starts, 0.8 s on busy cores.  Never decides what
a reading means.
"""

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Mapping

from melld.kvstore.device_reading import DeviceReading, DeviceState

Ask = Callable[[], DeviceReading]


class DevicePoller:
    """Poller of all devices at once.  `sources` maps a device's name to the blocking call that reads it."""

    def __init__(self, sources: Mapping[str, Ask], deadline_s: float = 1.0) -> None:
        self._deadline_s = deadline_s
        self._lanes = {device: _Lane(device, ask) for device, ask in sources.items()}

    def set_source(self, device: str, ask: Ask) -> None:
        """Read `device` with `ask` from now on (a new worker process, another GPU); an open question is dropped."""
        self._lanes[device] = _Lane(device, ask)

    def remove(self, device: str) -> None:
        """Read it no more; its thread ends with what it is asking."""
        del self._lanes[device]

    async def read(self) -> dict[str, DeviceReading]:
        """Return one reading of each device, `late` for those that did not answer within the deadline.

        The next call returns a late answer once it has arrived.
        """
        asked = {lane: lane.question() for lane in self._lanes.values()}
        if asked:
            await asyncio.wait(asked.values(), timeout=self._deadline_s)
        return {lane.device: lane.answer(question, self._deadline_s) for lane, question in asked.items()}


Question = asyncio.Future[DeviceReading | None]
Questions = queue.SimpleQueue[Question | None]


class _Lane:
    """At most one question to one device."""

    def __init__(self, device: str, ask: Ask) -> None:
        self.device = device
        self._ask = ask
        self._open: Question | None = None
        self._questions: Questions = queue.SimpleQueue()
        self._has_thread = False
        weakref.finalize(self, self._questions.put, None)

    def question(self) -> Question:
        """Return the open question, or ask a new one."""
        if self._open is None:
            self._open = asyncio.get_running_loop().create_future()
            try:
                self._start()
                self._questions.put(self._open)
            except RuntimeError as error:  # no thread is to be had now
                self._open.set_result(DeviceReading(state=DeviceState.UNAVAILABLE, reason=str(error)))
        return self._open

    def _start(self) -> None:
        if not self._has_thread:
            arguments = (self._ask, self._questions)
            threading.Thread(target=_answer_all, args=arguments, name=f"read {self.device}", daemon=True).start()
            self._has_thread = True

    def answer(self, question: Question, deadline_s: float) -> DeviceReading:
        """Return the reading that answered `question`, or one that says why there is none."""
        if not question.done():
            return DeviceReading(state=DeviceState.LATE, reason=f"no answer within {deadline_s:g} s")
        if self._open is question:
            self._open = None
            self._has_thread &= question.result() is not None
        failed = DeviceReading(state=DeviceState.UNAVAILABLE, reason="the reading failed, see the log")
        return question.result() or failed


def _answer_all(ask: Ask, questions: Questions) -> None:
    """Ask in the lane's thread and pass the answers to the loop, until the lane is dropped.

    An error of ours ends the thread, with no answer, and goes to `threading.excepthook`.
    """
    while (question := questions.get()) is not None:
        reading = None
        try:
            reading = ask()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits for the answer
                question.get_loop().call_soon_threadsafe(_settle, question, reading)


def _settle(question: Question, reading: DeviceReading | None) -> None:
    if not question.done():  # cancelled with its loop
        question.set_result(reading)
