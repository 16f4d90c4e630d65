"""The walks of CONTRIBUTING.md: applied to a copy of the package, their lines do what is said.

A hunk has no line numbers: its lines without `+` stand in the file once, and what stands there
afterwards are those without `-`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from doc_pages import REPOSITORY
from needs import need

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
MOST = {
    "Add a strategy": 2,
    "Add a measured number": 4,
    "Add a flag of `%%distributed`": 3,
    "Add a plot": 2,
}
"""How many places each may touch."""
FILE = re.compile(r"^--- (\S+)\n\+\+\+ b/(\S+)\n", re.MULTILINE)


def walk(title: str, page: str = PAGE) -> list[tuple[str, str, str]]:
    """Return the hunks below a heading: file, the lines that stand there, those that shall."""
    _, _, chapter = page.partition(f"\n## {title}\n")
    block = re.search(r"```diff\n(.*?)\n```", chapter.partition("\n## ")[0], re.DOTALL)
    assert block is not None, f"no diff below {title}"
    pieces = FILE.split(block[1])
    assert not pieces[0]
    found = []
    for path, body in zip(pieces[2::3], pieces[3::3], strict=True):
        for hunk in body.split("@@\n")[1:]:
            lines = hunk.rstrip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
            found.append((path, old, new))
    return found


def follow(title: str, root: Path, page: str = PAGE) -> None:
    """Apply a walk to a copy of the repository."""
    for path, old, new in walk(title, page):
        file = root / path
        text = file.read_text("utf-8") if file.exists() else ""
        if not old:
            assert not file.exists(), f"{path} is there already"
            file.write_text(f"{new}\n", "utf-8")
            continue
        assert f"\n{text}".count(f"\n{old}\n") == 1, (
            f"these lines do not stand once in {path}:\n{old}"
        )
        changed = f"\n{text}".replace(f"\n{old}\n", f"\n{new}\n")
        file.write_text(changed.removeprefix("\n"), "utf-8")


def copied(root: Path) -> Path:
    """Return a copy of the package and of the page that lists columns."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "workbench", root / "workbench", ignore=ignored)
    (root / "docs").mkdir()
    shutil.copy(REPOSITORY / "docs" / "metrics.md", root / "docs")
    return root


def tried(root: Path, script: str, more: Mapping[str, str] | None = None) -> None:
    """Run a script with the copy as its package."""
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{script}"],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"} | dict(more or {}),
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("title", MOST)
def test_a_walk_is_short_and_each_hunk_finds_its_place(title: str, tmp_path: Path) -> None:
    assert len(walk(title)) <= MOST[title]
    follow(title, copied(tmp_path))


def test_a_hunk_whose_lines_have_changed_is_found(tmp_path: Path) -> None:
    stale = PAGE.replace("     let_cells_join(spec)\n", "     let_cells_meet(spec)\n")
    with pytest.raises(
        AssertionError, match=r"do not stand once in workbench/engine/torch/support"
    ):
        follow("Add a flag of `%%distributed`", copied(tmp_path), stale)


FLAG = """
import inspect

from workbench.cookbook.recipe import Recipe
from workbench.shared.plan import cell_of, make_plan
from workbench.shared.protocol import RunSpec
from workbench.shared.run_request import from_arguments, parse_cell_line
from workbench.session.cluster import Cluster

said = parse_cell_line("mirrored --denormals flush")
assert said.denormals == "flush" and parse_cell_line("mirrored").denormals == "keep"
assert from_arguments("mirrored", {"denormals": "flush"}).denormals == "flush"
assert inspect.signature(Cluster.run).parameters["denormals"].default == "keep"
plan = make_plan(Recipe(source="pass"), "mirrored", workers=2, **said.settings)
assert cell_of(plan).startswith("%%distributed mirrored -n 2 --denormals flush\\n"), cell_of(plan)
wire = {"mode": "run", "rank": 0, "world_size": 1, "ranks": [0], **plan.settings_to_wire()}
spec = RunSpec.from_wire(wire)
assert spec.denormals == "flush" and RunSpec.from_wire(spec.to_wire()) == spec
"""


def test_the_flag_is_parsed_told_to_engines_and_written_back(tmp_path: Path) -> None:
    follow("Add a flag of `%%distributed`", copied(tmp_path))
    tried(tmp_path, FLAG)


PLOT = """
from fake_run import fake_snapshot
from workbench.views.live import figure

drawn = figure.run_figure(fake_snapshot())
titles = [axes.get_title(loc) for band in drawn.subfigs for axes in band.axes
          for loc in ("left", "center")]
texts = [text.get_text() for band in drawn.subfigs for axes in band.axes for text in axes.texts]
assert "Step times, ms" in titles + texts, titles + texts
lengths = [axes for band in drawn.subfigs for axes in band.axes if len(axes.patches) == 20]
assert sum(patch.get_height() for patch in lengths[0].patches) > 0
assert figure.run_png(fake_snapshot(step=0)).startswith(b"\\x89PNG")
"""


def test_the_plot_is_drawn_from_a_snapshot(tmp_path: Path) -> None:
    follow("Add a plot", copied(tmp_path))
    tests = str(REPOSITORY / "tests")
    tried(tmp_path, f"sys.path.append({tests!r})\n{PLOT}")


METRIC = """
from pathlib import Path

import numpy as np

from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.history.store import RunHistory
from workbench.shared.protocol import records_from
from workbench.shared.record import COLUMNS, CURVES, RECORD

assert RECORD.names[-1] == "grad_norm" and "grad_norm" in COLUMNS and "grad_norm" in CURVES
recorder, history, without = Recorder(1, 0), RunHistory([0]), RunHistory([0])
for step in range(3):
    result = StepResult(4, 1.0, 0.01, grad_norm=step + 0.5)
    recorder.add_step(step, result, float(step), step + 0.9, data_wait_s=0.0)
rows = records_from(recorder.drain(final=True)).copy()
history.append(rows)
assert history["grad_norm"].tolist() == [0.5, 1.5, 2.5]
assert history.snapshot().extra["grad_norm"].mean.tolist() == [0.5, 1.5, 2.5]
rows["grad_norm"] = np.nan
without.append(rows)
assert "grad_norm" not in without.columns and "grad_norm" not in without.snapshot().extra
assert "\\n| `grad_norm` | " in Path("docs/metrics.md").read_text("utf-8")
"""


def test_the_number_is_a_field_of_rows_a_column_a_curve_and_in_the_docs(tmp_path: Path) -> None:
    follow("Add a measured number", copied(tmp_path))
    tried(tmp_path, METRIC)


TRAIN = '''
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist

from workbench import catalog
from workbench.engine.testing import CollectingLink, EngineHarness
from workbench.shared.protocol import RunSpec

CELL = """
import torch
import workbench as wb

torch.manual_seed(3)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
wb.fit(model, (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=10, steps=12,
       optimizer=lambda p: torch.optim.SGD(p, 0.2, momentum=0.9))
tiny = torch.tensor([1e-310], dtype=torch.float64) * 0.5
"""


def train(strategy, rank, ranks, port):
    """Train in this process; return the weights, the rows and what the cell left."""
    weights, namespace, link = {}, {"__name__": "__main__"}, CollectingLink()
    link.ended = lambda run: weights.update(run.strategy.weights())
    spec = RunSpec(mode="run", rank=rank, world_size=len(ranks), ranks=ranks, run=1,
                   strategy=strategy, options=catalog.lookup(strategy).settings({}),
                   store=("127.0.0.1", port), prefix=f"{strategy}/", denormals="flush",
                   run_dir=tempfile.mkdtemp(dir="."))
    with EngineHarness() as engine:
        report = engine.run(spec, CELL, namespace, link)
    assert report.outcome.is_well, report.error
    return weights, report.rows, namespace


assert "naive_mirrored" in catalog.names("torch")
coming, going = os.pipe()
if not (child := os.fork()):
    status = 1
    try:
        train("naive_mirrored", 1, (0, 1), int(os.read(coming, 16)))
        status = 0
    finally:
        os._exit(status)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.write(going, str(store.port).encode())
found, rows, left = train("naive_mirrored", 0, (0, 1), store.port)
assert os.waitpid(child, 0)[1] == 0
truth, single, _ = train("one_device", 0, (0,), store.port)
assert sorted(found) == sorted(truth) and len(rows) == len(single) == 12
for name in truth:
    np.testing.assert_allclose(found[name], truth[name], rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(rows["grad_norm"], single["grad_norm"], rtol=1e-4)
assert (rows["grad_norm"] > 0).all() and (rows["sent_bytes"] > 0).all()
assert (rows["exposed_s"] > 0).all() and (single["sent_bytes"] == 0).all()
assert left["tiny"].item() == 0 or not torch.set_flush_denormal(True)
'''


def test_the_strategy_equals_one_device_and_number_and_flag_do_what_they_say(
    tmp_path: Path,
) -> None:
    need("torch")
    copied(tmp_path)
    for title in MOST:
        follow(title, tmp_path)
    tried(tmp_path, TRAIN)
