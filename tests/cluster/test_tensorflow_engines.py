"""Engines with TensorFlow: forked, swapped, importing beside, replaced, killed."""

import os
import signal
from pathlib import Path

import pytest
from needs import need
from notebook_shell import soon
from warm_support import gone, kernel

from workbench.errors import RunError

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow, pytest.mark.torch]
need("torch", "tensorflow")

FIT = """%%distributed mirrored -n 2 --framework tensorflow --plot off {flags}
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs={epochs}, batch_size=64, verbose=0)
"""
SUM = "%%distributed\nimport torch; x = torch.ones(1); dist.all_reduce(x); x.item()"


@pytest.fixture
def cluster(book):
    from workbench.notebook.session import session

    return session.need_cluster()


def pids(cluster):
    return {engine.id: engine.pid for engine in cluster.engines}


def frameworks(cluster, engine):
    return cluster.engines[engine].frameworks


def test_a_framework_that_is_not_installed_is_named_before_engines_are_touched(
    book, cluster, monkeypatch
):
    before = pids(cluster)
    monkeypatch.setattr("workbench.execution.requests.installed", lambda name: name != "tensorflow")
    for cell in (FIT.format(flags="", epochs=1), "%%distributed --framework tensorflow\n1"):
        book.refused(cell, "WB-CLUSTER-036", "pip install", "[tensorflow]")
    book.refused("%cluster start 2 --framework tensorflow", "WB-CLUSTER-036")
    assert pids(cluster) == before
    assert cluster.framework == "torch"


def test_an_engine_without_variables_gives_way_to_a_fork_of_the_other_parent(book, cluster):
    book.ok("%%distributed\nrank")  # our own names are none of the user's
    before = pids(cluster)
    cell = book.ok(FIT.format(flags="", epochs=1))
    after = pids(cluster)
    assert before[0] != after[0]
    assert before[1] == after[1]  # one engine holds both replicas
    assert frameworks(cluster, 0) == {"tensorflow"}
    assert frameworks(cluster, 1) == {"torch"}
    assert "imports" not in cell.text
    assert book["_run"].state == "finished"
    assert set(book["_run"].history["rank"]) == {0, 1}


def test_an_engine_with_variables_imports_beside_them_and_says_so_once(book, cluster):
    book.ok(FIT.format(flags="", epochs=1))
    before = pids(cluster)  # engine 0 holds the model
    said = book.ok("%%rank 0\nkept = id(model)").stdout
    assert "Engine 0" in said
    assert "imports torch" in said
    assert book.ok(SUM).lines() == ["[ranks 0-1] 2.0"]
    assert pids(cluster) == before
    assert frameworks(cluster, 0) == {"tensorflow", "torch"}
    assert book.ok("%%rank 0\nkept == id(model)").lines() == ["[rank 0] True"]
    for again in (FIT.format(flags="", epochs=1), SUM):
        assert "imports" not in book.ok(again).text
    assert pids(cluster) == before


def test_cells_name_a_framework_too(book, cluster):
    cell = "%%distributed --framework tensorflow\nimport tensorflow as tf\nint(tf.ones(3).shape[0])"
    assert "[ranks 0-1] 3" in book.ok(cell).lines()
    assert all("tensorflow" in frameworks(cluster, i) for i in (0, 1))
    assert "[ranks 0-1] 2.0" in book.ok(SUM).lines()  # the group was not disturbed


SPOIL = """%%rank 0
from workbench.engine.tensorflow import support
from workbench.errors import EngineSpentError

def refuse(*args):
    raise EngineSpentError("It cannot be made anew.", code="WB-CLUSTER-000")

support.configure = refuse
"""


def test_a_spent_engine_is_replaced_and_the_run_begins_again_on_the_fresh_one(book, cluster):
    book.ok("%%rank 1\nkept = 41")
    before = pids(cluster)
    book.ok(SPOIL)
    book.ok(FIT.format(flags="--name again", epochs=1))
    after = pids(cluster)
    assert before[0] != after[0]
    assert before[1] == after[1]
    run = book["_run"]
    assert run.state == "finished"
    assert run.history.totals.steps > 0
    (note,) = [text for text in run.history.story.notes if "replaced" in text]
    assert "Engine 0" in note
    assert "It cannot be made anew." in note
    assert book.ok("%%rank 1\nkept").lines()[-1] == "[rank 1] 41"


def test_a_killed_engine_ends_in_a_named_failure_and_the_next_run_works(book, cluster):
    book.ok(FIT.format(flags="--background --name doomed", epochs=10_000))
    run = book["wb"].runs["doomed"]
    assert soon(lambda: run.history.totals.steps > 0)
    os.kill(pids(cluster)[0], signal.SIGKILL)
    with pytest.raises(RunError, match=r"Replicas 0-1 .*Engine 0 .*SIGKILL.*WB-RUN-066"):
        run.wait()
    assert run.state == "failed"
    book.ok(FIT.format(flags="", epochs=1))  # on the engine that is left
    assert book["_run"].state == "finished"
    book.ok("%cluster restart 0")
    assert "[ranks 0-1] 2.0" in book.ok(SUM).lines()


def test_a_default_framework_can_be_named_later(book, cluster):
    book.ok("%cluster start 3 --framework tensorflow")
    assert frameworks(cluster, 2) == {"tensorflow"}
    book.ok("%cluster start 3 --framework torch")
    assert cluster.framework == "torch"


# -- without a notebook ----------------------------------------------------------------------------

ENGINES = """
    import json, sys, time
    sys.path[:0] = {paths!r}
    from workbench.cluster.engines import Engines, Listeners
    engines = Engines(Listeners(message=lambda *_: None, death=lambda *_: None), framework="torch")
    ids = engines.start(1) + engines.start(1, framework="tensorflow")
    ground = engines._ground
    parents = [ground.parents.find(name) for name in ("torch", "tensorflow")]
    guards = [parent.status()["guarded"] for parent in parents]
    about = dict(folder=str(ground.folder), guards=guards, hazards=[])
    about["hazards"] = [parent.status()["hazard"] for parent in parents]
    about["pids"] = [p.pid for p in parents] + [engines.engines[i].pid for i in ids]
    about["pids"] += guards[0]
    print(json.dumps(about), flush=True)
    time.sleep(600)
"""


def test_neither_parent_outlives_a_killed_kernel():
    with kernel(ENGINES) as (process, about):
        assert about["hazards"] == [None, None]
        assert about["guards"][0] == about["guards"][1]
        assert len(set(about["pids"])) == 5
        process.kill()
        process.wait()
        assert not gone(about["pids"], timeout_s=10)
    assert not Path(about["folder"]).exists()
