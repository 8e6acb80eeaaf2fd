"""An engine that sleeps and wakes, in its own process: `python -m tests.gpu.sleeping MODEL DEVICE`.

Prints what it says before and after, what it holds asleep, and how long waking takes.
"""

import json
import sys
import time


def main(model: str, device: str) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from melld.engine.worker.residency.weights import SleepMode
    from melld.engine.worker.start import warm_up

    own = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.1} if device == "cuda" else {}
    arguments = {"model": model, "dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
    given = arguments | {"kv_cache_memory_bytes": 64 << 20, "distributed_executor_backend": "uni"} | own
    config = EngineArgs(**given).create_engine_config()
    engine = EngineCore(config, Executor.get_class(config), log_stats=False)
    weights = SleepMode(engine)

    def said() -> object:
        output = warm_up(engine, logprobs=0)
        return output.new_token_ids, output.new_logprobs.logprobs.tolist()

    before, held_bytes = said(), weights.held_bytes
    weights.drop()
    asleep_bytes, began_s = weights.held_bytes, time.monotonic()
    weights.restore()
    woke_s = time.monotonic() - began_s
    facts = {"refusal": weights.refusal, "held_bytes": held_bytes, "asleep_bytes": asleep_bytes, "woke_s": woke_s}
    sys.stdout.write(json.dumps({"before": before, "after": said(), **facts}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
