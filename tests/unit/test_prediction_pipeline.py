"""A pipeline's step by its schedule's graph."""

from __future__ import annotations

import numpy as np
import pytest
from predicted_runs import made_run

from workbench.catalog.schedules import SCHEDULES, ideal_bubble
from workbench.prediction.pipeline import order_of, pieces_of, step_s
from workbench.prediction.predict import predict

NONE = np.zeros(1)


def microbatches(name: str, workers: int) -> int:
    return 1 if name == "naive" else 3 * workers


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_equal_stages_have_the_bubble_of_the_books(name: str, workers: int) -> None:
    each = SCHEDULES[name].stages or 1
    batches, stages = microbatches(name, workers), each * workers
    order = order_of(name, workers, batches, stages)
    work = pieces_of(np.ones((workers, 1)), name, batches, stages)
    took = step_s(order, stages, workers, work, NONE, held=False)
    ideal = ideal_bubble(name, workers, batches, each)
    assert 1 - 1 / float(took[0]) == pytest.approx(ideal, abs=1e-9)


def test_a_slow_stage_sets_the_pace() -> None:
    order = order_of("1f1b", 3, 12, 3)
    busy = np.array([[1.0], [3.0], [1.0]])
    took = step_s(order, 3, 3, pieces_of(busy, "1f1b", 12, 3), NONE, held=False)
    assert 3.0 < float(took[0]) < 3.0 + 2 * 2.0 / 12 + 1e-9


def test_messages_lengthen_filling_and_draining() -> None:
    order = order_of("gpipe", 4, 8, 4)
    work = pieces_of(np.ones((4, 1)), "gpipe", 8, 4)
    free = step_s(order, 4, 4, work, NONE, held=False)
    sent = step_s(order, 4, 4, work, NONE + 0.01, held=False)
    assert float((sent - free)[0]) == pytest.approx(2 * 3 * 0.01)


def test_a_measured_pipeline_is_predicted_with_more_workers() -> None:
    """Two stages of 0.1 s each; four of half of it, and more microbatches, from the books."""
    steps, busy_s = 60, 0.1
    bubble = ideal_bubble("gpipe", 2, 8, 1)
    length = np.full(steps, busy_s / (1 - bubble))
    run = made_run(
        np.full((steps, 2), busy_s), length, "model_split", bubble=True, sent_bytes=1e3,
        schedule="gpipe", microbatches=8,
    )  # fmt: skip
    found = predict([run], [2, 4])
    two, four = (p.step_s[0] for p in found.points)
    assert two == pytest.approx(float(length[0]), rel=0.02)
    assert four == pytest.approx(busy_s / 2 / (1 - ideal_bubble("gpipe", 4, 8, 1)), rel=0.02)
    assert any("stages" in note for note in found.notes)
