"""Training runs: how they begin and end, their results, and what they leave behind."""

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S
from run_cells import ENDLESS, LOOP, SHORT, going

import workbench as wb
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError, RunError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

# -- the first path, as it is written in the documentation -----------------------------------------

FIRST = """%%distributed mirrored --epochs 2 --name base --plot off
import torch, torch.nn as nn
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p, 1e-3),
       batch_size=256, eval_data=wb.data.digits("test"), metrics={"accuracy": lambda out, y: (out.argmax(1) == y).float().mean()})
"""  # noqa: E501


def test_the_first_fit_ends_with_a_table_and_a_name(book):
    cell = book.ok(FIRST)
    run = book["_run"]
    assert run is wb.runs["base"]
    assert run.state == "finished"
    assert [one["epoch"] for one in run.evals] == [0, 1]
    assert "samples/s" in cell.text
    again = book.ok("%distributed one_device --recipe base --name again --plot off")
    assert wb.runs["again"].plan.strategy == "one_device"
    assert len(wb.runs["again"].engines) == 1
    assert wb.runs["again"].plan.recipe.digest == run.plan.recipe.digest
    assert "one_device" in again.text


def test_several_strategies_and_seeds_end_in_a_comparison(book):
    cell = book.ok("%%distributed one_device,mirrored --seeds 2 --plot off\n" + SHORT)
    names = [f"{s}-seed{k}" for s in ("one_device", "mirrored") for k in range(2)]
    assert all(wb.runs[name].state == "finished" for name in names)
    assert "mirrored" in cell.text
    assert "one_device" in cell.text
    assert "samples/s" in cell.text
    assert wb.compare(*(wb.runs[name] for name in names)).comparison.verdict in cell.text
    assert not any("image/png" in shown for shown in cell.displays)


def test_a_comparison_in_text_has_no_figure(book):
    cell = book.ok("%%distributed one_device,mirrored --name worded --plot text\n" + SHORT)
    compared = wb.compare(wb.runs["worded-one_device"], wb.runs["worded-mirrored"])
    assert compared.comparison.verdict in cell.text
    assert "speed-up" in cell.text
    assert not any(kind.startswith("image/") for shown in cell.displays for kind in shown)


def test_a_loop_of_ones_own_trains_with_one_line_added(book):
    cell = book.ok(
        "%%distributed mirrored --plot text\n"
        "import torch; from torch import nn\n"
        "model = nn.Linear(64, 10); optimizer = torch.optim.SGD(model.parameters(), 0.1); "
        "loss_fn = nn.CrossEntropyLoss()\n"
        'data = wb.data.digits("train")\n'
        "loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)\n"
        "model, optimizer, loader = wb.prepare(model, optimizer, loader)\n"
        "for x, y in loader:\n"
        "    optimizer.zero_grad(); loss_fn(model(x.flatten(1)), y).backward(); optimizer.step()\n"
    )
    assert "global batch 64 = 2 x 32" in cell.text
    assert book["_run"].history.totals.steps > 10


# -- life ------------------------------------------------------------------------------------------


def test_a_name_that_is_used_again_moves_the_older_run_aside(cluster):
    first = cluster.run(SHORT, strategy="mirrored", name="twice").wait(WAIT_S)
    second = cluster.run(SHORT, strategy="mirrored", name="twice").wait(WAIT_S)
    assert wb.runs["twice"] is second
    assert wb.runs["twice@1"] is first
    assert list(wb.runs)[-1] == "twice"
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'twice'"):
        wb.runs["twic"]


def test_columns_are_of_equal_length_and_losses_are_global(cluster):
    run = cluster.run(SHORT, strategy="mirrored").wait(WAIT_S)
    history = run.history
    assert {len(history[name]) for name in history} == {12}
    for step in range(6):
        rows = history["step"] == step
        assert len(set(history["loss"][rows])) == 1
        assert history["loss"][rows][0] == pytest.approx(history["local_loss"][rows].mean())
    assert set(history["engine"]) == {0, 1}


def test_a_second_run_is_refused_while_one_is_going_on(cluster):
    run = going(cluster.run(ENDLESS, strategy="mirrored", name="going"))
    with pytest.raises(RunError, match=r"'going'.*WB-RUN-065") as refused:
        cluster.run(SHORT, strategy="mirrored")
    assert "wb.runs['going'].stop()" in str(refused.value)
    run.stop()
    run.wait(WAIT_S)
    assert cluster.run(SHORT, strategy="mirrored").wait(WAIT_S).state == "finished"


def test_a_rank_that_fails_in_training_is_named_and_the_next_run_works(cluster):
    failing = ENDLESS.replace(
        "steps=1_000_000", "steps=50, callbacks=lambda step, logs: 1 / (rank * 9 - step + 0)"
    )
    run = cluster.run(failing, strategy="mirrored")
    with pytest.raises(RunError, match=r"Rank 0 \(engine 0\).*ZeroDivisionError[\s\S]*WB-RUN-066"):
        run.wait(WAIT_S)
    assert run.state == "failed"
    assert cluster.run(SHORT, strategy="mirrored").wait(WAIT_S).state == "finished"


def test_a_killed_worker_ends_a_run_by_name_and_comes_back(cluster):
    run = cluster.run(ENDLESS, strategy="mirrored", inject=["kill=1@400"])
    with pytest.raises(RunError, match=r"SIGKILL.*WB-RUN-066") as failure:
        run.wait(WAIT_S)
    assert "%cluster restart 1" in str(failure.value)
    assert run.history.totals.steps > 0
    assert cluster.ids == [0]
    cluster.restart([1])
    assert cluster.ids == [0, 1]
    assert cluster.run(SHORT, strategy="mirrored").wait(WAIT_S).state == "finished"


# -- what remains ----------------------------------------------------------------------------------


def test_nothing_is_left_on_the_engines_after_a_run(cluster):
    def left():
        return cluster.engine_set.call([0, 1], "test_runs_probe:left")

    cluster.run(SHORT, strategy="mirrored").wait(WAIT_S)
    probe = "import threading, os, torch\nimport torch.distributed as dist\n" + (
        "def left():\n"
        "    return [dist.is_initialized(), sorted(t.name for t in threading.enumerate()),\n"
        "            sorted(os.environ.items()), torch.Tensor.backward.__module__,\n"
        "            len(os.listdir('/proc/self/fd'))]\n"
        "import sys, types\n"
        "sys.modules['test_runs_probe'] = types.SimpleNamespace(left=left)\n"
    )
    cluster.run(probe + SHORT, strategy="mirrored").wait(WAIT_S)
    before = left()
    for strategy in ("mirrored", "one_device", "mirrored"):
        cluster.run(LOOP.replace("EPOCHS", "1"), strategy=strategy).wait(WAIT_S)
    after = left()
    assert after == before
    assert not after[0][0]


def test_strategies_and_world_sizes_follow_one_another_in_the_same_engines(cluster):
    pids = [engine.pid for engine in cluster.engines]
    for strategy, workers in (("mirrored", 2), ("one_device", 2), ("mirrored", 3), ("mirrored", 1)):
        run = cluster.run(SHORT, strategy=strategy, workers=workers).wait(WAIT_S)
        assert len(run.engines) == (1 if strategy == "one_device" else workers)
        assert run.history.totals.steps == 6
    assert [engine.pid for engine in cluster.engines][:2] == pids


def train(lr, steps):
    import torch
    from torch import nn

    model = nn.Linear(64, 10)
    data = wb.data.synthetic(256, shape=(64,), classes=10)
    fitted = wb.fit(model, data, loss=nn.CrossEntropyLoss(), batch_size=32, steps=steps,
                    optimizer=lambda p: torch.optim.SGD(p, lr))  # fmt: skip
    return {"rank": wb.options.get("nothing", rank), "steps": fitted.steps}  # noqa: F821


def test_a_functions_arguments_go_in_and_its_results_come_back_by_rank(cluster):
    run = cluster.run(train, (0.1, 4), strategy="mirrored", workers=2).wait(WAIT_S)
    assert run.results == [{"rank": 0, "steps": 4}, {"rank": 1, "steps": 4}]
    assert cluster.pull(["_wb_args", "_wb_result"]) == {i: {} for i in cluster.ids}


def test_a_function_that_returns_what_cannot_travel_still_trains(cluster):
    source = (
        "def hopeless(source):\n"
        "    exec(source, globals())\n"
        "    import threading\n"
        "    return threading.Lock()\n"
    )
    recipe = Recipe(source, function="hopeless", args=(SHORT,))
    run = cluster.run(recipe, strategy="mirrored", workers=2).wait(WAIT_S)
    assert run.results == [None, None]
    assert any("be fetched" in note for note in run.history.story.notes)


def test_weights_come_back_load_and_are_saved(cluster, tmp_path):
    torch = pytest.importorskip("torch")
    run = cluster.run(SHORT, strategy="mirrored", workers=2).wait(WAIT_S)
    weights = run.weights()
    assert set(weights) == {"weight", "bias"}
    model = torch.nn.Linear(64, 10)
    assert run.load_into(model) is model
    np.testing.assert_array_equal(model.weight.detach().numpy(), weights["weight"])
    with pytest.raises(PlanError, match="WB-PLAN-151"):
        run.load_into(torch.nn.Sequential(torch.nn.Linear(64, 10)))
    with pytest.raises(RunError, match=r"rank 1.*WB-RUN-087"):
        run.weights(rank=1)
    folder = run.save(tmp_path / "kept")
    state = torch.load(folder / "weights.pt", weights_only=True)
    np.testing.assert_array_equal(state["weight"].numpy(), weights["weight"])
    loaded = wb.load(folder)
    assert loaded.state == "finished"
    assert loaded.name == run.name
    for name in run.history:
        np.testing.assert_array_equal(loaded.history[name], run.history[name])
    np.testing.assert_array_equal(loaded.weights()["bias"], weights["bias"])


def test_a_model_that_was_trained_before_is_pointed_out(book, cluster):
    book.ok("%%distributed -n 2\nimport torch\nfrom torch import nn\nkept = nn.Linear(64, 10)")
    again = SHORT.replace("model = nn.Linear(64, 10)\n", "").replace("(model,", "(kept,")
    assert not cluster.run(again, strategy="mirrored", workers=2).wait(WAIT_S).trained_before
    second = cluster.run(again, strategy="mirrored", workers=2).wait(WAIT_S)
    assert second.trained_before


def test_a_reassigned_name_is_noted_in_the_run(cluster):
    run = cluster.run("world_size = 7\n" + SHORT, strategy="mirrored", workers=2).wait(WAIT_S)
    assert any("world_size" in note for note in run.history.story.notes)


def test_overrides_that_a_loop_of_ones_own_ignores_are_an_error(cluster):
    loop = LOOP.replace("EPOCHS", "1")
    run = cluster.run(loop, strategy="mirrored", workers=2, epochs=3)
    with pytest.raises(RunError, match=r"WB-RUN-093[\s\S]*--epochs") as failure:
        run.wait(WAIT_S)
    assert "wb.options.get('epochs', default)" in str(failure.value)
    reads = LOOP.replace("EPOCHS", "wb.options.get('epochs', 1)")
    run = cluster.run(reads, strategy="mirrored", workers=2, epochs=3).wait(WAIT_S)
    assert run.history.totals.steps == 6
    run = cluster.run(loop, strategy="mirrored", workers=2, seed=3).wait(WAIT_S)
    assert run.state == "finished"


def test_dropped_records_are_counted(cluster):
    drop = SHORT.replace(
        "steps=6", "steps=30, callbacks=lambda step, logs: step == 1 and lose()"
    ).replace("import torch\n", "import torch\nfrom workbench.engine import context\n"
              "def lose(): context.current().recorder.dropped += 4\n", 1)  # fmt: skip
    run = cluster.run(drop, strategy="mirrored", workers=2).wait(WAIT_S)
    assert run.snapshot().dropped == 8


def test_calibration_reads_back_what_it_injected(cluster):
    found = wb.calibrate()
    assert found.injected_ms == 50
    assert abs(found.read_ms - 50) < 15, found
    assert found.own_ms < 15, found
    assert "50 ms" in repr(found)
