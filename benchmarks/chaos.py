"""The long random history: `make chaos`, or `PYTHONPATH=. python benchmarks/chaos.py --requests 1000 --workers 4`.

Prints what happened, and every answer that was lost, altered or late; 0 when there is none.
"""

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

from melld.demo_model import make_demo_model
from tests.daemon_process import DaemonProcess
from tests.migrate.chaos import History, orphans
from tests.migrate.live import Operator


def main() -> int:
    """The long history; 0 when nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no request after so long")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="mell-plus", help="its own moves come on top")
    parser.add_argument("--harm-every-s", type=float, default=3.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model, faults = Path(directory) / "model", Path(directory) / "faults"
        make_demo_model(model)
        faults.mkdir()
        flags = ["--device", f"cpu:{asked.workers}", "--kv-bytes", "64MiB"]
        flags += ["--set", f'scheduler.policy="{asked.policy}"']
        with DaemonProcess(model, *flags, environment={"MELLD_FAULTS": str(faults)}) as daemon:
            daemon.wait_ready()
            print("ready", flush=True)
            history = History(daemon, faults, asked.seed, asked.harm_every_s)
            began_s = time.monotonic()
            history.play(asked.requests, asked.clients, asked.seconds)
            took_s = time.monotonic() - began_s
            pids = [worker["pid"] for worker in Operator(daemon).status()["workers"]]
            counted = [
                line for line in daemon.get("/metrics").splitlines() if line.startswith("melld_migrations_total")
            ]
            ended = daemon.stop()
    for what, count in sorted(history.tally.items()):
        print(f"{count:6d}  {what}")
    print("as the daemon counted, the policy's own moves included:", *counted, sep="\n")
    print(f"{took_s:.0f} s; exit code {ended}; orphans {orphans(pids)}; wrong: {len(history.wrong)}")
    print(*history.wrong[:20], sep="\n")
    return int(bool(history.wrong) or ended != 0 or bool(orphans(pids)))


if __name__ == "__main__":
    sys.exit(main())
