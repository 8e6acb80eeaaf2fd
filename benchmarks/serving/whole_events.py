"""`melld` whose events of streams are all made by vLLM's serving classes: what the plain way is compared with.

python -m benchmarks.serving.whole_events serve ...
"""

import sys

from melld import cli
from melld.api import app


def leave_all_to_vllm() -> None:
    """Open no outlet for any stream."""
    app.outlet_of = lambda *_: None


if __name__ == "__main__":
    leave_all_to_vllm()
    sys.exit(cli.main(sys.argv[1:]))
