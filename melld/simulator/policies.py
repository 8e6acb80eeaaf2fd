"""The policies that simulations compare: the daemon's, and variants of them for experiments.

Owns the variants' names; a variant joins the policies' tests by being named here.
"""

from melld.scheduler.policies.balance import LARGE_TRIGGER, LoadBalance
from melld.scheduler.policies.mell.plan import MellSettings
from melld.scheduler.policies.mell.policy import mell
from melld.scheduler.policies.names import POLICIES, Policies

ALL_POLICIES: Policies = {
    **POLICIES,
    "mell-unbatched": mell(MellSettings(batching=False)),
    "mell-literal": mell(MellSettings(literal=True)),
    "mell-literal-unbatched": mell(MellSettings(literal=True, batching=False)),
    "load-balance-eager": lambda cluster: LoadBalance(cluster, LARGE_TRIGGER),
}
