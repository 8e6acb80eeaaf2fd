"""Small estates for the Landlord's tests: devices of 100 granules of one MiB, and blocks that divide them."""

from melld.ids import DeviceName, ModelName, WorkerId
from melld.landlord import events as e
from melld.landlord.landlord import Landlord, LandlordSettings
from tests.landlord.law import check_landlord

MIB = 2**20
GRANULES = 100
WEIGHTS = 30


def declare(landlord: Landlord, models: dict[str, dict[str, object]], devices: int = 1, weights: int = WEIGHTS) -> None:
    """Declare the devices, the models with their special settings, and every pair as `model@device`."""
    names = [DeviceName(f"d{index}") for index in range(devices)]
    for device in names:
        landlord.handle(e.DeviceDeclared(0.0, device, (GRANULES + 1) * MIB, MIB))
    for model, special in models.items():
        facts = {"resident_bytes": weights * MIB, "block_bytes": MIB // 8, "load_s": 10.0, "wake_s": 1.0} | special
        landlord.handle(e.ModelDeclared(0.0, ModelName(model), **facts))  # type: ignore[arg-type]
        for device in names:
            landlord.handle(e.InstanceDeclared(0.0, WorkerId(f"{model}@{device}"), ModelName(model), device))


def estate(*models: str, devices: int = 1, settings: LandlordSettings | None = None, **special: object) -> Landlord:
    """Return a Landlord with these models, all with the same facts."""
    landlord = Landlord(settings)
    declare(landlord, {model: dict(special) for model in models}, devices)
    return landlord


class Town:
    """A Landlord with obedient workers: loads, dozes and takes are answered at once, unless a test delays them."""

    def __init__(self, landlord: Landlord, answers_takes: bool = True) -> None:
        self.landlord = landlord
        self.answers_takes = answers_takes
        self.granules: dict[str, set[int]] = {}
        self.told: list[e.LandlordCommand] = []
        self.offers: dict[str, int] = {}
        self.now_s = 0.0
        self.dozing_bytes = 0
        self.dozes_at_once = True
        self.resident_bytes: dict[str, int] = {}  # measured by a load; none: as declared

    def tell(self, event: e.LandlordEvent) -> list[e.LandlordCommand]:
        """Send the event; return all commands that follow, including those after the workers' answers."""
        self.now_s = event.at_s
        commands = self.landlord.handle(event)
        check_landlord(self.landlord)
        followed = list(commands)
        for command in sorted(commands, key=lambda one: not isinstance(one, e.OfferCapacity)):
            followed += self._obey(command)  # what follows from an answer is newer than these offers
        self.told += commands
        return followed

    def _obey(self, command: e.LandlordCommand) -> list[e.LandlordCommand]:
        worker, granules = command.worker, self.granules.setdefault(command.worker, set())
        if isinstance(command, e.OfferCapacity):
            self.offers[worker] = command.capacity_bytes // MIB
        elif isinstance(command, e.GrantKv):
            granules.update(command.granules)
        elif isinstance(command, e.LoadModel):
            return self.tell(e.ModelLoaded(self.now_s, worker, self.resident_bytes.get(worker, 0)))
        elif isinstance(command, e.DozeModel) and self.dozes_at_once:
            granules.clear()
            return self.tell(e.ModelDozed(self.now_s, worker, self.dozing_bytes))
        elif isinstance(command, e.UnloadModel):
            granules.clear()
            return self.tell(e.ModelGone(self.now_s, worker))
        elif isinstance(command, e.TakeKv) and self.answers_takes:
            return self.give_back(worker, command.granules)
        return []

    def give_back(self, worker: str, count: int) -> list[e.LandlordCommand]:
        """Return this many of the worker's granules, the highest."""
        returned = tuple(sorted(self.granules[worker])[-count:])
        self.granules[worker] -= set(returned)
        return self.tell(e.KvReturned(self.now_s, WorkerId(worker), returned))

    def want(self, worker: str, at_s: float = 0.0) -> list[e.LandlordCommand]:
        """Have the model's scheduler activate the instance."""
        return self.tell(e.ModelWanted(at_s, WorkerId(worker)))

    def need(self, worker: str, granules: int, at_s: float = 0.0, requests: int = 1) -> list[e.LandlordCommand]:
        """Have the model's scheduler count this many granules of requests on the instance."""
        return self.tell(e.KvNeeded(at_s, WorkerId(worker), granules * MIB, 0, requests if granules else 0))

    def pass_time(self, at_s: float, **loads: e.ModelLoad) -> list[e.LandlordCommand]:
        """Send an epoch that ends at `at_s`."""
        return self.tell(e.ModelsMeasured(at_s, {ModelName(name): load for name, load in loads.items()}))


def of(kind: type, commands: list[e.LandlordCommand]) -> list[str]:
    """Return the instances that commands of this kind are about."""
    return [command.worker for command in commands if type(command) is kind]
