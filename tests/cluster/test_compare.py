"""A real pair of runs, read back from disk and compared."""

import csv
import io
import json
import math

import pytest
from needs import need
from notebook_shell import WAIT_S, notebook

import workbench as wb
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FIT = """
import torch
from torch import nn
model = nn.Linear(64, 10)
wb.fit(model, wb.data.synthetic(256, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32, steps=16)
"""


def test_a_pair_that_was_saved_compares_as_it_was_measured(tmp_path):
    with notebook(2) as book:
        runs = [
            session.cluster.run(FIT, strategy=name, name=f"pair-{name}").wait(WAIT_S)
            for name in ("one_device", "mirrored", "parameter_server")
        ]
        loaded = [wb.load(run.save(tmp_path / run.name)) for run in runs]
        shown = wb.compare(*loaded)
        assert shown.to_csv() == wb.compare(*runs).to_csv()
        book.namespace["pair"] = shown
        displays = book.ok("pair").displays
    one, mirrored, server = shown.comparison.rows
    assert set().union(*displays) >= {"image/png", "text/html", "text/plain"}
    # The same weights, the same batches: the same loss, by whatever way.
    assert mirrored.final_loss.mean == pytest.approx(one.final_loss.mean, rel=1e-4)
    assert mirrored.relative == pytest.approx(
        mirrored.samples_per_s.mean / one.samples_per_s.mean, rel=1e-9
    )
    # All of the gradients go through the ring once: 2 (n - 1) / n of 650 float32, by each of 2.
    assert one.sent_step_bytes == 0
    assert mirrored.sent_step_bytes >= 2 * 650 * 4
    assert one.memory_bytes == (2 * 650 * 4,)  # parameters and gradients: SGD keeps nothing
    assert one.staleness is None
    assert mirrored.staleness is None
    assert sum(server.staleness.counts) == 32
    for row in (one, mirrored, server):
        assert sum(v for v in row.shares.values() if math.isfinite(v)) == pytest.approx(1)
    assert any("parameter_server" in note for note in shown.comparison.notes)
    assert shown.comparison.verdict
    assert len(list(csv.DictReader(io.StringIO(shown.to_csv())))) == 3
    assert len(json.dumps(shown.to_wire(), allow_nan=False)) < 200_000
