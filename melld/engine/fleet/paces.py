"""Sums up for the scheduler how long a worker's steps took.

Owns the sums of one worker since it was last asked.  Pure.
"""

from melld.engine.wire.messages import StepDone
from melld.scheduler.events import WorkerPace
from melld.scheduler.steptimes import StepCosts


class PaceMeter:
    """The steps of one worker since the last `take`."""

    def __init__(self) -> None:
        self._steps = 0
        self._step_s = self._decodes = self._kv_bytes = 0.0
        self._prompts = self._prompt_tokens = 0
        self._prefill_s = 0.0

    def stepped(self, done: StepDone, kv_bytes: int, costs: StepCosts | None, prompts_ended: int) -> None:
        """Record a step that ran while requests held `kv_bytes`; `costs`: what the worker's steps cost, if known.

        Of a step with prompts only what it took beyond its decodes counts, so one with decodes tells nothing while the
        costs are unknown.
        """
        if not done.prompt_tokens:
            self._steps += 1
            self._step_s += done.step_s
            self._decodes += done.decodes
            self._kv_bytes += kv_bytes
            return
        if not done.decodes:
            beyond_s = done.step_s
        elif costs is not None:
            beyond_s = max(done.step_s - costs.step_s(done.decodes), 0.0)
        else:
            return
        self._prefill_s += beyond_s
        self._prompt_tokens += done.prompt_tokens
        self._prompts += prompts_ended

    def take(self) -> WorkerPace | None:
        """Return what the steps took, and start anew; a prompt counts once it has ended.  None: there were none."""
        steps, prompts = self._steps, self._prompts
        if not steps and not prompts:
            return None
        mean = 1.0 / steps if steps else 0.0
        pace = WorkerPace(
            step_s=self._step_s * mean,
            decodes=self._decodes * mean,
            kv_bytes=self._kv_bytes * mean,
            prompts=prompts,
            prompt_tokens=self._prompt_tokens if prompts else 0,
            prefill_s=self._prefill_s if prompts else 0.0,
        )
        self._steps = 0
        self._step_s = self._decodes = self._kv_bytes = 0.0
        if prompts:
            self._prompts = self._prompt_tokens = 0
            self._prefill_s = 0.0
        return pace
