"""Failures of the daemon itself: it ends cleanly, and its supervisor restarts it."""

from pathlib import Path

from tests.api.http_client import chat, request
from tests.serve.daemon_process import DaemonProcess

BREAKS = """
import sys
from melld.cli import main
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.step_outputs import StepOutputs

class Outputs(StepOutputs):
    async def get(self):
        if not hasattr(self, "broken"):
            self.broken = await super().get()
        raise RuntimeError("a fault in the reading of outputs")

init = Fleet.__init__
def break_(fleet, *arguments):
    init(fleet, *arguments)
    fleet.outputs.__class__ = Outputs
Fleet.__init__ = break_
sys.exit(main(sys.argv[1:]))
"""


def test_a_daemon_that_can_no_longer_answer_exits(demo_model: Path) -> None:
    """If reading outputs keeps failing, it must not report good health and answer 503 forever."""
    with DaemonProcess(demo_model, "--device", "cpu:1", "--kv-bytes", "8MiB", program=("-c", BREAKS)) as daemon:
        daemon.wait_ready()
        answer = request(daemon.url, "POST", "/v1/chat/completions", chat(max_tokens=5))
        assert answer.status >= 500
        assert daemon.wait_end() == 1
    assert any("the task 'outputs' failed 5 times in a row" in line for line in daemon.lines)
