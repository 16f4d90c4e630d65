"""The panel's scaling: the compared runs over workers; a price, published curves, files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_scaling import run_of, strong
from predicted_runs import scaled_runs, summary_of

from workbench.panels import comparison
from workbench.panels.comparison import ComparisonPart
from workbench.panels.model import Panel
from workbench.panels.scaling import ScalingPart
from workbench.views.scaling.published import curves


def made(summary: Any) -> Any:
    return SimpleNamespace(
        name=summary.name, number=1, state="finished", is_over=True, folder=Path(summary.name),
        engines=(0,), summarise=lambda: summary,
        history=SimpleNamespace(rests=False, totals=SimpleNamespace(steps=5)),
        plan=SimpleNamespace(strategy=summary.strategy, recipe=SimpleNamespace(digest="abc")),
    )  # fmt: skip


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> Any:
    panel: Any = Panel(SimpleNamespace(cluster=None), (ComparisonPart, ScalingPart))  # type: ignore[arg-type]
    panel.runs = {}
    monkeypatch.setattr(comparison, "runs", panel.runs)
    monkeypatch.setattr(
        comparison, "compare", lambda *runs: SimpleNamespace(comparison=None, to_wire=dict)
    )
    return panel


def shown(panel: Any) -> Any:
    panel.wire()
    assert panel.settled()
    found = panel.wire()["scaling"]
    assert json.dumps(found, allow_nan=False)
    return found


def add_whole(panel: Any, *runs: Any) -> None:
    """Add runs that can be predicted from."""
    for run in runs:
        known = made(summary_of(run))
        known.history, known.plan = run.history, run.plan
        panel.runs[run.name] = known


def add(panel: Any, *summaries: Any) -> None:
    panel.runs.update({one.name: made(one) for one in summaries})


def test_nothing_is_shown_of_no_runs_and_of_one_number_of_workers(panel: Any) -> None:
    assert (shown(panel)["scaling"], shown(panel)["why"]) == (None, "")
    add(panel, run_of(2, 0.1), run_of(2, 0.1, strategy="sharded"))
    assert shown(panel)["scaling"] is None
    assert "2 workers" in shown(panel)["why"]


def test_the_compared_runs_are_shown_over_workers(panel: Any) -> None:
    add(panel, *strong())
    found = shown(panel)["scaling"]
    assert [row["workers"] for row in found["rows"]] == [1, 2, 4, 8]
    assert found["curves"][0]["law"]["serial"] == pytest.approx(0.2, abs=1e-3)
    assert found["distribute"] is True
    panel.do("comparison.pick", {"run": "mirrored-n8", "on": False})
    assert [row["workers"] for row in shown(panel)["scaling"]["rows"]] == [1, 2, 4]


def test_a_price_is_taken_and_a_wrong_one_is_told(panel: Any) -> None:
    add(panel, *strong())
    assert shown(panel)["scaling"]["rows"][0]["cost"] is None
    panel.do("scaling.price", {"value": "2.5"})
    assert shown(panel)["scaling"]["rows"][0]["cost"] > 0
    panel.do("scaling.price", {"value": "a lot"})
    found = shown(panel)
    assert found["price"] == "a lot"
    assert "above 0" in found["wrong"]
    panel.do("scaling.price", {"value": ""})
    assert shown(panel)["wrong"] == ""
    assert shown(panel)["scaling"]["rows"][0]["cost"] is None


def test_published_curves_come_on_request(panel: Any) -> None:
    add(panel, *strong())
    assert shown(panel)["published"] == []
    panel.do("scaling.published", {"on": True})
    assert [one["name"] for one in shown(panel)["published"]] == [one.name for one in curves()]


def ahead(panel: Any) -> list[int]:
    (curve,) = shown(panel)["scaling"]["curves"]
    return [one["workers"] for one in (curve["predicted"] or {"points": []})["points"]]


def test_predicted_curves_are_there_until_somebody_does_without(panel: Any) -> None:
    add_whole(panel, *scaled_runs((2, 4)))
    assert ahead(panel) == [4, 8, 16]
    assert shown(panel)["predicted"] is True
    panel.do("scaling.predicted", {"on": False})
    assert ahead(panel) == []
    panel.do("scaling.predicted", {"on": True})
    assert ahead(panel) == [4, 8, 16]


def test_while_a_run_goes_on_nothing_is_predicted(panel: Any) -> None:
    queue = SimpleNamespace(busy=True)
    panel.session.cluster = SimpleNamespace(is_busy=True, queue=lambda: queue)
    add_whole(panel, *scaled_runs((2, 4)))
    assert (ahead(panel), shown(panel)["owed"]) == ([], True)
    panel.session.cluster.is_busy = False  # between two runs of a queue
    assert (ahead(panel), shown(panel)["owed"]) == ([], True)
    queue.busy = False
    assert (ahead(panel), shown(panel)["owed"]) == ([4, 8, 16], False)


def test_files_are_made_in_every_form_and_others_are_refused(panel: Any) -> None:
    answers: list[Any] = []

    def reply(value: Any, failed: bool = False) -> None:
        answers.append(None if failed else value)

    panel.do("scaling.export", {"kind": "csv"}, reply)
    assert panel.settled()
    add(panel, *strong())
    shown(panel)
    for kind in ("csv", "doc"):
        panel.do("scaling.export", {"kind": kind}, reply)
        assert panel.settled()
    first, second, third = answers
    assert (first, third) == (None, None)
    assert second["name"] == "scaling.csv"
    assert base64.b64decode(second["data"]).startswith(b"curve,strategy")
    said = [notice["text"] for notice in panel.wire()["panel"]["notices"]]
    assert any("WB-RUN-130" in text for text in said)
    assert any("WB-PLAN-283" in text for text in said)
