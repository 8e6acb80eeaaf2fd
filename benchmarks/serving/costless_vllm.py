"""An executor of vLLM's that computes nothing: `vllm serve` with it shows what its API server delivers.

    PYTHONPATH=. vllm serve MODEL --distributed-executor-backend benchmarks.serving.costless_vllm.CostlessExecutor
        --no-async-scheduling

vLLM's engine core schedules as ever, in its own process; each request has the tokens of `costless`, one at each step.
"""

import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.serving.costless import STEP_S, TOKENS


class CostlessExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """Answers each step of the scheduler with the next token of each request."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._made: dict[str, int] = {}
        self._due_s = 0.0

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """See vLLM.  Prompts fit into one step."""
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s = time.monotonic() + STEP_S
        for request in scheduler_output.finished_req_ids:
            self._made.pop(request, None)
        requests = list(scheduler_output.num_scheduled_tokens)
        tokens = []
        for request in requests:
            made = self._made[request] = self._made.get(request, -1) + 1
            tokens.append([TOKENS[made % len(TOKENS)]])
        places = {request: place for place, request in enumerate(requests)}
        output = ModelRunnerOutput(req_ids=requests, req_id_to_index=places, sampled_token_ids=tokens)
        if not non_block:
            return output
        done = Future[Any]()
        done.set_result(output)
        return done
