"""What real runs tell a class: a step as it was, who waited for whom, what if, calibration."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, notebook, soon

import workbench as wb
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

ENDLESS = """
import torch
from torch import nn
model = nn.Linear(64, 10)
wb.fit(model, wb.data.synthetic(256, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32, steps=1_000_000)
"""
GRADIENT_BYTES = (64 * 10 + 10) * 4
SLOW_S = 0.050


PAGE = Path(__file__).resolve().parents[2] / "docs" / "teaching.md"


@pytest.fixture(scope="module")
def book():
    with notebook(2) as book:
        yield book


@pytest.fixture
def cluster(book):
    return session.cluster


@pytest.fixture
def run(cluster):
    run = cluster.run(ENDLESS, strategy="mirrored", options={"allreduce": "ring"}, name="lesson")
    yield run
    run.stop()
    assert soon(lambda: run.is_over)


def steps(run):
    return run.history.totals.steps


def test_a_single_step_in_a_pause_is_shown_as_it_was(run):
    assert soon(lambda: steps(run) >= 3)
    run.pause()
    assert soon(lambda: run.state == "paused")
    assert soon(lambda: run.step_picture().data.step == run.history["step"].max())
    before = run.step_picture().data
    run.step()
    assert soon(lambda: run.step_picture().data.step == before.step + 1)
    picture = run.step_picture()
    # A ring of two: each sends both halves once, one in either phase.
    assert dict(picture.data.arrow_bytes) == {
        (1, 0): GRADIENT_BYTES / 2, (1, 1): GRADIENT_BYTES / 2,
        (2, 0): GRADIENT_BYTES / 2, (2, 1): GRADIENT_BYTES / 2,
    }  # fmt: skip
    for worker in picture.data.workers:
        assert worker.sent_bytes == GRADIENT_BYTES
        assert worker.step_s == pytest.approx(np.nansum(worker.parts_s), rel=1e-3)
    json.dumps(picture.to_wire(), allow_nan=False)
    assert run.step_picture(before.step).data.step == before.step
    run.resume()


@pytest.mark.timing
def test_without_its_straggler_a_run_is_as_fast_as_before_the_fault(run):
    assert soon(lambda: steps(run) >= 60)
    clean_end = steps(run)
    run.inject(f"slow=1:{SLOW_S * 1e3:g}ms")

    def slow_steps():
        step, rank, wait = run.history.together("step", "rank", "sync_wait_s").values()
        return step[(step > clean_end) & (rank == 0) & (wait > 0.8 * SLOW_S)]

    assert soon(lambda: len(slow_steps()) >= 60)
    first = int(slow_steps()[0]) + 1
    run.stop()
    run.wait(WAIT_S)
    found = run.what_if(first=first)
    clean = run.what_if(1, first=20, last=clean_end - 1)
    assert found.without == 1
    assert np.median(found.step_s) - np.median(clean.step_s) == pytest.approx(SLOW_S, rel=0.2)
    # What is left of the fault once it is taken away, in units of the fault.
    rest = (np.median(found.without_s) - np.median(clean.step_s)) / SLOW_S
    assert abs(rest) < 0.15
    waits = run.blame(first=first).mean_s / SLOW_S
    assert waits[0, 1] == pytest.approx(1, abs=0.2)
    assert waits[1, 0] < 0.2
    assert run.blame().worst == 1


@pytest.mark.timing
def test_a_calibration_says_what_it_did_and_what_it_cost(cluster):
    found = wb.calibrate(cluster)
    assert found.passed, found
    assert abs(found.error_ms) / found.injected_ms < 0.1
    assert found.spread_ms / found.injected_ms < 0.1
    assert abs(found.residual) < 0.02
    assert found.frames >= 3
    assert 0 < found.chart_cpu < 0.2
    for words in ("50 ms", "delayed worker 1", "of a core", "±"):
        assert words in repr(found)
    assert set(found._repr_mimebundle_()) == {"text/html", "text/plain"}
    json.dumps(found.to_wire(), allow_nan=False)


def test_the_page_on_teaching_runs_as_it_stands(book):
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        magic = block.startswith("%%")
        for cell in [block] if magic else block.splitlines():
            book.ok(cell.replace("--name", "--plot off --name"))
    run = wb.runs["lesson"]
    assert run.what_if().without == 1
    assert run.blame(first=10, last=19).steps.tolist() == [10, 10]
