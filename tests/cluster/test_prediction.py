"""Four workers, predicted from two and read back."""

import numpy as np
import pytest
from lending import lent
from needs import need

import workbench as wb

pytestmark = [pytest.mark.cluster, pytest.mark.torch, pytest.mark.timing]
need("torch")

ASLEEP = """
import time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

pace = np.random.default_rng([{seed}, dist.get_rank()])

class Asleep(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(25_000))

    def forward(self, x):
        time.sleep(0.04 + 0.02 * pace.gamma(1.0))
        return self.weight.sum() + x.sum(dim=1)

n = {workers}
wb.fit(Asleep(), (torch.zeros(8 * n, 2), torch.zeros(8 * n)), loss=nn.MSELoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.0), batch_size=4 * n, steps={steps})
"""
LINK = ("bandwidth=10MB/s", "latency=4ms")


def test_four_sleeping_workers_take_what_two_foretold():
    with lent(4) as cluster:

        def run(workers, steps, seed, **options):
            source = ASLEEP.format(workers=workers, steps=steps, seed=seed)
            return cluster.run(
                source, strategy="mirrored", workers=workers, inject=LINK, options=options
            ).wait()

        two = run(2, 80, 1, allreduce="ring")
        for name in ("ring", "reduce_to_one"):
            four = run(4, 40, 2, allreduce=name)
            measured_s = four.history["step_s"][four.history["step"] >= 1].mean()
            found = two.predict(4, options={"allreduce": name}, scaling="weak", steps=40)
            middle, low, high = found.points[0].step_s
            assert middle == pytest.approx(measured_s, rel=0.12)
            assert 0.95 * low <= measured_s <= 1.05 * high
            changed = four.what_if(allreduce="ring" if name != "ring" else "reduce_to_one")
            assert np.isfinite(changed.variants[0].step_s).all()
        assert "With 4 workers" in repr(wb.predict(two, [2, 4], scaling="weak"))
        assert two.what_if(1).without == 1
