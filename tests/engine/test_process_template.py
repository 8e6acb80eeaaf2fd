"""The template process as the daemon sees it: what it makes may be gone before the daemon has heard of that."""

import subprocess
import sys

from melld.engine.process_template import Birth, Template


def test_killing_a_worker_that_has_just_ended_is_nothing() -> None:
    """Whoever looks for hung workers goes on looking when one of them dies in that moment by itself."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    template = Template("cpu", {})
    birth = Birth(1, lambda _pid: None, lambda _code, _cause: None)
    birth.pid = ended.pid
    template._births[birth.number] = birth  # the template has reaped it, and its word of that lies unread
    template.kill(birth)
