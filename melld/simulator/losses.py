"""Loss of a machine in a simulation: its workers are gone; its requests keep the tokens emitted so far.

Changes the physical state alone; the simulation tells the scheduler.
"""

from melld.ids import WorkerId
from melld.simulator.fleet import SimulatedFleet
from melld.simulator.run import QUEUED, Run


def lose_machine(fleet: SimulatedFleet, machine: int, now_s: float) -> tuple[list[WorkerId], list[Run], list[Run]]:
    """Lose the machine; return its workers, the requests that ran there, and those whose moves ended with it."""
    lost = [index for index in range(len(fleet.names)) if fleet.machine_of(index) == machine]
    displaced, unmoved = [], []
    for run in fleet.runs.values():
        is_lost = run.state is not QUEUED and run.worker in lost
        if run.move is not None and (is_lost or run.move.destination in lost):
            fleet.abort(run)
            unmoved.append(run)
        if is_lost:
            fleet.suspend(run, now_s)
            displaced.append(run)
    for index in lost:
        fleet.awake.discard(index)
    return [fleet.names[index] for index in lost], displaced, unmoved
