"""What a hand-over costs inside the engine, by length: no wire, no copy; `PYTHONPATH=. python FILE`.

One engine in this process.  A decoding request is frozen, written down, given up, and taken back as its destination
would take it; each step of that is timed, beside the decode step of the same request.  Prints a row a length: medians
in milliseconds, and `hand_over`, the sum of all that lies between the source's last step and the destination's first.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from melld.config import parse_config
from melld.demo_model import make_demo_model
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT, engine_arguments
from melld.engine.wire import messages as wire
from melld.migrate.snapshot import RequestSnapshot, Via

BESIDE_DECODING = ("facts", "prepare", "reserve")
"""Done while the source still decodes."""


class Bench:
    """One engine, and the times of what is done to it, by name."""

    def __init__(self, model: Path) -> None:
        os.environ.update(COMMON_ENVIRONMENT | CPU_ENVIRONMENT)
        text = f'[model]\npath="{model}"\n[devices]\ncpu={{count=1, kv_bytes="192MiB"}}'
        config = parse_config(text, "benchmark", {"model.vllm.enable_prefix_caching": False})
        arguments = engine_arguments(config, "cpu")
        spec = wire.WorkerSpec(worker="w0", model_path=str(model), device_kind="cpu", engine_arguments=arguments)
        from melld.engine.worker.residency.memory import KvMemory
        from melld.engine.worker.residency.residency import Residency
        from melld.engine.worker.start import build_engine

        self.engine, _ = build_engine(spec)
        self.residency = Residency(self.engine, KvMemory(self.engine).layout.block_bytes)
        self.times_s: dict[str, list[float]] = {}

    def timed(self, name: str, act: Callable[[], Any]) -> Any:
        """Return what it returns, and keep how long it took."""
        began_s = time.perf_counter()
        found = act()
        self.times_s.setdefault(name, []).append(time.perf_counter() - began_s)
        return found

    def step(self) -> None:
        """Run one step of the engine."""
        _, executed = self.engine.step_fn()
        self.engine.post_step(model_executed=executed)

    def begin(self, name: str, tokens: int) -> None:
        """Add a request, and step until it has made forty tokens."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[random.randrange(10, 250) for _ in range(tokens)],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        prepared, _ = self.engine.preprocess_add_request(request)
        self.engine.add_request(prepared)
        while len(self.engine.scheduler.requests[name].output_token_ids) < 40:
            self.step()

    def hand_over(self, name: str) -> None:
        """Out of the engine, and into it again."""
        residency = self.residency
        self.timed("facts", lambda: residency.facts(name))
        self.timed("freeze", lambda: residency.freeze(name, Via.KV))
        snapshot = self.timed("snapshot", lambda: residency.snapshot(name))
        data = self.timed("encode", snapshot.encode)
        decoded = self.timed("decode", lambda: RequestSnapshot.decode(data))
        residency.release(name)
        self.step()
        arrival = self.timed("prepare", lambda: residency.prepare(snapshot.core_request, snapshot.output_token_ids))
        self.timed("reserve", lambda: residency.reserve(arrival, snapshot.num_tokens + 64))
        self.timed("attach", lambda: residency.attach(decoded, Via.KV))
        self.timed("first step", self.step)


def main() -> int:
    """Measure, and print a row a length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_demo_model(Path(directory) / "model")
        bench = Bench(Path(directory) / "model")
        for tokens in asked.lengths:
            name = f"of {tokens}"
            bench.begin(name, tokens)
            bench.times_s.clear()
            for _ in range(asked.repeats):
                for _ in range(10):
                    bench.timed("step", bench.step)
                bench.hand_over(name)
            bench.residency.abort([name])
            bench.step()
            row = {what: round(statistics.median(times_s) * 1e3, 3) for what, times_s in bench.times_s.items()}
            between = [row[what] for what in row if what not in (*BESIDE_DECODING, "step", "first step")]
            row |= {"hand_over": round(sum(between), 3), "load": round(os.getloadavg()[0], 1)}
            print(json.dumps({"tokens": tokens} | row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
