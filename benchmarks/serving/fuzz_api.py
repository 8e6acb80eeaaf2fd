"""Fuzzes a real daemon with schemathesis, from its own /openapi.json: no answer of 500 or more, no hang, as described.

    python -m benchmarks.serving.fuzz_api --seconds 240 --schemathesis /path/to/schemathesis

Schemathesis stays out of the project's lock: install it into an environment of its own.  Exit code 0: nothing found.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from melld.demo_model import make_demo_model
from tests.serve.daemon_process import DaemonProcess

# What is asked of every answer.  Not asked: that every body which fits the schema is taken (limits are not in it), nor
# that every other one is refused (vLLM ignores unknown fields, as OpenAI does).
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ANSWER_DEADLINE_S = 60


def main() -> int:
    """Start a daemon, let schemathesis at it, look whether it still serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemathesis", default="schemathesis", metavar="PROGRAM")
    parser.add_argument(
        "--phases", default="fuzzing", help="coverage,fuzzing; coverage runs to its end, whatever --seconds"
    )
    parser.add_argument("--only", metavar="REGEX", help="only the paths that fit this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "demo"
        make_demo_model(model)
        # A short context: an answer without a limit of its own ends soon, and what takes a minute hangs.
        with DaemonProcess(model, "--device", "cpu:1", "--set", "model.vllm.max_model_len=512") as daemon:
            daemon.wait_ready()
            code = fuzz(daemon, arguments)
            print("ready after it:", daemon.get("/ready"))
            left = daemon.status()["requests"]
            print("requests left:", len(left))
            daemon.stop()
        complaints = [line for line in daemon.lines if " ERROR " in line or "Traceback" in line]
        print("errors in the log:", len(complaints), *complaints[:20], sep="\n")
    return code or bool(complaints)


def fuzz(daemon: DaemonProcess, arguments: argparse.Namespace) -> int:
    """Run schemathesis and return its exit code."""
    command = [arguments.schemathesis, "run", f"{daemon.url}/openapi.json", "--checks", CHECKS, "--workers", "2"]
    command += ["--max-time", str(arguments.seconds), "--seed", str(arguments.seed), "--max-examples", "100000"]
    command += ["--request-timeout", str(ANSWER_DEADLINE_S), "--continue-on-failure", "--no-color", "--no-shrink"]
    command += ["--phases", arguments.phases, "--suppress-health-check", "all"]
    if arguments.only:
        command += ["--include-path-regex", arguments.only]
    hooks = {"PYTHONPATH": str(Path(__file__).parent), "SCHEMATHESIS_HOOKS": "fuzz_hooks"}
    return subprocess.run(command, env=os.environ | hooks, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
