"""`melld drain WORKER --wait` under load: how long it takes, whether a stream is broken; `PYTHONPATH=. python FILE`.

A real daemon with two CPU workers and so many streams; when all have begun to answer, the worker with the most of them
is drained.  Every answer is held against the answer to the same request in a run in which nothing moved.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from melld.demo_model import make_demo_model
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess


def body(number: int, tokens: int) -> dict[str, Any]:
    """Return a request that shares no block with the others; `tokens` and up to half as many more."""
    prompt = list(range(5 + number % 40, 69 + number % 40))
    most = tokens + tokens * (number % 11) // 20
    return {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True, "cache_salt": str(number)}


def measure(daemon: DaemonProcess, streams: int, tokens: int) -> dict[str, Any]:
    """Measure one drain; both workers are in service again when it returns."""
    operator = Operator(daemon)
    unmoved = [stream.result() for stream in [Stream(daemon, body(one, tokens)) for one in range(streams)]]
    running = [Stream(daemon, body(one, tokens)) for one in range(streams)]
    for stream in running:
        stream.wait_chunks(2)
    held = Counter(one["worker"] for one in operator.status()["requests"])
    worker, requests = held.most_common(1)[0]
    began_s = time.monotonic()
    done = daemon.melld("drain", worker, "--wait", "--json")
    told_s = time.monotonic() - began_s
    answers = [stream.result() for stream in running]
    gaps_s = [max(late - early for early, late in zip(s.arrivals_s, s.arrivals_s[1:], strict=False)) for s in running]
    daemon.melld("resume", worker)
    operator.wait_ready()
    operator.wait_idle()
    return {
        "streams": streams,
        "on_the_worker": requests,
        "report": json.loads(done.stdout) if done.stdout else done.stderr,
        "command_s": round(told_s, 3),
        "broken": sum(answer.error is not None for answer in answers),
        "other_tokens": sum(answer != before for answer, before in zip(answers, unmoved, strict=True)),
        "longest_gap_s": round(max(gaps_s), 3),
    }


def main() -> int:
    """Measure, and print a row at a time, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--policy", default="mell-plus")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_demo_model(model)
        flags = ["--device", "cpu:2", "--kv-bytes", "128MiB", "--set", f'scheduler.policy="{asked.policy}"']
        with DaemonProcess(model, *flags) as daemon:
            daemon.wait_ready()
            for _ in range(asked.repeats):
                row = measure(daemon, asked.streams, asked.tokens)
                print(json.dumps({"policy": asked.policy, **row, "load": round(os.getloadavg()[0], 1)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
