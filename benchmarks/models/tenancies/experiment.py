"""Runs of several tenancies on one setting, for `models_table.py`.

Owns the names.  `lending` is the Landlord; `fixed` the Landlord where nothing is lent, `split` what MuxServe does,
`fifo` and `collated` what swapping whole models does.
"""

from collections.abc import Callable, Mapping, Sequence

from melld.ids import ModelName
from melld.landlord.landlord import Landlord
from melld.landlord.placement import LandlordSettings

from .baselines import Split, Swap
from .measures import ModelsReport
from .setting import ModelArrival, Setting
from .simulation import ModelsSimulation, Tenancy

QUANTUM_S = 5.0


def _wanted(setting: Setting) -> dict[ModelName, float]:
    """Return the KV bytes a second that each model wants, up to a factor that is the same for all."""
    return {one.name: one.rate_per_s * one.model.bytes_per_token for one in setting.models}


TENANCIES: Mapping[str, Callable[[Setting], Tenancy]] = {
    "lending": lambda _setting: Landlord(),
    "fixed": lambda _setting: Landlord(LandlordSettings(lends=False)),
    "split": lambda setting: Split(_wanted(setting)),
    "even": lambda setting: Split(_wanted(setting), even=True),
    "collated": lambda _setting: Swap(QUANTUM_S),
    "fifo": lambda _setting: Swap(0.0),
}


def run_tenancy(name: str, setting: Setting, arrivals: Sequence[ModelArrival]) -> ModelsReport:
    """Simulate the named tenancy until every request has ended, or is late beyond doubt."""
    return ModelsSimulation(setting, arrivals, TENANCIES[name](setting)).run().report(name)
