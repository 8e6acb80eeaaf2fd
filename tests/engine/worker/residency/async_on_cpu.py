"""vLLM's asynchronous scheduling on a CPU worker, which turns it off by default.

What is real: `AsyncScheduler`, the batch queue with two steps in flight, the runner's placeholders for tokens that are
not known yet, and its input from the last step's samples.  What is not: the device computes a step while it is
submitted, not beside the host, so the order of a GPU's streams cannot be seen here (`make gpu-check` sees it).
"""

import contextlib
from typing import Any

import torch


class _Done:
    """A device stream or event with all its work done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: Any) -> None:
        """Do nothing: no work is under way."""

    synchronize = wait_stream = wait_event = record


def schedule_asynchronously(config: Any) -> None:
    """Turn it on in a configuration where vLLM's CPU platform turned it off; permanently for this process."""
    config.scheduler_config.async_scheduling = True
    torch.cuda.Stream = torch.cuda.Event = _Done  # type: ignore[misc, assignment]
    torch.cuda.current_stream = _Done  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc]
