"""Predictions of runs whose truth is known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predicted_runs import GRADIENTS_BYTES, draw_own, made_run, ring_run

from workbench.errors import PlanError, RunError
from workbench.prediction import model
from workbench.prediction.link import parse_link
from workbench.prediction.predict import Prediction, _samples, predict
from workbench.prediction.probe import Probe
from workbench.prediction.variants import rank
from workbench.prediction.work import Work
from workbench.views.explain import prediction as view

A, B = 0.004, 1e-8
SIMULATED = ("bandwidth=100MB/s", "latency=4ms")


def true_ring(workers: int, rng: np.random.Generator) -> float:
    """Return the mean step of a ring of so many workers."""
    own = draw_own(rng, 4000, workers).max(axis=1).mean()
    return float(own + 2 * (workers - 1) * (A + B * GRADIENTS_BYTES / workers))


def point(found: Prediction, workers: int) -> tuple[float, float, float]:
    return next(p.step_s for p in found.points if p.workers == workers)


def test_a_simulated_link_is_known_and_the_slowest_of_many_is_drawn() -> None:
    rng = np.random.default_rng(1)
    run = ring_run(rng, A, B, faults=SIMULATED)
    found = predict([run], [2, 4, 16, 64], scaling="weak")
    for workers in (2, 4, 16, 64):
        middle, low, high = point(found, workers)
        truth = true_ring(workers, rng)
        assert low <= truth <= high
        assert middle == pytest.approx(truth, rel=0.06)
        shares = next(p.share for p in found.points if p.workers == workers)
        assert sum(shares) == pytest.approx(1.0)
    json.dumps(found.to_wire(), allow_nan=False)


def test_two_sizes_settle_messages_and_bytes_of_a_link_that_is_not_known() -> None:
    rng = np.random.default_rng(2)
    whole = ring_run(rng, A, B)
    half = ring_run(rng, A, B, size_bytes=GRADIENTS_BYTES / 2, compress="fp16", name="half")
    found = predict([whole, half], 32, scaling="weak")
    _, low, high = point(found, 32)
    truth = true_ring(32, rng)
    assert low <= truth <= high
    assert high - low < 0.5 * truth
    assert not any("-o compress=fp16" in note for note in found.notes)


def test_one_size_leaves_open_what_a_message_costs_and_says_so() -> None:
    rng = np.random.default_rng(3)
    found = predict([ring_run(rng, A, B)], 32, scaling="weak")
    middle, low, high = point(found, 32)
    assert low <= true_ring(32, rng) <= high
    assert high - low > 0.5 * middle
    assert any("-o compress=fp16" in note for note in found.notes)


def test_a_link_without_a_latency_names_the_cost_of_a_message_that_it_keeps() -> None:
    rng = np.random.default_rng(3)
    whole, over_simulated = ring_run(rng, A, B), ring_run(rng, A, B, faults=SIMULATED)
    half = ring_run(rng, A, B, size_bytes=GRADIENTS_BYTES / 2, compress="fp16", name="half")

    def kept_ms(*runs: Any) -> list[float]:
        found = predict(runs, 8, link="1GB/s").link
        assert "1 GB/s" in found
        return [float(number) for number in re.findall(r"([\d.e-]+) (?:to|ms)", found)]

    low, high = kept_ms(whole)
    assert low < 1e3 * A < high
    assert kept_ms(whole, half) == [pytest.approx(1e3 * A, rel=0.2)]
    assert kept_ms(over_simulated) == [4.0]
    assert predict([whole], 8, link="1GB/s 3ms").link == parse_link("1GB/s 3ms").text


def test_a_given_link_takes_the_place_of_the_measured_one() -> None:
    rng = np.random.default_rng(4)
    found = predict([ring_run(rng, A, B)], 8, scaling="weak", link="8Mbit", latency="1ms")
    own = draw_own(rng, 4000, 8).max(axis=1).mean()
    truth = own + 14 * (1e-3 + 1e-6 * GRADIENTS_BYTES / 8)
    assert point(found, 8)[0] == pytest.approx(truth, rel=0.05)


def test_the_interval_holds_nine_of_ten_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn over and over: two workers are seen, a run of sixteen is measured.

    Here the model leaves nothing out, so nothing is added for it.
    """
    monkeypatch.setattr(model, "UNEXPLAINED", 0.0)
    monkeypatch.setattr(model, "UNEXPLAINED_PER_DOUBLING", 0.0)
    held = []
    for seed in range(40):
        rng = np.random.default_rng(100 + seed)
        found = predict([ring_run(rng, A, B, faults=SIMULATED)], 16, scaling="weak", steps=30)
        own = draw_own(rng, 30, 16).max(axis=1).mean()
        truth = own + 30 * (A + B * GRADIENTS_BYTES / 16)
        _, low, high = point(found, 16)
        held.append(low <= truth <= high)
    assert 0.8 <= np.mean(held) <= 0.99


def test_two_batches_settle_how_own_work_grows_with_the_samples() -> None:
    rng = np.random.default_rng(5)
    double = draw_own(rng, 120, 2) * 0.20 / 0.12
    runs = [
        ring_run(rng, A, B, samples=8, faults=SIMULATED),
        made_run(double, double.max(axis=1) + 2 * (A + B * 5e5), allreduce="ring", samples=16,
                 faults=SIMULATED, name="sixteen"),
    ]  # fmt: skip
    one = predict(runs[:1], 4)
    both = predict(runs, 4)
    # Eight samples take 0.12 s and sixteen 0.20 s, so four take 0.08 s.
    own_s = draw_own(rng, 4000, 4).max(axis=1).mean() * 0.08 / 0.12
    truth = own_s + 6 * (A + B * GRADIENTS_BYTES / 4)
    assert point(both, 4)[0] == pytest.approx(truth, rel=0.06)
    assert np.ptp(point(both, 4)) < 0.5 * np.ptp(point(one, 4))
    assert any("--batch-size" in note for note in one.notes)
    assert not any("--batch-size" in note for note in both.notes)


def test_what_all_workers_have_in_common_is_not_drawn_for_each() -> None:
    rng = np.random.default_rng(6)
    together = 0.1 + 0.05 * rng.random((200, 1)) + 0.001 * rng.random((200, 2))
    apart = 0.1 + 0.05 * rng.random((200, 2))
    common, alone = Work.of(together), Work.of(apart)
    assert common.common > 0.9
    assert alone.common == 0.0
    slowest = [w.draw(rng, 20, 50, 32).max(axis=2).mean() for w in (common, alone)]
    assert slowest[0] == pytest.approx(0.126, rel=0.03)
    assert slowest[1] == pytest.approx(0.15, rel=0.03)


def test_workers_that_differ_are_drawn_from_those_seen() -> None:
    rng = np.random.default_rng(7)
    own = np.array([0.1, 0.15]) + 0.01 * rng.random((100, 2))
    work = Work.of(own)
    assert not work.alike
    assert Work.of(0.1 + 0.01 * rng.random((100, 2))).alike
    drawn = work.draw(rng, 60, 10, 8, again=False).mean(axis=1)
    assert {round(float(v), 2) for v in drawn.ravel()} <= {0.10, 0.11, 0.15, 0.16}


def test_a_worker_slowed_by_a_fault_stays_the_only_one() -> None:
    rng = np.random.default_rng(8)
    own = draw_own(rng, 120, 2)
    own[:, 1] += 0.1
    run = made_run(own, own.max(axis=1) + 2 * (A + B * 5e5), allreduce="ring",
                   faults=(*SIMULATED, "slow=1:100ms"))  # fmt: skip
    truth = 0.1 + float(draw_own(rng, 4000, 1).mean()) + 14 * (A + B * GRADIENTS_BYTES / 8)
    middle, _, _ = point(predict([run], 8, scaling="weak"), 8)
    assert middle == pytest.approx(truth, rel=0.06)
    strong, _, _ = point(predict([run], 8, scaling="strong"), 8)  # the delay is not divided by 4
    assert 0.1 < strong < middle
    without = rank(run, [{"straggler": None}])
    assert without.variants[0].speedup[0] > 1.3
    twice = made_run(own, own.max(axis=1) + 2 * (A + B * 5e5), allreduce="ring",
                     faults=(*SIMULATED, "slow=1:60ms", "slow=1:40ms"))  # fmt: skip
    assert point(predict([twice], 8, scaling="strong"), 8)[0] == pytest.approx(strong)


@pytest.mark.parametrize("sizes", [1, 2])
def test_a_random_delay_of_a_fault_is_not_divided(sizes: int) -> None:
    rng = np.random.default_rng(8)
    runs = []
    for part in (1.0, 0.5)[:sizes]:
        own = 0.01 * part + rng.uniform(0.0, 0.1, (300, 2))
        run = made_run(own, own.max(axis=1) + 2 * (A + B * 5e5), allreduce="ring",
                       samples=int(64 * part), faults=(*SIMULATED, "jitter=100ms"))  # fmt: skip
        runs.append(run)
    truth = 0.0025 + 0.1 * 8 / 9 + 14 * (A + B * GRADIENTS_BYTES / 8)
    middle, _, _ = point(predict(runs, 8, scaling="strong"), 8)
    assert middle == pytest.approx(truth, rel=0.05)


def changed(run: Any, **changes: Any) -> float:
    return rank(run, [changes]).variants[0].step_s[0]


def test_changes_are_what_such_a_run_takes() -> None:
    rng = np.random.default_rng(9)
    run = ring_run(rng, A, B, workers=4, faults=SIMULATED, steps=200)
    own = draw_own(rng, 4000, 4).max(axis=1).mean()
    assert changed(run, link="10MB/s") == pytest.approx(own + 6 * (A + 2.5e-2), rel=0.03)
    assert changed(run, link="10MB/s", latency="1ms") == pytest.approx(own + 6 * 2.6e-2, rel=0.03)
    assert changed(run, compress="fp16") == pytest.approx(own + 6 * (A + B * 1.25e5), rel=0.03)
    doubling = own + 2 * (A + B * GRADIENTS_BYTES)
    assert changed(run, allreduce="recursive_doubling") == pytest.approx(doubling, rel=0.03)
    served = own + 2 * (A + B * GRADIENTS_BYTES)
    assert changed(run, strategy="central_storage") == pytest.approx(served, rel=0.03)


def test_variants_are_ranked_and_shown() -> None:
    rng = np.random.default_rng(10)
    run = ring_run(rng, A, B, workers=4, faults=SIMULATED)
    found = view.what_if(run, [{"link": "1MB/s"}, {"link": "1GB/s"}, {"compress": "fp16"}], {})
    assert [v.text for v in found.variants] == ["link=1GB/s", "compress=fp16", "link=1MB/s"]
    assert found.variants[0].speedup[0] > 1 > found.variants[-1].speedup[0]
    assert "link=1GB/s" in found.sentence()
    assert "<svg" in found.html()
    json.dumps(found.to_wire(), allow_nan=False)


def test_a_prediction_shows_itself(tmp_path: Any) -> None:
    run = ring_run(np.random.default_rng(11), A, B, faults=SIMULATED)
    found = view.predict(run, [4, 64], scaling="weak")
    assert "With 64 workers" in found.sentence()
    for shown in (found.svg(), found.html()):
        assert "<svg" in shown
    assert "less certain" in found.text()
    assert any("extrapolated" in note for note in found.notes)
    lines = found.to_csv(tmp_path / "found.csv").splitlines()
    assert [line.split(",")[:2] for line in lines] == [
        ["kind", "workers"], ["measured", "2"], ["predicted", "4"], ["predicted", "64"],
    ]  # fmt: skip
    assert (tmp_path / "found.csv").read_text().splitlines() == lines
    one = view.predict(run, 1, scaling="weak")
    assert one.points[0].share == (1.0, 0.0, 0.0)
    assert "<svg" in one.svg()


def test_the_figure_has_a_ring_for_what_was_predicted_and_a_dot_for_what_was_measured() -> None:
    run = ring_run(np.random.default_rng(11), A, B, faults=SIMULATED)
    near, far = (view.predict(run, counts, scaling="weak") for counts in ([4, 8], [4, 8, 64]))
    for found, rings in ((near, 2), (far, 3)):
        drawn = found.canvas().svg()
        circles = re.findall(r'<circle class="(k-\w+ [sf])"[^>]*r="([\d.]+)"', drawn)
        assert circles == [("k-compute s", "5.0")] * rings + [("k-weights f", "3")]
        assert drawn.count('fill-opacity=".07"') == (rings == 3)
        words = re.findall(r">([^<>]+)</text>", drawn)
        assert {"samples/s", "workers", "2", "4", "8"} <= set(words)
        assert any("Shaded" in line for line in words) == (rings == 3)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(100, 3000, [100, 300, 1000, 3000]), (37, 9000, [100, 300, 1000, 3000]),
     (10, 20, [10, 15, 20]), (1, 1e6, [1, 100, 1e4, 1e6])],
)  # fmt: skip
def test_ticks_are_round_and_few(low: float, high: float, ticks: list[float]) -> None:
    assert view._round(low, high) == pytest.approx(ticks)
    assert len(view._round(1.1, 1.5)) == 4


def test_notes_stand_once_on_a_page_and_in_a_file_of_its_own() -> None:
    found = view.predict(ring_run(np.random.default_rng(11), A, B), [4, 64], scaling="weak")
    page, file = (re.sub(r"(?s)<desc.*?</desc>", "", text) for text in (found.html(), found.svg()))
    (wide,) = [note for note in found.notes if note.startswith("No run with 64")]
    assert page.count(wide[:30]) == 1
    assert page.count("With 64 workers") == 1
    assert file.count(wide[:30]) == 1


def test_what_if_names_the_colours_of_its_bars() -> None:
    run = ring_run(np.random.default_rng(11), A, B, faults=SIMULATED)
    drawn = view.what_if(run, [{"link": "1GB/s"}], {}).canvas().svg()
    for cause, kind in (("own work", "compute"), ("waiting", "wait"), ("messages", "weights")):
        assert re.search(rf'<rect class="k-{kind} f"[^>]*width="9" height="9"/><text[^>]*>{cause}<',
                         drawn)  # fmt: skip


def test_what_cannot_be_predicted_is_said() -> None:
    rng = np.random.default_rng(12)
    run = ring_run(rng, A, B, faults=SIMULATED)
    alone = made_run(draw_own(rng, 60, 1), np.full(60, 0.2), "one_device", sent_bytes=0.0)
    for code, error, asked in (
        ("WB-RUN-131", RunError, lambda: predict([ring_run(rng, A, B, steps=12)], 4)),
        ("WB-RUN-134", RunError, lambda: predict([alone], 4, strategy="mirrored")),
        ("WB-RUN-135", RunError,
         lambda: predict([alone], 4, strategy="mirrored", gradient_bytes=1e6)),
        ("WB-PLAN-286", PlanError, lambda: predict([run], 4, link="0GB/s")),
        ("WB-PLAN-285", PlanError, lambda: predict([run], 4, link="fast")),
        ("WB-PLAN-287", PlanError, lambda: predict([run], 4, link="1GB/s soon")),
        ("WB-PLAN-298", PlanError, lambda: predict([run], 17)),
        ("WB-PLAN-288", PlanError, lambda: predict([run], 4, strategy="tensor_parallel")),
        ("WB-PLAN-291", PlanError, lambda: predict([], 4)),
        ("WB-PLAN-292", PlanError, lambda: predict([run, ring_run(rng, A, B)], 4)),
        ("WB-PLAN-293", PlanError, lambda: predict([run], [4, 0])),
        ("WB-PLAN-294", PlanError, lambda: predict([run], [])),
        ("WB-PLAN-299", PlanError,
         lambda: predict([run], 4, options={"compress": "powersgd:2"})),
        ("WB-PLAN-091", PlanError, lambda: predict([run], 4, per_host=0)),
        ("WB-PLAN-310", PlanError, lambda: predict([run], 4, gradient_bytes=-1.0)),
        ("WB-PLAN-300", PlanError, lambda: rank(run, [{}])),
        ("WB-PLAN-302", PlanError, lambda: rank(run, [{"bandwith": 3}])),
        ("WB-PLAN-309", PlanError, lambda: rank(run, [{"straggler": None}])),
    ):  # fmt: skip
        with pytest.raises(error, match=code):
            asked()


def test_one_device_with_a_link_and_a_size_is_enough() -> None:
    rng = np.random.default_rng(13)
    alone = made_run(own := draw_own(rng, 120, 1), own[:, 0], "one_device", sent_bytes=0.0)
    found = predict([alone], 4, strategy="mirrored", options={"allreduce": "ring"},
                    gradient_bytes=1e6, link="80Mbit 1ms", scaling="weak")  # fmt: skip
    truth = draw_own(rng, 4000, 4).max(axis=1).mean() + 6 * (1e-3 + 0.25e6 * 1e-7)
    assert point(found, 4)[0] == pytest.approx(truth, rel=0.05)
    assert any("one worker" in note for note in found.notes)


@given(
    rate=st.floats(0.001, 999), unit=st.sampled_from(["K", "M", "G", "T", ""]),
    wait=st.integers(0, 999),
)  # fmt: skip
def test_bits_are_an_eighth_of_bytes(rate: float, unit: str, wait: int) -> None:
    amount = f"{rate:.3f}"
    if not float(amount):
        return
    bits, size = parse_link(f"{amount}{unit}bit"), parse_link(f"{amount}{unit}B/s {wait}us")
    assert size.bytes_per_s == pytest.approx(8 * bits.bytes_per_s)
    assert size.latency_s == pytest.approx(wait * 1e-6)


@settings(max_examples=15, deadline=None)
@given(workers=st.integers(2, 24), message_ms=st.floats(0.01, 20), seed=st.integers(0, 99))
def test_a_slower_link_is_never_faster(workers: int, message_ms: float, seed: int) -> None:
    run = ring_run(np.random.default_rng(seed), A, B, steps=40)
    fast, slow = (
        predict([run], workers, scaling="weak", steps=10, link=f"{rate}MB/s",
                latency=f"{message_ms:.3f}ms").points[0]
        for rate in (100, 10)
    )  # fmt: skip
    for found in (fast, slow):
        middle, low, high = found.step_s
        assert 0 < low <= middle <= high
    assert fast.step_s[0] < slow.step_s[0]


def test_runs_that_were_measured_since_stand_beside_the_prediction() -> None:
    rng = np.random.default_rng(14)
    found = view.predict(ring_run(rng, A, B, faults=SIMULATED), [4, 8], scaling="weak")
    four = ring_run(rng, A, B, workers=4, faults=SIMULATED, name="four")
    shown = found.beside(four)
    assert "measured: four, step time inside" in shown.text()
    assert [m.workers for m in shown.measured] == [2, 4]
    assert len(found.measured) == 1
    divided = ring_run(rng, A, B, workers=4, samples=4, faults=SIMULATED, name="divided")
    assert "measured: divided" in found.beside(divided).text()
    drawn = found.beside(four, divided).canvas().svg()
    assert drawn.count('fill-opacity=".45"') == 1
    assert "Faint" in drawn
    other = made_run(draw_own(rng, 60, 4), np.full(60, 0.3), "gossip", name="other")
    with pytest.raises(PlanError, match="WB-PLAN-311"):
        found.beside(other)


def test_a_small_last_batch_does_not_lower_the_number_of_workers() -> None:
    probe = Probe.of(ring_run(np.random.default_rng(3), A, B))
    uneven = replace(probe, samples=0.98 * probe.batch / probe.workers)  # the mean over an epoch
    most = int(probe.batch)
    assert _samples(uneven, most, "strong", None) == pytest.approx(0.98)
    with pytest.raises(PlanError, match="WB-PLAN-298"):
        _samples(uneven, most + 1, "strong", None)


def test_a_run_without_waits_ends_with_its_slowest_worker() -> None:
    own = draw_own(np.random.default_rng(5), 60, 2) * (0.04, 0.4)
    step_s = own + 0.002
    run = made_run(own, step_s, "parameter_server", sent_bytes=1e6, joined=False)
    truth = 2 * 60 * 8 / step_s.sum(axis=0).max()
    (point,) = predict([run], [2]).points
    assert point.samples_per_s[0] == pytest.approx(truth, rel=0.05)
    assert point.step_s[0] == pytest.approx(step_s.mean(), rel=0.05)
    found = rank(run, [{"straggler": None}])
    assert found.samples_per_s == pytest.approx(truth, rel=0.05)
    freed = 2 * 60 * 8 / step_s.sum(axis=0).min()
    assert found.variants[0].speedup[0] == pytest.approx(freed / truth, rel=0.15)


def test_equal_workers_without_waits_are_not_called_unequal() -> None:
    own = draw_own(np.random.default_rng(5), 240, 4)
    run = made_run(own, own + 0.002, "parameter_server", sent_bytes=1e6, joined=False)
    truth = 4 * 240 * 8 / (own + 0.002).sum(axis=0).max()
    (point,) = predict([run], [4]).points
    assert point.samples_per_s[0] == pytest.approx(truth, rel=0.02)
