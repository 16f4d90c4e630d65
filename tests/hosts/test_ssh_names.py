"""Whatever hosts call themselves and each other, and whatever their clocks say, they train."""

from __future__ import annotations

import numpy as np
import pytest
from hosts.on_hosts import SHORT, WAIT_S, losses
from hosts.simulated_hosts import HostSettings, SimulatedHosts

import workbench as wb

SETTINGS = {
    "debian": HostSettings(names="debian"),  # the own name is 127.0.1.1
    "no names": HostSettings(names="none"),
    "one name": HostSettings(same_name=True),
    "a day apart": HostSettings(skewed=True),
    "all of it": HostSettings(same_name=True, names="debian", skewed=True),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_hosts_meet_train_and_are_told_apart(reached: SimulatedHosts, kind: str) -> None:
    reached.again(SETTINGS[kind])
    with wb.Cluster(2, launcher="ssh", on="xh1,xh2") as cluster:
        assert len({engine.host for engine in cluster.engines}) == 2
        truth = cluster.run(SHORT, strategy="one_device").wait(WAIT_S)
        run = cluster.run(SHORT, strategy="mirrored").wait(WAIT_S)
        assert losses(run) == pytest.approx(losses(truth), abs=1e-6)
        history = run.history
        for rank in (0, 1):
            starts = history["start_s"][history["rank"] == rank]
            assert len(starts) == 20
            assert (np.diff(starts) >= 0).all()
            assert -0.1 < starts[0] <= starts[-1] < WAIT_S
        bounds = run.meta()["clock_bound_s"]
        assert [0 <= bound < 0.1 for bound in bounds] == [True, True]
        assert (bounds[1] > 0) == SETTINGS[kind].skewed
