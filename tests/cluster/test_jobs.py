"""Jobs: a plan's folder, started as a scheduler would, trains, stops, resumes and is followed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import job_folders
import numpy as np
import psutil
import pytest
from job_folders import CELL, SLOW, WAIT_S, done, job_folder, processes_of, run_of, started
from lending import lent
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench import catalog
from workbench.cookbook.recipe import Recipe
from workbench.errors import RunError
from workbench.history import disk
from workbench.jobs.followed import follow
from workbench.shared.plan import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

OPTIONS = {
    "mirrored": {"allreduce": "backend"},
    "local_sgd": {"every": 1},
    "parameter_server": {"servers": 2},
}
WORKERS = {"one_device": 1, "hybrid": 4, "parameter_server": 1}
"""A server that hears one worker applies its pushes in one order."""


def meta(folder: Path, number: int = 1) -> dict:
    return disk.read_meta(run_of(folder, number))


@pytest.mark.parametrize("strategy", [one.name for one in catalog.strategies("torch")])
def test_a_job_trains_bit_for_bit_as_the_notebook_does(strategy, tmp_path, monkeypatch):
    workers, options = WORKERS.get(strategy, 2), OPTIONS.get(strategy, {})
    plan = make_plan(Recipe(CELL), strategy, workers=workers, options=options)
    folder = job_folder(tmp_path, CELL, strategy, workers, options=options)
    with started(folder, processes_of(plan)) as processes:
        assert done(processes) == [0] * len(processes), (folder / "out-0.txt").read_text()
    job = wb.load(run_of(folder))
    assert (job.state, job.error) == ("finished", None)
    monkeypatch.setattr("workbench.devices.leases.cpu_count", lambda: workers)  # a thread each
    with lent(workers) as cluster:
        run = cluster.run(CELL, strategy=strategy, workers=workers, options=options).wait(WAIT_S)
        weights = run.weights()
    theirs = job.weights()
    assert weights.keys() == theirs.keys()
    differ = [name for name in weights if not np.array_equal(weights[name], theirs[name])]
    assert differ == []
    assert len(job.history) == len(run.history)


def test_torchruns_agent_starts_a_job_and_ranks_that_fail_are_named(tmp_path):
    cell = CELL.replace("wb.fit", "assert rank != 1, 'no data here'\nwb.fit")
    folder = job_folder(tmp_path, cell, "mirrored", 2)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    with started(folder, 1, command) as (agent,):
        assert agent.wait(WAIT_S) != 0
    run = wb.load(run_of(folder))
    assert run.state == "failed"
    assert "no data here" in str(run.error)
    assert "Rank 1" in str(run.error)
    assert 'train.py", line' in (folder / "out-0.txt").read_text()


def test_a_slow_worker_of_a_job_has_less_of_each_batch(tmp_path):
    cell = SLOW.replace(
        "time.sleep(0.02)", "time.sleep(len(batch[0]) * (5e-4 if rank else 2.5e-4))"
    )
    cell = cell.replace("steps=2000", "steps=330")
    folder = job_folder(tmp_path, cell, "mirrored", 2, on_straggler="shed")
    with started(folder, 2) as processes:
        assert done(processes) == [0, 0]
    run = wb.load(run_of(folder))
    change = run.events[0]
    assert (change["event"], change["ranks"]) == ("shed", [1])
    for step, shares in ((change["step"] - 1, [32, 32]), (change["step"], change["shares"])):
        assert run.history["samples"][run.history["step"] == step].tolist() == shares


def test_a_rank_that_is_killed_is_named_and_no_process_is_left(tmp_path):
    folder = job_folder(tmp_path, SLOW, "mirrored", 2)
    with started(folder, 2) as processes:
        run = follow(folder)
        assert soon(lambda: run.snapshot().step > 3)
        left = [p.pid for one in processes for p in psutil.Process(one.pid).children(True)]
        processes[1].kill()
        with pytest.raises(RunError, match="WB-RUN-106"):
            run.wait(WAIT_S)
        assert "Rank 1" in str(run.error)
        assert done(processes)[0] == 1
    assert soon(lambda: not any(map(psutil.pid_exists, left)))


def test_sigterm_stops_at_a_step_and_the_next_start_goes_on_from_there(tmp_path):
    cell = SLOW.replace("steps=2000", "steps=60")
    folder = job_folder(tmp_path, cell, "mirrored", 2, checkpoint="kept", checkpoint_every=500)
    with started(folder, 2) as processes:
        run = follow(folder)
        assert soon(lambda: run.snapshot().step > 3)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        run.wait(WAIT_S)
        assert done(processes) == [0, 0]
    stopped = run.history.totals.steps
    assert run.state == "stopped"
    assert 3 < stopped < 60
    with started(folder, 2) as processes:
        assert done(processes) == [0, 0]
    second = meta(folder, 2)
    assert second["job"]["resumed_from"] == f"step-{stopped}"
    assert wb.load(run_of(folder, 2)).history["step"].min() == stopped
    with started(folder, 2) as processes:  # the job has ended: this is a new run of it
        assert done(processes) == [0, 0]
    assert meta(folder, 3)["job"]["resumed_from"] == ""


PACED = SLOW.replace("time.sleep(0.02)", "time.sleep(float(os.environ['PACE_S']))")
PACED = PACED.replace("import time", "import os, time").replace("steps=2000", "steps=30")


def begun(folder: Path, number: int) -> bool:
    """Whether a run has recorded a step."""
    rows = run_of(folder, number) / "records-rank0.bin"
    return rows.exists() and rows.stat().st_size > 0


def test_a_new_run_that_is_cut_off_goes_on_from_its_own_checkpoint(tmp_path):
    folder = job_folder(tmp_path, PACED, "one_device", 1, checkpoint="kept", checkpoint_every=500)
    with started(folder, 1, PACE_S="0") as processes:
        assert done(processes) == [0]  # its last checkpoint is of step 30
    with started(folder, 1, PACE_S="1") as processes:
        assert soon(lambda: begun(folder, 2))
        processes[0].send_signal(signal.SIGTERM)
        assert done(processes) == [0]
    stopped = int(wb.load(run_of(folder, 2)).history["step"].max()) + 1
    with started(folder, 1, PACE_S="0") as processes:
        assert done(processes) == [0]
    assert meta(folder, 3)["job"]["resumed_from"] == f"step-{stopped}"
    assert wb.load(run_of(folder, 3)).history["step"].tolist() == list(range(stopped, 30))


def test_a_job_that_is_started_twice_mixes_no_checkpoints(tmp_path):
    folder = job_folder(tmp_path, PACED, "one_device", 1, checkpoint="kept", checkpoint_every=1)
    with started(folder, 1, PACE_S="2") as processes:
        assert soon(lambda: (folder / "checkpoints" / "step-1").exists())
        with started(folder, 1, PACE_S="0") as others:
            assert done(others) == [0]
        assert processes[0].poll() is None
    second = meta(folder, 2)
    assert (second["state"], second["job"]["resumed_from"]) == ("finished", "")
    assert second["job"]["checkpoints"] != meta(folder, 1)["job"]["checkpoints"]
    assert wb.load(run_of(folder, 2)).history["step"].min() == 0


def test_a_followed_run_is_steered_and_ends_with_all_of_its_rows(tmp_path):
    folder = job_folder(tmp_path, SLOW, "mirrored", 2)
    with started(folder, 2) as processes:
        run = follow(folder)
        assert wb.runs[run.name] is run
        assert soon(lambda: run.snapshot().step > 3)
        run.pause()
        assert soon(lambda: run.state == "paused")
        assert soon(lambda: len(set(np.bincount(run.history["rank"]))) == 1)
        stood = run.snapshot().step
        run.step(3)
        assert soon(lambda: run.snapshot().step == stood + 3)
        run.inject("slow=1:60ms")
        run.resume()
        assert soon(lambda: run.snapshot().step > stood + 20)
        run.stop()
        run.wait(WAIT_S)
        assert done(processes) == [0, 0]
    assert run.state == "stopped"
    assert run.printed(0) == ""
    whole = wb.load(run_of(folder))
    assert len(run.history) == len(whole.history)
    assert np.array_equal(run.history["loss"], whole.history["loss"])
    late = run.history["step"] > stood + 5
    waits = run.history["sync_wait_s"]
    others = np.nanmedian(waits[late & (run.history["rank"] == 0)])
    own = np.nanmedian(waits[late & (run.history["rank"] == 1)])
    assert others > 10 * max(own, 1e-3)  # 60 ms were injected in rank 1


def test_a_notebook_that_comes_back_catches_up_without_a_gap(tmp_path):
    folder = job_folder(tmp_path, SLOW.replace("steps=2000", "steps=80"), "mirrored", 2)
    with started(folder, 2) as processes:
        first = follow(folder)
        assert soon(lambda: first.snapshot().step > 3)
        first.close()
        second = follow(folder)
        second.wait(WAIT_S)
        assert done(processes) == [0, 0]
    assert second.history.totals.steps == 80
    assert second.state == "finished"
    assert follow(folder) is second


def test_a_run_is_followed_through_marked_lines(tmp_path):
    folder = job_folder(tmp_path, CELL, "mirrored", 2)
    with started(folder, 2, WORKBENCH_LOG_LINES="1") as processes:
        assert done(processes) == [0, 0]
    run = follow(["cat", str(folder / "out-0.txt")])
    run.wait(WAIT_S)
    whole = wb.load(run_of(folder))
    assert run.state == "finished"
    assert np.array_equal(run.history["loss"], whole.history["loss"])
    for name, array in whole.weights().items():
        assert np.array_equal(run.weights()[name], array)


def test_a_job_whose_lines_nobody_reads_any_more_ends_well(tmp_path):
    """As in `python train.py | head`."""
    cell = SLOW.replace("steps=2000", "steps=40")
    folder = job_folder(tmp_path, cell, "one_device", 1)
    command = "WORKBENCH_LOG_LINES=1 exec $0 train.py >pipe"
    os.mkfifo(folder / "pipe")
    with subprocess.Popen(["sh", "-c", command, sys.executable], cwd=folder) as job:
        with (folder / "pipe").open("rb") as pipe:
            pipe.readline()
        assert job.wait(WAIT_S) in (0, 120)  # 120: Python could not flush its standard output
    assert meta(folder)["state"] == "finished"
    assert "job's output" in (run_of(folder) / "events-rankjob.jsonl").read_text()


def test_orders_of_others_are_not_obeyed(tmp_path):
    folder = job_folder(tmp_path, SLOW.replace("steps=2000", "steps=40"), "mirrored", 2)
    with started(folder, 2) as processes:
        run = follow(folder)
        inbox = run.folder / "control"
        (inbox / "1-aa.json").write_text('{"do": "stop", "number": 99}')
        run.wait(WAIT_S)
        assert done(processes) == [0, 0]
    assert run.state == "finished"
    assert run.history.totals.steps == 40


def test_a_job_writes_nothing_of_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-of-the-user")
    folder = job_folder(tmp_path, CELL, "mirrored", 2)
    with started(folder, 2) as processes:
        assert done(processes) == [0, 0]
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"hunter2-of-the-user" not in path.read_bytes(), path
    assert (run_of(folder) / "control.key").stat().st_mode & 0o077 == 0


def test_a_script_that_nobody_changed_is_recorded(tmp_path):
    (tmp_path / "loop.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = DDP(torch.nn.Linear(8, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "loader = torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=16)\n"
        "for batch in loader:\n"
        "    optimizer.zero_grad()\n"
        "    model(batch).pow(2).mean().backward()\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n"
    )
    command = ("-m", "workbench", "run", "loop.py")
    with started(tmp_path, 2, command) as processes:
        assert done(processes) == [0, 0], (tmp_path / "out-0.txt").read_text()
    run = wb.load(next((tmp_path / "workbench-runs").glob("*/1")))
    assert run.state == "finished"
    assert run.history.totals.steps == 16
    assert np.isfinite(run.history["sync_wait_s"]).all()


def test_a_script_may_spawn_processes_that_load_its_data(tmp_path):
    (tmp_path / "loop.py").write_text(
        "import torch\n"
        "def collate(rows):\n"
        "    return torch.stack(rows)\n"
        "def main():\n"
        "    model = torch.nn.Linear(8, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "    loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=16,\n"
        "        num_workers=1, collate_fn=collate, multiprocessing_context='spawn')\n"
        "    for batch in loader:\n"
        "        optimizer.zero_grad()\n"
        "        model(batch).pow(2).mean().backward()\n"
        "        optimizer.step()\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    with started(tmp_path, 1, ("-m", "workbench", "run", "loop.py")) as processes:
        assert done(processes) == [0], (tmp_path / "out-0.txt").read_text()
    assert wb.load(next((tmp_path / "workbench-runs").glob("*/1"))).history.totals.steps == 4


def test_processes_that_a_job_spawns_are_no_ranks_of_it(tmp_path):
    cell = (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    child.start()\n"
        "    child.join()\n"
        "    assert child.exitcode == 0\n"
        + "".join(f"    {line}\n" for line in CELL.strip().splitlines())
    )
    folder = job_folder(tmp_path, cell, "one_device", 1)
    with started(folder, 1) as processes:
        assert done(processes) == [0], (folder / "out-0.txt").read_text()
    assert [one.name for one in (folder / "runs").iterdir()] == ["1"]


def test_ranks_that_go_on_long_after_rank_0_are_waited_for(tmp_path):
    cell = f"{CELL}\nimport time\ntime.sleep(40 * rank)  # longer than what rank 0 grants a failure"
    folder = job_folder(tmp_path, cell, "mirrored", 2)
    with started(folder, 2) as processes:
        assert done(processes) == [0, 0]
    assert meta(folder)["state"] == "finished"


def test_the_helper_and_the_folder_agree_on_the_number_of_processes(tmp_path):
    for strategy in ("mirrored", "parameter_server"):
        plan = make_plan(Recipe(CELL), strategy, workers=2)
        folder = job_folder(tmp_path, CELL, strategy, 2)
        from workbench.export.folder import read_job

        assert read_job(folder).launch["processes"] == job_folders.processes_of(plan)
