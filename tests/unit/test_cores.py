import os
import threading

import pytest
from needs import need

need("tensorflow")
pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(
        not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
        reason="needs Linux and two cores",
    ),
]


@pytest.fixture
def support():
    """Import it here: whoever only collects tests need not load TensorFlow."""
    from workbench.engine.tensorflow import support

    return support


def test_all_threads_are_kept_to_the_share_and_let_go_again(support):
    allowed = sorted(os.sched_getaffinity(0))
    go, end = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (go.set(), end.wait(30)))
    other.start()
    go.wait(30)
    try:
        seen = []
        for position in range(len(allowed)):
            with support.limited(len(allowed), len(allowed), position):
                seen.append(os.sched_getaffinity(0))
                assert os.sched_getaffinity(other.native_id) == seen[-1]
        assert seen == [{core} for core in allowed]
        assert sorted(os.sched_getaffinity(other.native_id)) == allowed
    finally:
        end.set()
        other.join()


@pytest.mark.parametrize(
    ("more", "workers"), [(0, 1), (0, 1000), (1, 2)], ids=["alone", "too many", "quota"]
)
def test_who_cannot_have_cores_of_its_own_is_not_limited(support, more, workers):
    allowed = os.sched_getaffinity(0)
    with support.limited(len(allowed) + more, workers, 0):
        assert os.sched_getaffinity(0) == allowed
