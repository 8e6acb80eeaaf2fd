"""The policies by name, each as a factory `cluster -> Policy`.

Owns the names that configuration and command line accept; a policy joins the tests by being registered here.
"""

from collections.abc import Callable, Mapping

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.balance import LARGE_TRIGGER, LoadBalance
from melld.scheduler.policies.fit import BestFit, MostFree, WorstFit
from melld.scheduler.policies.mell.plan import MellSettings
from melld.scheduler.policies.mell.policy import Mell, mell
from melld.scheduler.policies.plus.policy import MellPlus
from melld.scheduler.policies.plus.settings import LEAN, TIGHT
from melld.scheduler.policy import Policy

POLICIES: Mapping[str, Callable[[Cluster], Policy]] = {
    BestFit.name: BestFit,
    WorstFit.name: WorstFit,
    MostFree.name: MostFree,
    LoadBalance.name: LoadBalance,
    Mell.name: Mell,
    "mell-unbatched": mell(MellSettings(batching=False)),
    "mell-eager": mell(MellSettings(eager=True)),
    "mell-literal": mell(MellSettings(literal=True)),
    "mell-literal-unbatched": mell(MellSettings(literal=True, batching=False)),
    MellPlus.name: MellPlus,
    "mell-plus-lean": lambda cluster: MellPlus(cluster, LEAN),
    "mell-plus-tight": lambda cluster: MellPlus(cluster, TIGHT),
    "load-balance-eager": lambda cluster: LoadBalance(cluster, LARGE_TRIGGER),
}

DEFAULT_POLICY = MellPlus.name
