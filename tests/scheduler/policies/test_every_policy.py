"""What every policy promises, whatever happens in whatever order: see `machine`.

A policy joins by being registered in `melld.scheduler.policies.names`, or as a variant in `melld.simulator.experiment`.
"""

from melld.simulator.experiment import ALL_POLICIES
from tests.scheduler.machine import machine_of

EXAMPLES = 40

for _name in ALL_POLICIES:
    for _instant in (False, True):
        _case = machine_of(_name, _instant, EXAMPLES)
        globals()[f"Test{_case.__qualname__}"] = _case
del _case, _name, _instant
