"""Workers on a cluster's machines: places are created when a machine joins, and kept while it is lost.

Owns which machine has which workers.  Decides nothing: a machine that joins is used.
"""

import logging
from collections.abc import Mapping

import msgspec

from melld.cluster.facts import same_everywhere
from melld.cluster.machine import Machine
from melld.config import Config, CpuDevices
from melld.control.status import MachineStatus
from melld.daemon.devices import make_slots
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.place import Slot
from melld.ids import WorkerId
from melld.kvstore.worker_readings import WorkerReading

log = logging.getLogger("melld.cluster")


class Machines:
    """All machines that have ever joined, as reported by the `Cluster`; none without one.

    `config`: of the one model; `environment`: the daemon's own.
    """

    def __init__(self, config: Config, environment: Mapping[str, str], fleet: Fleet) -> None:
        model = msgspec.structs.replace(config.model, path=same_everywhere(config.model.path))
        self._config = msgspec.structs.replace(config, model=model)
        self._environment = environment
        self._fleet = fleet
        self._workers: dict[str, list[WorkerId]] = {}
        self._machines: dict[str, Machine] = {}
        """The latest of each name, which may be lost."""

    def machine_joined(self, machine: Machine) -> None:
        """Start a worker on each of its devices: the same as before, if it was lost."""
        workers = self._workers.setdefault(machine.name, [])
        self._machines[machine.name] = machine
        for slot in self._slots(machine, workers):
            if (place := self._fleet.places.get(slot.worker)) is None:
                self._fleet.supervisor.add([slot], machine)
            else:
                place.slot = slot  # its devices may be other ones now
                self._fleet.supervisor.bring_back([slot.worker], machine)

    def machine_lost(self, machine: Machine, reason: str) -> None:
        """Lose all its workers in one event."""
        with self._fleet.losing(self._workers[machine.name], f"machine {machine.name} is lost: {reason}"):
            machine.end_children()

    def workers(self, machine: str) -> list[WorkerId]:
        """Return the workers of that machine; none if it never joined."""
        return list(self._workers.get(machine, ()))

    def readings(self) -> dict[str, WorkerReading]:
        """Return the last reading of each worker's device."""
        joined = [machine for machine in self._machines.values() if machine.why_lost is None]
        return {worker: one for machine in joined for worker, one in machine.readings.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Return their names; none without a cluster."""
        return tuple(self._machines)

    def status(self) -> tuple[MachineStatus, ...]:
        """Return what operators may know of each machine."""
        return tuple(
            MachineStatus(machine=name, workers=tuple(self._workers[name]), reason=machine.why_lost or "")
            for name, machine in self._machines.items()
        )

    def _slots(self, machine: Machine, workers: list[WorkerId]) -> list[Slot]:
        """Return a slot for each group of the machine's devices; name those that are new in `workers`."""
        config, each = self._config, self._config.devices.group_size
        facts = machine.devices[: len(machine.devices) // each * each]
        if len(facts) < each:
            log.warning("machine %s has fewer devices than the %d a worker needs", machine.name, each)
            return []
        gpus = [one for one in facts if one.uuid]
        if not gpus:
            cpu = msgspec.structs.replace(config.devices.cpu or CpuDevices(), count=len(facts))
            config = msgspec.structs.replace(config, devices=msgspec.structs.replace(config.devices, cpu=cpu))
        slots = make_slots(config, gpus, self._environment)
        known = sum(map(len, self._workers.values()))
        workers += [WorkerId(f"w{known + new}") for new in range(len(slots) - len(workers))]
        number = list(self._workers).index(machine.name)
        return [
            msgspec.structs.replace(
                slot,
                worker=worker,
                device=f"{machine.name}/{slot.device}",
                spec=msgspec.structs.replace(
                    slot.spec,
                    worker=worker,
                    kv_interface=config.cluster.kv_interface if config.cluster.kv == "nixl" else None,
                ),
                machine=machine.name,
                machine_number=number,
            )
            for slot, worker in zip(slots, workers, strict=False)
        ]
