"""What `wb.fit` is passed is checked before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workbench import catalog
from workbench.engine.context import RunContext, require, set_current
from workbench.engine.telemetry.recorder import Recorder
from workbench.engine.telemetry.step_gate import FaultInjector, Gate
from workbench.engine.training import fit_arguments
from workbench.engine.training.notes import log, options
from workbench.errors import FitError, RunError
from workbench.shared.events import Topic
from workbench.shared.protocol import RunSpec


def make_context(events: list[Any] | None = None, **spec: Any) -> RunContext:
    base = RunSpec(mode="run", rank=0, world_size=2, ranks=(0, 1), strategy="mirrored", run_id="r1")
    said = events if events is not None else []
    return RunContext(
        replace(base, **spec), Recorder(1, 0), Gate(), FaultInjector(0),
        lambda event: said.append((event.name, event.to_wire())),
    )  # fmt: skip


def test_the_line_wins_over_the_cell() -> None:
    context = make_context(overrides={"batch_size": 32, "seed": 4})
    counts = fit_arguments.check_counts(context, 64, 3, None, 0)
    assert counts == fit_arguments.Counts(32, 3, None, 4)


def test_epochs_on_the_line_replace_steps_in_the_cell() -> None:
    context = make_context(overrides={"epochs": 2})
    assert fit_arguments.check_counts(context, 64, 1, 500, 0).steps is None
    context = make_context(overrides={"epochs": 2, "steps": 9})
    assert fit_arguments.check_counts(context, 64, 1, 500, 0).steps == 9


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "3"])
def test_counts_are_whole_and_positive(bad: Any) -> None:
    for values in ((bad, 1, None), (8, bad, None), (8, 1, bad)):
        with pytest.raises(FitError, match="WB-FIT-014"):
            fit_arguments.check_counts(make_context(), *values, 0)


def test_a_batch_is_compared_with_the_workers() -> None:
    with pytest.raises(FitError, match=r"WB-FIT-016[\s\S]*2"):
        fit_arguments.check_batch(1, make_context())
    fit_arguments.check_batch(2, make_context())


def test_features_come_from_the_catalog() -> None:
    entry = replace(catalog.lookup("mirrored"), supports=frozenset({"metrics"}), ways=("fit",))
    fit_arguments.check_supported(entry, "fit", ["metrics"])
    with pytest.raises(FitError, match=r"clip_norm, compile.*WB-FIT-027"):
        fit_arguments.check_supported(entry, "fit", ["compile", "clip_norm"])
    with pytest.raises(FitError, match="WB-FIT-027") as caught:
        fit_arguments.check_supported(entry, "fit", ["own_data", "clip_norm"])
    step = str(caught.value.next_step)
    assert "without clip_norm and with" in step
    able = [e.name for e in catalog.strategies("torch") if e.supports >= {"own_data", "clip_norm"}]
    assert able
    assert all(name in step for name in able)
    with pytest.raises(FitError, match=r"wb\.prepare.*WB-FIT-026"):
        fit_arguments.check_supported(entry, "prepare", [])


def test_callbacks_are_functions_or_objects() -> None:
    class Both:
        def on_step_end(self, step: int, logs: dict[str, float]) -> None: ...

        def on_train_end(self, logs: dict[str, float]) -> None: ...

    found = fit_arguments.Callbacks.of([Both(), print])
    assert (len(found.step_end), len(found.epoch_end), len(found.train_end)) == (2, 0, 1)
    assert fit_arguments.Callbacks.of(print).step_end == [print]
    with pytest.raises(FitError, match="WB-FIT-029"):
        fit_arguments.Callbacks.of([3])


def test_a_model_of_an_earlier_run_is_pointed_out_once_per_run() -> None:
    class Model: ...

    model, events = Model(), []
    fit_arguments.warn_if_trained(make_context(events, run_id="a"), model)
    fit_arguments.warn_if_trained(make_context(events, run_id="a"), model)
    assert events == []
    fit_arguments.warn_if_trained(make_context(events, run_id="b"), model)
    assert [name for name, _ in events] == ["warning"]
    assert events[0][1]["topic"] == Topic.TRAINED_BEFORE


def test_outside_a_run_the_magic_to_use_is_named() -> None:
    with pytest.raises(RunError, match="WB-RUN-007"):
        require("wb.fit")


def test_log_takes_numbers_at_the_step_under_way() -> None:
    events: list[Any] = []
    context = make_context(events)
    context.step = 12
    set_current(context)
    try:
        log(lr=0.1, n=3)
        assert events == [("log", {"rank": 0, "step": 12, "values": {"lr": 0.1, "n": 3.0}})]
        with pytest.raises(FitError, match=r"name.*WB-FIT-008"):
            log(name="x")
    finally:
        set_current(None)


def test_options_say_what_the_line_says_and_note_that_they_were_read() -> None:
    context = make_context(overrides={"epochs": 4}, options={"bucket_mb": 1.0})
    assert options.get("epochs", 7) == 7
    set_current(context)
    try:
        assert not context.options_read
        assert options.epochs == 4
        assert options.bucket_mb == 1.0
        assert context.options_read
        with pytest.raises(AttributeError, match="did you mean 'epochs'"):
            _ = options.epoch
    finally:
        set_current(None)
