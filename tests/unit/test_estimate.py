"""How long a row of runs takes yet: exact for runs of known speed, rough or open otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.session.queue_state import Pace, QueueState, estimate, units
from workbench.shared.plan import Plan, make_plan


@dataclass(frozen=True)
class Speed:
    """What a fake run takes."""

    setup_s: float
    step_s: float
    steps: int
    teardown_s: float = 0.0

    @property
    def whole_s(self) -> float:
        return self.setup_s + self.step_s * self.steps + self.teardown_s

    def pace_at(self, t_s: float) -> tuple[int, int | None, float, float]:
        """Where it is `t_s` after its start: steps, total, seconds of steps, seconds."""
        steps = min(self.steps, max(0, int((t_s - self.setup_s) / self.step_s)))
        known = self.steps if t_s >= self.setup_s else None
        return steps, known, steps * self.step_s, min(t_s, self.whole_s)


def plan_of(strategy: str, **more: int) -> Plan:
    return make_plan(Recipe("wb.fit()"), strategy, workers=2, overrides=more)


def story(runs: list[tuple[Plan, Speed]], t_s: float) -> QueueState:
    """The row at a moment, when its plans run at these speeds."""
    line = QueueState()
    line.add([plan for plan, _ in runs])
    for _, speed in runs:
        item = line.begin()
        assert item is not None
        if t_s < speed.whole_s:
            item.pace.update(*speed.pace_at(t_s))
            break
        item.pace.update(*speed.pace_at(speed.whole_s))
        line.settle(item, "finished")
        t_s -= speed.whole_s
    return line


FAST, SLOW = Speed(0.5, 0.02, 400, 0.2), Speed(0.8, 0.09, 400, 0.2)
ROWS = {
    "seeds of one strategy": [(plan_of("mirrored", seed=k), FAST) for k in range(6)],
    "one run": [(plan_of("mirrored"), SLOW)],
    "two strategies, the slow one last": [
        *((plan_of("one_device", seed=k), FAST) for k in range(2)),
        *((plan_of("mirrored", seed=k), SLOW) for k in range(2)),
    ],
    "some runs twice as long": [
        (plan_of("mirrored", steps=n, seed=n), Speed(0.5, 0.05, n)) for n in (100, 200, 200, 100)
    ],
    "epochs": [
        (plan_of("mirrored", epochs=n, seed=n), Speed(0.5, 0.05, 50 * n)) for n in (2, 4, 2)
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_at_half_time_it_is_within_a_tenth(name: str) -> None:
    runs = ROWS[name]
    whole_s = sum(speed.whole_s for _, speed in runs)
    left = story(runs, whole_s / 2).remaining
    assert left.seconds == pytest.approx(whole_s / 2, rel=0.1)
    assert not left.rough


@pytest.mark.parametrize("name", ROWS)
def test_it_runs_out_with_the_row(name: str) -> None:
    runs = ROWS[name]
    whole_s = sum(speed.whole_s for _, speed in runs)
    assert story(runs, whole_s).remaining.seconds == 0.0
    late = story(runs, whole_s * 0.95).remaining.seconds
    assert late is not None
    assert late < 0.1 * whole_s


def test_progress_only_grows_in_every_row() -> None:
    for runs in ROWS.values():
        whole_s = sum(speed.whole_s for _, speed in runs)
        shares = [story(runs, whole_s * k / 50).progress for k in range(51)]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_before_the_first_step_nothing_is_known() -> None:
    runs = ROWS["seeds of one strategy"]
    assert story(runs, 0.1).remaining.seconds is None


def test_a_strategy_that_was_never_seen_makes_it_rough() -> None:
    runs = [(plan_of("one_device"), FAST), (plan_of("mirrored"), SLOW)]
    left = story(runs, 5.0).remaining
    assert left.rough
    assert left.seconds == pytest.approx(FAST.whole_s - 5.0 + FAST.whole_s, rel=0.1)


def test_a_run_without_known_length_is_told_from_those_before() -> None:
    line = QueueState()
    line.add([plan_of("mirrored", seed=k) for k in range(2)])
    first = line.begin()
    assert first is not None
    first.pace.update(50, None, 5.0, 6.0)  # a loop of one's own: no total
    assert line.remaining.seconds is None
    assert first.pace.fraction == 0.0
    line.settle(first, "finished")
    second = line.begin()
    assert second is not None
    second.pace.update(10, None, 1.0, 2.0)
    assert line.remaining.seconds == pytest.approx(4.0)


def test_one_that_takes_longer_than_thought_has_nothing_left_not_less() -> None:
    late = Pace(elapsed_s=9.0)
    kind = ("mirrored",)
    assert estimate([(kind, None, Pace(10, 10, 4.0, 5.0))], (kind, None, late), []).seconds == 0.0


def test_a_run_that_does_steps_again_does_not_fall_back() -> None:
    pace = Pace()
    pace.update(80, 100, 8.0, 9.0)
    pace.update(40, 100, 4.0, 12.0)
    assert pace.fraction == 0.8


def test_steps_win_over_epochs() -> None:
    assert units(plan_of("mirrored", epochs=3, steps=10)) == ("steps", 10)
    assert units(plan_of("mirrored", epochs=3)) == ("epochs", 3)
    assert units(plan_of("mirrored")) is None
