"""The epoch's length trades cost, not quality: short epochs must not pack worse than long ones."""

import msgspec
import pytest

from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.links import LinkSettings
from tests.simulator.setups import SMALL, small_load


@pytest.mark.parametrize("policy", ["mell-plus"])
def test_short_epochs_pack_as_well_as_long_ones(policy: str) -> None:
    """In a tenth of a second most requests do not grow by a block: growth must not be read only from those that did."""
    machines = msgspec.structs.replace(
        SMALL, capacity_bytes=8 * SMALL.capacity_bytes, link=LinkSettings(bytes_per_s=1e9)
    )
    load = small_load(rate_per_s=1.0, seconds=200.0).scaled(10)
    ratios = {}
    for epoch_s in (1.0, 0.1):
        report = run_policy(policy, msgspec.structs.replace(machines, epoch_s=epoch_s), load, SchedulerChoices()).report
        ratios[epoch_s] = report.ratio
        assert report.preemptions_per_request < 0.05
    assert ratios[0.1] <= ratios[1.0] + 0.03
