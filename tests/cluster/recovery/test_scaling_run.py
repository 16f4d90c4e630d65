"""Workers leave a run and come to it while it trains; what is trained does not change."""

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference, kill

import workbench as wb
from workbench.errors import PlanError, RunError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = 240


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody comes or goes."""
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def begun(cluster, tmp_path):
    """Begin a run whose steps take their time until `hurry` is called; return it when it trains."""
    source = (
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def pace(step, logs):\n"
        "    if step >= 20 and not (folder / 'hurry').exists():\n"
        "        time.sleep(0.05 if step < 60 else 0.25)\n"
    ) + cell(STEPS, ", callbacks=[pace]")

    def begin(on=cluster, **more):
        more = {"strategy": "mirrored", "on_failure": "heal"} | more
        run = on.run(source, **more)
        assert soon(lambda: run.is_over or run.history.totals.steps >= 20)
        return run

    return begin


@pytest.fixture
def ended(tmp_path, undisturbed):
    """Have a run train to its end; nothing in it may differ from one that nobody disturbed."""

    def end(run, lost=()):
        (tmp_path / "hurry").touch()
        run.wait(WAIT_S)
        assert run.state == "finished"
        assert difference(run.weights(), undisturbed) <= EXACT
        history = run.history
        history.finish()
        rank, step = history["rank"].tolist(), history["step"].tolist()
        assert len(set(zip(rank, step, strict=True))) == len(step)
        assert history.totals.steps == STEPS
        samples = np.bincount(history["step"], history["samples"], minlength=STEPS)
        if lost:  # the last rows of who died may be missing
            whole = np.ones(STEPS, bool)
            for one in run.events:
                if one["event"] == "healed":
                    whole[max(0, one["step"] - 10) : one["step"]] = False
            assert whole.sum() > STEPS // 2
            samples = samples[whole]
        assert (samples == 24).all()
        return run

    return end


def joined(run):
    return [rank for one in run.events if one["event"] == "joined" for rank in one["ranks"]]


def changes(run):
    return [(one["event"], one["ranks"], one["workers"]) for one in run.events]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_leaves_and_comes_again(cluster, begun, ended, rank):
    run = begun()
    healer = run.task.mender
    healer.dismiss([rank], "to make room")
    assert soon(lambda: len(run.events) == 1), run.history.story.notes
    healer.admit([rank])
    assert soon(lambda: len(run.events) == 2), run.history.story.notes
    ended(run)
    assert changes(run) == [("left", [rank], 2), ("joined", [rank], 3)]
    assert run.recoveries == []


def test_more_and_fewer_workers(begun, ended):
    """Two, four, three: with a free engine, and one that is started for it."""
    with wb.Cluster(3) as cluster:
        run = begun(cluster, workers=2)
        run.scale(4)
        assert cluster.ids == [0, 1, 2, 3]
        before = run.history.totals.steps
        assert soon(lambda: run.history.totals.steps > before)
        run.scale(3)
        ended(run)
    assert changes(run)[-1] == ("left", [3], 3)
    assert sorted(rank for one in run.events[:-1] for rank in one["ranks"]) == [2, 3]
    assert run.engines == (0, 1, 2, 3)
    rows = run.history.totals.rows
    assert rows[0] == rows[1] == STEPS
    assert STEPS > rows[2] > rows[3] > 0
    assert set(run.history["engine"].tolist()) == {0, 1, 2, 3}
    assert run.history.phases[0] == (0, (0, 1))


def test_down_to_one_and_up(begun, ended):
    run = begun()
    run.scale(1)
    assert run.events[-1]["workers"] == 1
    run.scale(3)
    ended(run)
    assert run.history.totals.rows[0] == STEPS


def test_what_is_on_the_disk_is_the_same(begun, ended, tmp_path):
    run = begun(workers=1)
    run.scale(3)
    ended(run).save(tmp_path / "saved")
    again = wb.load(tmp_path / "saved")
    assert again.engines == run.engines
    assert again.history.totals.steps == STEPS
    assert np.array_equal(again.history.totals.rows, run.history.totals.rows)
    assert again.history.phases == run.history.phases


def test_a_death_during_a_scale(cluster, begun, ended):
    run = begun(workers=2)
    run.scale(3, wait=False)
    kill(cluster, 0)
    assert soon(lambda: run.is_over or sorted(joined(run)) == [0, 2]), run.history.story.notes
    ended(run, lost=[0])
    assert run.events[-1]["workers"] == 3


def test_a_scale_while_a_death_is_healed(cluster, begun, ended):
    run = begun(workers=2, inject=["kill=1@21"])
    assert soon(lambda: run.events), run.history.story.notes
    run.scale(3)
    ended(run, lost=[1])
    assert sorted(joined(run)) == [1, 2]
    assert run.events[-1]["workers"] == 3


def test_stop_during_a_scale(cluster, begun):
    run = begun(workers=1)
    run.scale(3, wait=False)
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
    assert cluster.run(cell(3), strategy="mirrored").wait(WAIT_S).state == "finished"


def test_what_cannot_be_is_refused_and_disturbs_nothing(cluster, begun, ended):
    run = begun(workers=2)
    for workers, code in ((0, "WB-PLAN"), (2.5, "WB-PLAN"), (25, "WB-PLAN-321")):
        with pytest.raises(PlanError, match=code):
            run.scale(workers)
    run.scale(3, wait=False)
    with pytest.raises(RunError, match="WB-RUN-145"):
        run.scale(1)
    assert soon(lambda: joined(run) == [2])
    run.scale(3)  # nothing to do
    ended(run)
    with pytest.raises(RunError, match="WB-RUN-143"):
        run.scale(2)


@pytest.mark.parametrize(
    ("how", "code"),
    [({"strategy": "sharded"}, "WB-PLAN-322"), ({"on_failure": "stop"}, "WB-PLAN-323")],
)
def test_runs_that_keep_their_workers_say_so(begun, tmp_path, how, code):
    run = begun(**{"on_failure": "stop"} | how)
    with pytest.raises(PlanError, match=code):
        run.scale(2)
    (tmp_path / "hurry").touch()
    assert run.wait(WAIT_S).state == "finished"


def at_the_door(run):
    return soon(lambda: run.is_over or run.task.mender.waiting)


def test_a_spare_takes_a_dead_ones_place_at_once(cluster, begun, ended):
    run = begun(workers=2, on_failure="", spares=1)
    assert at_the_door(run), run.history.story.notes
    kill(cluster, 1)
    assert soon(lambda: joined(run)), run.history.story.notes
    healed, came = run.events
    assert (healed["ranks"], came["ranks"]) == ([1], [2])
    assert healed["step"] == came["step"]  # nobody trained a step without it
    assert at_the_door(run)  # the next spare: a fresh engine in the dead one's place
    run.scale(3)
    assert sorted(joined(run)) == [1, 2]
    ended(run, lost=[1])
