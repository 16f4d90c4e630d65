"""`workbench run` from a shell: real processes under torchrun, from the start to the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need

from workbench import cli
from workbench.jobs import telling

need("torch")
pytestmark = [pytest.mark.cluster, pytest.mark.torch]

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained", dist.get_rank(), torch.get_num_threads(), os.environ.get("OMP_WAIT_POLICY"))
if sys.argv[2:] == ["fail"]:
    raise ValueError("on purpose")
dist.destroy_process_group()
"""
ENV = {**os.environ, "OMP_NUM_THREADS": "3",
       "PYTHONPATH": str(Path(cli.__file__).parents[1])}  # fmt: skip
ENV.pop("OMP_WAIT_POLICY", None)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def command(folder, *words, **more):
    """Start `workbench ... --json`."""
    return subprocess.Popen(
        [sys.executable, "-m", "workbench", words[0], "--json", *words[1:]],
        cwd=folder, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )  # fmt: skip


def told(folder, *words):
    """Return the exit status, the JSON objects and the other words of a command."""
    with command(folder, *words) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


def test_a_script_that_knows_nothing_of_workbench_is_run_recorded_and_compared(folder):
    status, lines, err = told(folder, "run", "-n", "2", "train.py", "40")
    assert status == 0, err
    end = lines[-1]
    assert set(end) == set(telling.END)
    assert (end["state"], end["figures"]["workers"], end["figures"]["steps"]) == ("finished", 2, 40)
    assert end["folder"] == str(folder / "workbench-runs" / "train" / "1")
    # with the threads that the user set, which do not spin between their parallel parts
    assert "trained 1 3 PASSIVE" in err
    place = str(folder / "workbench-runs" / "train")
    status, (found,), _ = told(folder, "compare", place, "--fail-if", "steps < 40 abs")
    assert (status, found["runs"][0]["steps"]) == (0, 40)


def test_a_script_that_fails_gives_1_and_says_why(folder):
    status, lines, err = told(folder, "run", "-n", "2", "--out", "kept", "train.py", "3", "fail")
    assert (status, lines[-1]["state"]) == (1, "failed"), err
    assert lines[-1]["folder"] == str(folder / "kept" / "1")
    assert "on purpose" in lines[-1]["error"]


def test_sigterm_stops_at_a_step_and_gives_130(folder):
    with command(folder, "run", "-n", "2", "train.py", "1000000") as process:
        for line in process.stdout:
            now = json.loads(line)
            if now["event"] == "progress" and now["step"]:
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=150)
    end = json.loads(out.splitlines()[-1])
    assert (process.returncode, end["event"], end["state"]) == (130, "end", "stopped"), err
