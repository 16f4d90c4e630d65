"""A run in words."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from fake_run import empty_snapshot, fake_pipeline, fake_snapshot

from workbench.history.snapshot import Curve
from workbench.shared.events import EVENTS, Healed
from workbench.views import text
from workbench.views.live.frames import make_head

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (0.412345, "0.412"), (12.345, "12.3"), (999.4, "999"), (999.96, "1k"),
        (1234, "1.23k"), (2_500_000, "2.50M"), (3e9, "3G"), (1.5e-5, "1.50e-05"), (-0.5, "-0.5"),
        (9.999, "10.0"), (NAN, "–"), (None, "–"), (float("inf"), "–"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value, shown):
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.34, "340 ms"), (12.34, "12.3 s"), (59.97, "1:00"), (245, "4:05"), (3723, "1:02:03")],
)
def test_durations_are_written_for_people(seconds, shown):
    assert text.duration(seconds) == shown


def test_the_report_holds_the_headline_a_row_per_worker_and_the_loss():
    shot = fake_snapshot(4, 120, extra=True, notes=("global batch 64 = 4 x 16",))
    report = text.report(shot)
    assert report.startswith("base · mirrored · ")
    assert "step 120 of 400" in report
    assert "48 ms a" in report
    assert [line.split("  ")[0] for line in report.split("\n") if line.startswith("rank ")][1:] == [
        f"rank {r} · cpu" for r in range(4)
    ]
    assert f"{text.number(shot.loss)}" in report
    assert "▇" in report
    assert "staleness" in report
    assert report.endswith("note: global batch 64 = 4 x 16")


def test_a_run_without_steps_shows_unknown_not_zero():
    report = text.report(empty_snapshot())
    assert "loss –" in report
    assert "throughput – samples/s" in report
    assert "compute share 0" not in report


def test_an_unknown_strategy_has_no_term_and_still_a_title():
    shot = replace(fake_snapshot(), strategy="nonesuch")
    assert text.title(shot) == "base · nonesuch · 4 workers"


def test_a_worker_whose_device_is_not_known_yet_is_its_rank():
    (worker,) = fake_snapshot(1).workers
    assert text.worker_label(replace(worker, device="cuda:0 NVIDIA H200")) == "rank 0 · cuda:0"
    assert text.worker_label(replace(worker, device="")) == "rank 0"


def test_a_worker_on_another_machine_is_named_with_its_host():
    shot = fake_snapshot(2)
    workers = [replace(one, host="xh1", device="cpu") for one in shot.workers]
    assert text.worker_label(workers[1]) == "rank 1 · xh1"
    assert text.worker_label(replace(workers[1], device="cuda:0 A")) == "rank 1 · xh1 · cuda:0"
    assert text.worker_label(replace(workers[1], host="node12.cluster")) == "rank 1 · node12.cl…"
    blame = text.slow(replace(shot, workers=tuple(workers)))
    assert re.fullmatch("rank 1 on xh1 .* 48 ms a step", blame)


def test_with_two_workers_there_is_one_other():
    assert re.fullmatch("rank 1 .* 48 ms a step", text.slow(fake_snapshot(2)))
    assert text.slow(fake_snapshot(2, slow=None)) == ""


def evaluated(*losses, training=(2.0, 1.0)):
    """Return a run of 100 steps, evaluated evenly, whose training loss goes straight down."""
    step = np.linspace(0, 100, 11)
    mean = np.interp(step, (0, 100), training)
    every = 100 // len(losses)
    evals = [{"step": every * (i + 1), "loss": one} for i, one in enumerate(losses)]
    curve = Curve(step, step / 10, mean, mean, mean)
    return replace(fake_snapshot(2, 100, slow=None), evals=evals, loss_curve=curve)


def test_an_eval_loss_that_rises_while_the_training_loss_falls_is_overfitting():
    said = text.overfitting(evaluated(1.0, 0.5, 0.7, 0.9))
    assert "0.5" in said
    assert "step 50" in said
    assert "0.9" in said
    assert said in text.findings(evaluated(1.0, 0.5, 0.7, 0.9))


@pytest.mark.parametrize(
    "shot",
    [
        evaluated(1.0, 0.8, 0.7, 0.6),  # still falls
        evaluated(1.0, 0.5, 0.9),  # one bad value
        evaluated(1.0, 0.5, 0.9, 0.51),  # and down again
        evaluated(1.0, 0.5, 0.7, 0.9, training=(1.0, 2.0)),  # it diverges
        evaluated(0.5, math.nan, 0.9),
        evaluated(0.5, 0.9),
        fake_snapshot(2, 300),  # falls slowly
        fake_snapshot(2, 10),  # never evaluated
    ],
)
def test_other_eval_losses_are_not_overfitting(shot):
    assert text.overfitting(shot) == ""


def test_the_progress_line_says_how_far_and_how_long():
    line = text.progress_line(fake_snapshot(4, 100, total=400))
    assert " 25%|█████               | 100/400 [" in line
    assert "<" in line
    line = text.progress_line(fake_snapshot(4, 100, total=None))
    assert "100 steps [" in line


def test_workers_at_different_steps_are_as_far_as_the_slowest():
    apart = replace(fake_snapshot(4, 100, total=200), least_step=20, done=0.1)
    assert text.progress(apart).endswith(" step 20 and step 100 of 200")
    assert " 10%|" in text.progress_line(apart)
    assert "20/200" in text.progress_line(apart)


def test_a_worker_that_took_more_than_its_part_is_not_shown_beyond_the_total():
    beyond = fake_snapshot(4, 100, total=80)
    assert text.progress(beyond) == "step 100"
    assert make_head(beyond)["fraction"] == 1.0
    assert "<-" not in text.progress_line(beyond)


def test_the_line_is_written_over_and_the_report_follows_it():
    stream = io.StringIO()
    writer = text.LineWriter(stream)
    writer.write(fake_snapshot(step=100, dropped=5))
    writer.write(fake_snapshot(step=110))
    writer.close(fake_snapshot(step=120, state="finished"))
    lines = stream.getvalue().split("\r")
    assert len(lines) == 4
    assert len(lines[2]) >= len(lines[1])
    assert lines[3].split("\n")[1].startswith("base · mirrored")


def test_the_sparkline_goes_from_lowest_to_highest_and_skips_unknown():
    assert text.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert text.sparkline([1, NAN, 1]) == "▁ ▁"
    assert text.sparkline([NAN]) == ""
    assert len(text.sparkline(list(range(1000)), 40)) == 40


def test_the_report_of_a_pipeline_holds_bubbles_and_stages():
    shot = fake_pipeline(3, 120)
    lines = text.report(shot).split("\n")
    heads = next(line for line in lines if line.startswith("worker "))
    assert heads.endswith("bubble  above ideal")
    of = {line.split(" · ")[0]: line.split("  ") for line in lines if line.startswith("rank ")}
    assert [of[f"rank {rank}"][-1].strip() for rank in range(3)] == ["+14 %", "±0 %", "+14 %"]
    at = lines.index("3 stages · 1f1b · 8 microbatches of 32 samples · ideal bubble 20 %")
    assert lines[at + 1].split() == [
        "stage", "worker", "layers", "parameters", "per", "microbatch", "sends",
    ]  # fmt: skip
    assert lines[at + 3].split()[-4:] == ["4.2", "ms", "64.0", "KiB"]
    assert "525,312" in lines[at + 3]


def test_of_many_stages_the_first_ones_are_listed():
    split = fake_pipeline(30, 5).split
    assert len(text.rows(split)) == text.MOST_ROWS + 1
    assert "18 more" in text.rows(split)[-1]
    assert text.sentences(split)[-1] == "And 18 more stages."


def test_who_went_or_came_together_shares_a_label():
    changes = (
        {"event": "healed", "step": 20, "ranks": [2]},
        {"event": "healed", "step": 20, "ranks": [0]},
        {"event": "joined", "step": 31, "ranks": [0]},
        {"event": "of a later version", "step": 40, "ranks": [1]},
    )
    snapshot = replace(fake_snapshot(), changes=changes)
    assert text.change_labels(snapshot) == [
        (20, "ranks 0, 2 died"), (31, "rank 0 joined"), (40, "rank 1 of a later version"),
    ]  # fmt: skip


def test_events_without_ranks_and_replaced_workers_have_words_of_their_own():
    changes = (
        {"event": "left", "step": 10, "ranks": []},
        {"event": "shed", "step": 20, "ranks": [1]},
        {"event": "shed", "step": 30, "ranks": []},
        {"event": "joined", "step": 40, "ranks": [1]},
        {"event": "replaced", "step": 40, "ranks": [1]},
    )
    snapshot = replace(fake_snapshot(), changes=changes)
    found = text.change_labels(snapshot)
    assert [step for step, _ in found] == [10, 20, 30, 40]
    assert ["rank 1" in label for _, label in found] == [False, True, False, True]
    assert "server" in found[0][1]


def test_every_event_of_workers_has_words():
    assert set(text.CHANGES) == {name for name, kind in EVENTS.items() if issubclass(kind, Healed)}


def test_the_report_tells_when_workers_went_and_came():
    changes = (
        {"event": "healed", "step": 60, "ranks": [1], "workers": 2, "seconds": 0.129},
        {"event": "joined", "step": 113, "ranks": [1], "workers": 3, "seconds": 0.099},
    )
    lines = text.report(replace(fake_snapshot(), changes=changes)).splitlines()
    assert [x for x in lines if re.match("step 60   rank 1 died    2 workers .* 129 ms", x)]
    assert [x for x in lines if re.match("step 113  rank 1 joined  3 workers .* 99 ms", x)]


def test_a_worker_that_is_away_is_called_so():
    worker = fake_snapshot().workers[1]
    assert text.worker_label(replace(worker, away=True)) == "rank 1 · away"


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([(10, 30), (60, 30)], [14, 64]),  # right of their marks
        ([(10, 30), (95, 30)], [14, 61]),  # the second has no room before the edge
        ([(10, 30), (20, 30)], [None, 24]),  # the first has no room on either side
        ([(40, 30), (50, 30)], [6, 54]),  # one on each side of a pair
        ([(40, 30), (50, 30), (60, 30)], [6, None, 64]),
    ],
)
def test_labels_stand_beside_their_marks_and_never_on_each_other(marks, expected):
    assert text.change_places(marks, 0, 100) == expected
