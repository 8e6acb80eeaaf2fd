"""The policies that a daemon can run, by name, each as a factory `cluster -> Policy`.

Owns the names that `[scheduler] policy` accepts.  `melld simulate` has more: `melld.simulator.experiment`.
"""

from collections.abc import Callable, Mapping

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.balance import LoadBalance
from melld.scheduler.policies.fit import BestFit, MostFree, WorstFit
from melld.scheduler.policies.mell.policy import Mell
from melld.scheduler.policies.plus.policy import MellPlus
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.policy import Policy

Policies = Mapping[str, Callable[[Cluster], Policy]]

POLICIES: Policies = {
    policy.name: policy for policy in (BestFit, WorstFit, MostFree, LoadBalance, Mell, MellPlus, MellSlo)
}
