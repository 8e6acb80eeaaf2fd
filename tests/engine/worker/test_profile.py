"""A worker's measurements of its prefill, on a device whose steps have known times, with or without a step ahead."""

import collections
import contextlib
import types
from typing import Any

import pytest

from melld.engine.wire import messages as wire
from melld.engine.worker import profile

BASE_S, TOKEN_S, SUBMIT_S = 0.01, 0.0001, 0.0005


class Device:
    """An engine whose steps take `BASE_S` and `TOKEN_S` for each prompt token; `ahead`: one step before it is known."""

    def __init__(self, ahead: bool) -> None:
        self.now_s = 0.0
        self.batch_queue: collections.deque[float] | None = collections.deque() if ahead else None
        self.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(max_model_len=4096),
            scheduler_config=types.SimpleNamespace(max_num_batched_tokens=2048),
        )
        self.decoding: dict[str, Any] = {}
        self.prompt_tokens = 0
        self.scheduler = types.SimpleNamespace(
            max_num_active_reqs=64, requests=self.decoding, has_requests=self._has_requests
        )

    def _has_requests(self) -> bool:
        return bool(self.decoding or self.prompt_tokens)

    def step_fn(self) -> tuple[None, bool]:
        """Submit a step, and wait for the oldest that is under way, if there is one before it or none may be."""
        is_busy = self.scheduler.has_requests()
        step_s, self.prompt_tokens = BASE_S + TOKEN_S * self.prompt_tokens, 0
        self.now_s += SUBMIT_S
        if self.batch_queue is not None:
            if is_busy:
                self.batch_queue.append(step_s)
                if len(self.batch_queue) < 2:
                    return None, True
            step_s = self.batch_queue.popleft()
        self.now_s += step_s - SUBMIT_S
        return None, True

    def abort_requests(self, names: list[str]) -> None:
        """Have these requests end."""
        for name in names:
            del self.decoding[name]

    def post_step(self, model_executed: bool) -> None:
        """Nothing follows."""


class Measured(profile.Profiler):
    """The measurements of a `Device`; no real requests are made."""

    def __init__(self, device: Device, said: list[Any]) -> None:
        budget = types.SimpleNamespace(lifted=contextlib.nullcontext)
        links: Any = None
        super().__init__(device, links, links, budget, lambda: False, said.append, lambda _: None)  # type: ignore[arg-type]
        self._device = device

    def _add(self, prompt_tokens: int, output_tokens: int) -> None:
        if output_tokens == 1:
            self._device.prompt_tokens += prompt_tokens
        else:
            name = f"{profile.JOB}-{len(self._device.decoding)}"
            self._device.decoding[name] = types.SimpleNamespace(num_output_tokens=1)

    def _have_room(self, *_requests: int) -> bool:
        return True


@pytest.mark.parametrize("ahead", [False, True], ids=["each step alone", "a step ahead"])
@pytest.mark.parametrize(
    ("batch", "expected"), [(0, 1024 / (BASE_S + 1024 * TOKEN_S)), (4, 0.2 * BASE_S / TOKEN_S / (1.2 * BASE_S))]
)
def test_what_steps_are_measured_to_take_is_theirs(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, batch: int, expected: float
) -> None:
    """A call that submits one step and waits for the one before says nothing of the first."""
    device, said = Device(ahead), []
    monkeypatch.setattr(profile, "time", types.SimpleNamespace(monotonic=lambda: device.now_s))
    Measured(device, said).measure_prefill(wire.MeasurePrefill(call=1, batch=batch, share=0.2, seconds=60.0))
    [done] = said
    assert done.error is None
    assert done.result == pytest.approx(expected, rel=0.1)
