"""What one worker has comes to another."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from workbench.engine.training.regrouping import NOWHERE, donors_of
from workbench.engine.transport import handover
from workbench.engine.transport.connection import LinkError


class Store:
    """What engines find each other in."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def hand_over(key: bytes, over=lambda: False, receiver_key: bytes | None = None) -> np.ndarray:
    store, into, errors = Store(), np.zeros(100_000, np.uint8), []
    donor = handover.Donor(store, key, "127.0.0.1")

    def take() -> None:
        try:
            handover.take(store, receiver_key or key, 1, lambda about: [into[: about["size"]]])
        except LinkError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        sent = np.arange(100_000, dtype=np.uint32).view(np.uint8)[:100_000]
        donor.give([1], {"size": sent.size}, [sent], over)
    finally:
        donor.close()
        thread.join(20)
    assert not errors, errors
    assert np.array_equal(into, sent)
    return into


def test_what_one_worker_has_comes_to_another() -> None:
    hand_over(b"k" * 32)


def test_a_stranger_is_given_nothing() -> None:
    tries = iter([False] * 5)
    with pytest.raises(LinkError, match="WB-RUN-136"):
        hand_over(b"k" * 32, lambda: next(tries, None) is not False, b"x" * 32)


def test_a_receiver_that_never_comes_is_not_waited_for() -> None:
    donor = handover.Donor(Store(), b"k" * 32, "127.0.0.1")
    try:
        with pytest.raises(LinkError, match="WB-RUN-136"):
            donor.give([1], {}, [], lambda: True)
    finally:
        donor.close()


@pytest.mark.parametrize(
    ("at", "behind", "expected"),
    [
        ([(5, 0, 0)] * 2 + [NOWHERE] * 2, [2, 3], {2: 0, 3: 1}),
        ([NOWHERE] * 2 + [(5, 0, 0)] * 2, [0, 1], {0: 2, 1: 3}),
        ([(5, 4, 0), (5, 0, 0)], [1], {1: 0}),  # it has only to hear of an evaluation
    ],
)
def test_each_takes_over_from_a_holder_of_its_part(at, behind, expected) -> None:
    assert donors_of(at, [rank % 2 for rank in range(len(at))], behind) == expected
