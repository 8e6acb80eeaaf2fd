"""The nursery's forks are what a new interpreter would be."""

import fcntl
import os

from tests.forked import run_python
from tests.nursery import CLEAR_OF_THE_REST


def test_a_fork_gets_each_descriptor_under_its_number() -> None:
    """Also under one that the nursery has used for another in between."""
    ours, theirs = os.pipe()
    numbers = [fcntl.fcntl(theirs, fcntl.F_DUPFD, CLEAR_OF_THE_REST + above) for above in range(3, 6)]
    told = run_python(
        "-c", "import os, sys; [os.write(int(n), b'!') for n in sys.argv[1:]]", *map(str, numbers), pass_fds=numbers
    )
    for number in (theirs, *numbers):
        os.close(number)
    with os.fdopen(ours) as heard:
        assert (told.stderr, heard.read()) == ("", "!!!")
