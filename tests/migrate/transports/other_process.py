"""Another process with its own cache, from which copies are read."""

import sys
from multiprocessing import Pipe

from tests.forked import ROOT, ForkedPython

MAIN = """
import sys
from multiprocessing.connection import Connection
from tests.migrate.transports.sibling import sibling_main
sibling_main(Connection(int(sys.argv[1])), "cpu", *sys.argv[2:])
"""


class Sibling:
    """The other process; with an `interface` it is on another machine."""

    def __init__(self, order: str = "LBHNC", *interface: str) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            words = [str(theirs.fileno()), order, *interface]
            command = [sys.executable, "-c", MAIN, *words]
            self.process = ForkedPython(command, pass_fds=(theirs.fileno(),), cwd=ROOT)
        self.pid, self.handle = self.pipe.recv()

    def write(self, block: int, value: float) -> None:
        self.pipe.send((block, value))
        assert self.pipe.recv() == "written"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
