"""Which shares a worker takes whose replica differs, when others than before take part."""

from types import SimpleNamespace

import pytest
from needs import need

need("torch")

from workbench.strategies.torch.gossip import Gossip  # noqa: E402

pytestmark = pytest.mark.torch


class Trainer:
    def be_one_of(self, workers):
        self.workers = workers


@pytest.fixture
def worker():
    """Return rank 1 of three, who has done three steps."""
    spec = SimpleNamespace(options={}, rank=1, world_size=3, overrides={})
    made = Gossip(SimpleNamespace(spec=spec))
    made.trainer, made.done = Trainer(), 3
    return made


def enter(worker, furthest, rank, workers):
    spec = worker.context.spec
    spec.rank, spec.world_size = rank, workers
    worker.enter_group({"done": furthest})


def test_who_is_behind_takes_the_shares_it_had_up_to_the_furthest(worker) -> None:
    enter(worker, 5, 0, 2)
    assert worker.shares(3) == [((1, 3), 2), ((0, 2), None)]
    assert worker.workers == 3
    worker.done = 5
    assert worker.shares(5) == [((0, 2), None)]
    assert worker.workers == 2


def test_a_second_change_before_it_has_come_to_the_first(worker) -> None:
    enter(worker, 5, 0, 2)
    worker.done = 4
    enter(worker, 7, 1, 3)
    assert worker.shares(4) == [((1, 3), 1), ((0, 2), 2), ((1, 3), None)]


def test_what_nobody_alive_has_done_is_divided_anew(worker) -> None:
    enter(worker, 5, 0, 2)
    enter(worker, 3, 0, 1)  # the furthest has died as well
    assert worker.shares(3) == [((0, 1), None)]


def test_a_share_counts_by_the_workers_it_was_cut_for(worker) -> None:
    enter(worker, 5, 0, 2)
    share = SimpleNamespace(samples=8, global_samples=24)
    assert worker.weight(share) == 1.0
    worker.done = 5
    share.samples = 12
    assert worker.weight(share) == 1.0
