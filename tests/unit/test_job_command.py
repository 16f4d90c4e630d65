"""`workbench run`, `compare`, `jobs`, `follow` and `control`, without engines."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from doc_pages import DOCS
from fake_run import empty_snapshot, fake_snapshot
from history_rows import make_rows

from workbench import cli
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError, RunError
from workbench.execution.run import Run
from workbench.history import disk
from workbench.jobs import command, control, here, submitted, telling
from workbench.jobs.followed import follow
from workbench.jobs.here import Process, Started
from workbench.jobs.platforms import JobState, Ticket
from workbench.shared.plan import make_plan
from workbench.shared.record import RECORD


def make_run(
    folder: Path,
    name: str = "a",
    *,
    state: str = "finished",
    error: str | None = None,
    seed: int | None = None,
    **timing: float,
) -> Path:
    """Write the folder of a run of two workers that never happened."""
    folder.mkdir(parents=True)
    plan = make_plan(Recipe("x = 1"), "mirrored", workers=2, framework="torch", name=name,
                     overrides={} if seed is None else {"seed": seed})  # fmt: skip
    run = Run(plan, number=1, name=name, engines=(0, 1), devices=("cpu", "cpu"), folder=folder)
    rows = make_rows(30, 2, **timing)
    for rank in range(2):
        run.history.append(rows[:, rank])
    run.history.hear("eval", {"step": 30, "epoch": 0, "values": {"accuracy": 0.9}})
    run.history.write(folder)
    disk.write_meta(folder, {**run.meta(), "state": state, "error": error})
    return folder


def make_job(folder: Path, **launch: object) -> Path:
    """Write what a job folder begins with."""
    folder.mkdir(parents=True)
    launch = {"workers": 2, "servers": 0, "processes": 2, "framework": "torch", **launch}
    about = {"format": telling.FORMAT, "name": "a", "launch": launch}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "train.py").write_text("")
    return folder


@pytest.fixture
def pair(tmp_path):
    """Hand out two runs; the second takes 26 ms a step where the first takes 16."""
    make_run(tmp_path / "a", "a", seed=1)
    make_run(tmp_path / "b", "b", compute_s=0.02, seed=1)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def compared(capsys, *words):
    """Return the exit status and the JSON of `workbench compare`."""
    status = cli.main(["compare", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def keys_of_page(heading):
    """Return the keys in the first table below a heading of the page for programs."""
    text = (DOCS / "programs.md").read_text("utf-8").partition(f"\n## {heading}\n")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {key.strip("` "): what.strip() for _, key, what, _ in (row.split("|") for row in rows)}


# -- compare ---------------------------------------------------------------------------------------


def test_runs_are_compared_as_json_with_ratios_to_the_first(pair, capsys):
    status, found = compared(capsys, *pair)
    first, second = found["runs"]
    assert (status, found["exit_code"]) == (0, 0)
    assert found["baseline"] == "a"
    assert set(first) == {*telling.ABOUT, *telling.METRICS, "eval_accuracy", "ratio"}
    assert (second["run"], second["state"], second["workers"]) == ("b", "finished", 2)
    assert second["step_median_s"] == pytest.approx(0.026)
    assert second["ratio"]["samples_per_s"] == pytest.approx(16 / 26)
    assert first["ratio"]["samples_per_s"] == 1
    assert first["bubble_share"] is None
    assert second["ratio"]["bubble_share"] is None
    assert first["eval_accuracy"] == 0.9


def test_runs_are_compared_in_words(pair, capsys):
    assert cli.main(["compare", *pair, "--fail-if", "wall_s > 1.5"]) == 1
    said = capsys.readouterr().out
    for word in ("samples/s", "ratio to a", "0.615", "wall_s > 1.5: TRUE"):
        assert word in said


@pytest.mark.parametrize(
    ("condition", "status", "held"),
    [
        ("samples_per_s < 0.95", 1, True),
        ("samples_per_s<0.5", 0, False),
        ("loss > 1.02", 0, False),
        ("loss > 0.05 abs", 1, True),
        ("eval_accuracy <= 1", 1, True),
        ("steps >= 31 abs", 0, False),
        ("bubble_share > 0.5", 2, None),
        ("sync_wait_share > 2", 2, None),  # that of the first is 0
    ],
)
def test_a_condition_sets_the_exit_status(pair, capsys, condition, status, held):
    code, found = compared(capsys, *pair, "--fail-if", condition)
    assert code == found["exit_code"] == status
    (check,) = found["checks"]
    assert (check["run"], check["held"]) == ("b", held)
    assert check["kind"] == ("value" if "abs" in condition else "ratio")


def test_what_could_not_be_checked_outweighs_what_held(pair, capsys):
    conditions = ["--fail-if", "samples_per_s < 0.95", "--fail-if", "bubble_share > 2"]
    assert compared(capsys, *pair, *conditions)[0] == 2


def test_every_later_run_is_checked(pair, tmp_path, capsys):
    make_run(tmp_path / "c", "a", compute_s=0.011)
    status, found = compared(capsys, *pair, str(tmp_path / "c"), "--fail-if", "wall_s > 1.2")
    assert status == 1
    told = [(one["run"], one["held"]) for one in found["checks"]]
    assert told == [("b", True), ("a (2)", False)]
    assert str(tmp_path / "c") in found["checks"][1]["why"]  # its name is the first one's too
    assert found["baseline"] == "a"
    assert [one["run"] for one in found["runs"]] == ["a", "b", "a (2)"]
    assert [one["name"] for one in found["runs"]] == ["a", "b", "a"]


def test_a_single_run_is_checked_against_values(pair, capsys):
    assert compared(capsys, pair[0], "--fail-if", "loss > 0.5 abs")[0] == 0
    assert compared(capsys, pair[0], "--fail-if", "loss > 0.1 abs")[0] == 1


@pytest.mark.parametrize("state", ["failed", "running"])
def test_a_run_that_failed_or_was_cut_off_is_no_success(tmp_path, capsys, state):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", state=state, error="rank 1 died" if state == "failed" else None)
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    status, found = compared(capsys, *places, "--fail-if", "samples_per_s < 0.5")
    assert status == 1
    assert [one["held"] for one in found["checks"]] == [False, True]
    assert compared(capsys, *places)[0] == 1
    assert compared(capsys, places[1])[0] == 1


def test_nothing_is_held_against_a_run_that_failed(tmp_path, capsys):
    make_run(tmp_path / "a", state="failed", error="rank 1 died")
    make_run(tmp_path / "b")
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert compared(capsys, *places, "--fail-if", "samples_per_s < 0.5")[0] == 2
    assert compared(capsys, *places, "--fail-if", "loss > 100 abs")[0] == 2
    assert compared(capsys, *places)[0] == 2
    assert compared(capsys, places[1])[0] == 0


def test_a_run_that_goes_on_is_not_checked(tmp_path, capsys):
    make_run(tmp_path / "a")
    folder = make_run(tmp_path / "b", state="running")
    (folder / "alive").write_text(json.dumps({"t": telling.time.time()}))
    places = [str(tmp_path / "a"), str(folder)]
    status, found = compared(capsys, *places, "--fail-if", "samples_per_s < 0.5")
    assert (status, found["runs"][1]["state"]) == (2, "running")
    status, found = compared(capsys, *places)
    assert (status, [one["held"] for one in found["checks"]]) == (2, [None])
    assert "running" in " ".join(found["notes"])
    assert "failed" not in " ".join(found["notes"])


def test_a_loss_that_became_no_number_is_above_every_limit():
    first = {"run": "a", "place": "a", "state": "finished", "diverged": False, "loss": 1.0}
    later = {**first, "run": "b", "diverged": True, "loss": None}
    checked = telling.parse_condition("loss > 1.02").check(first, later)
    assert checked.held is True
    assert "NaN or infinite" in checked.sentence


@pytest.mark.parametrize("text", ["", "loss", "loss >", "loss > much", "loss = 1", "loss > nan",
                                  "< 3", "loss > 1 relative"])  # fmt: skip
def test_a_condition_that_is_none_is_refused(pair, capsys, text):
    status, found = compared(capsys, pair[0], "--fail-if", text)
    assert (status, found["error"]["code"]) == (2, "WB-PLAN-251")


def test_an_unknown_metric_is_refused_with_a_list(pair, capsys):
    status, found = compared(capsys, *pair, "--fail-if", "samples_per_sec < 1")
    assert (status, found["error"]["code"]) == (2, "WB-PLAN-037")
    assert "samples_per_s" in found["error"]["next"]
    assert "eval_accuracy" in found["error"]["allowed"]


def test_of_a_job_folder_the_newest_run_is_taken(tmp_path, capsys):
    job = make_job(tmp_path / "job")
    status, found = compared(capsys, str(job))
    assert (status, found["error"]["code"]) == (2, "WB-PLAN-250")
    for number in (2, 9, 10):
        make_run(job / "runs" / str(number), f"run{number}")
    assert compared(capsys, str(job))[1]["runs"][0]["run"] == "run10"


def test_of_a_recorded_script_the_newest_run_is_taken(tmp_path, capsys):
    make_run(tmp_path / "workbench-runs" / "train" / "1", "first")
    make_run(tmp_path / "workbench-runs" / "train" / "2", "second")
    found = compared(capsys, str(tmp_path / "workbench-runs" / "train"))[1]
    assert found["runs"][0]["run"] == "second"


@pytest.mark.parametrize(("place", "code"), [("nothing", "WB-PLAN-249"), (".", "WB-RUN-036")])
def test_a_place_without_a_run_is_an_error(tmp_path, capsys, monkeypatch, place, code):
    monkeypatch.chdir(tmp_path)
    status, found = compared(capsys, place)
    assert (status, found["error"]["code"]) == (2, code)


def test_what_a_terminal_would_obey_is_not_printed(capsys):
    telling.say("run \x1b]0;title\x07\x1b[2J\u202e\tof\nanother")
    assert capsys.readouterr().out == "run  ]0;title  [2J \tof\nanother\n"


@pytest.mark.parametrize("plan", [{}, [], {"recipe": 3}])
def test_a_run_whose_description_is_damaged_is_refused_in_words(tmp_path, plan):
    about = {"plan": plan, disk.ROW_BYTES: RECORD.itemsize}
    (tmp_path / "run.json").write_text(json.dumps(about))
    with pytest.raises(RunError, match="WB-RUN-105"):
        follow(tmp_path, wait_s=0)


def test_errors_are_said_in_words_on_standard_error(capsys, tmp_path):
    assert cli.main(["compare", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "WB-PLAN-249" in err


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    def interrupt(given):
        raise KeyboardInterrupt

    monkeypatch.setitem(command._DO, "compare", interrupt)
    assert cli.main(["compare", "a"]) == 130


# -- follow ----------------------------------------------------------------------------------------


class FakeFollowed:
    """A followed run: each look is one step further, and the last one its end."""

    def __init__(self, folder, steps=3, state="finished"):
        self.name, self.folder, self.error, self.state = "a", folder, None, state
        self.is_over, self.over, self.closed, self.told = False, self, False, []
        self._step, self._steps = 0, steps
        if state == "failed":
            self.error = RunError("rank 1 died", code="WB-RUN-001")
        self.history = None

    def wait(self, timeout=None):  # as `run.over`
        self._step += 1
        self.is_over = self._step >= self._steps
        return self.is_over

    def snapshot(self):
        state = self.state if self.is_over else "running"
        return fake_snapshot(2, 10 * (self._step + 1), state=state) if self._step else (
            empty_snapshot(2, "starting"))  # fmt: skip

    def close(self):
        self.closed = True

    def __getattr__(self, name):
        if name in ("stop", "pause", "resume", "step", "inject", "interrupt"):
            return lambda *words: self.told.append((name, *words))
        raise AttributeError(name)


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """Have `follow` return fake runs; hand out what makes them, and what was asked for."""
    asked = []

    def set_up(**kind):
        run = FakeFollowed(make_run(tmp_path / "far"), **kind)
        module = types.ModuleType("workbench.jobs.followed")
        module.follow = lambda place, wait_s, gone=None: asked.append((place, wait_s)) or run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(telling, "figures", lambda run, state="": {"run": run.name})
        run.asked = asked
        return run

    return set_up


@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_following_prints_json_lines_until_the_end(followed, capsys, state, status):
    run = followed(state=state)
    assert cli.main(["follow", "ssh://host/dir", "--json"]) == status
    *lines, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["step"] for one in lines] == [0, 20, 30, 40]
    assert all(set(one) == set(telling.PROGRESS) for one in lines)
    assert lines[0]["loss"] is None
    assert lines[0]["sync_wait_share"] is None
    assert 0 < lines[1]["sync_wait_share"] < 1
    assert lines[1]["slow_rank"] == 1
    assert set(end) == set(telling.END)
    assert (end["event"], end["state"], end["exit_code"]) == ("end", state, status)
    assert end["error"] == ("rank 1 died" if state == "failed" else None)
    assert run.closed
    assert run.asked == [("ssh://host/dir", 60.0)]


def test_following_prints_words(followed, capsys):
    followed()
    assert cli.main(["follow", "ssh://host/dir"]) == 0
    said = capsys.readouterr().out
    assert "20/400" in said
    assert "records: " in said


def test_until_end_prints_the_end_alone(followed, capsys):
    run = followed()
    words = ["follow", "--json", "--until-end", "--wait", "inf", "kubectl", "logs", "pod"]
    assert cli.main(words) == 0
    assert [json.loads(one)["event"] for one in capsys.readouterr().out.splitlines()] == ["end"]
    assert run.asked == [(["kubectl", "logs", "pod"], None)]


def test_a_recorded_script_is_followed_in_its_newest_run(followed, tmp_path, capsys):
    run = followed()
    newest = make_run(tmp_path / "out" / "3")
    assert cli.main(["follow", str(tmp_path / "out"), "--json"]) == 0
    assert run.asked == [(str(newest), 60.0)]


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_a_wait_that_is_none_is_refused(followed, capsys, seconds):
    followed()
    assert cli.main(["follow", "x", f"--wait={seconds}", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "WB-PLAN-259"


def test_what_nobody_reads_any_more_ends_quietly(tmp_path):
    script = ("import sys\nfrom workbench.jobs import command\n"
              "def quit(given): raise BrokenPipeError\ncommand._DO['follow'] = quit\n"
              "from workbench.cli import main\nsys.exit(main(['follow', 'x']))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


# -- control ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["stop"], ("stop",)),
        (["pause"], ("pause",)),
        (["resume"], ("resume",)),
        (["interrupt"], ("interrupt",)),
        (["step"], ("step", 1)),
        (["step", "3"], ("step", 3)),
        (["inject", "slow=1:50ms"], ("inject", "slow=1:50ms")),
    ],
)
def test_an_order_reaches_the_run(followed, capsys, words, told):
    run = followed()
    assert cli.main(["control", "--json", "ssh://host/dir", *words]) == 0
    assert run.told == [told]
    assert json.loads(capsys.readouterr().out)["sent"]["do"] == words[0]
    assert run.closed


@pytest.mark.parametrize(("word", "when"), [("stop", "steps"), ("interrupt", "immediately")])
def test_the_command_says_when_an_order_is_carried_out(followed, capsys, word, when):
    followed()
    assert cli.main(["control", "ssh://host/dir", word]) == 0
    assert capsys.readouterr().out.split()[-1] == when


def test_a_place_that_is_neither_a_folder_nor_a_job_is_told_with_what_there_is(
    jobs, followed, tmp_path, monkeypatch, capsys
):
    run = followed()
    make_run(tmp_path / "trained")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["control", "--json", "traned", "stop"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "WB-RUN-112"
    assert str(tmp_path / "traned") in error["seen"]
    assert "trained" in error["allowed"]
    assert "running-job" in error["allowed"]
    assert (run.told, run.asked) == ([], [])


@pytest.mark.parametrize(
    ("words", "code"),
    [([], "WB-PLAN-252"), (["halt"], "WB-PLAN-252"), (["stop", "now"], "WB-PLAN-252"),
     (["step", "many"], "WB-PLAN-252"), (["step", "0"], "WB-PLAN-237")],
)  # fmt: skip
def test_what_is_no_order_is_refused_before_anything_is_sent(followed, capsys, words, code):
    run = followed()
    assert cli.main(["control", "--json", "ssh://host/dir", *words]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code
    assert (run.told, run.asked) == ([], [])


def test_a_run_that_has_ended_takes_no_orders(followed, capsys):
    followed().is_over = True
    assert cli.main(["control", "ssh://host/dir", "stop", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "WB-PLAN-253"


def test_orders_from_standard_input_are_signed_and_put_into_the_inbox(
    tmp_path, monkeypatch, capsys
):
    folder = make_run(tmp_path / "a")
    inbox = control.Inbox(folder, control.make_key(folder))
    full = control.order_text(control.Order("inject", faults=("slow=1:50ms",))).decode()
    monkeypatch.setattr(sys, "stdin", io.StringIO(f'{{"do": "stop"}}\n\n{full}\n'))
    assert cli.main(["control", "--stdin", str(folder)]) == 0
    assert {one.do for one in inbox.take()} == {"stop", "inject"}
    answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["sent"]["do"] for one in answers] == ["stop", "inject"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"do": "explode"}',
        '{"steps": 3}',
        '{"do": "stop", "more": 1}',
        '{"do": "inject", "faults": 3}',
    ],
)
def test_a_line_that_is_no_order_is_refused_and_the_next_one_taken(tmp_path, capsys, line):
    folder = make_run(tmp_path / "a")
    inbox = control.Inbox(folder, control.make_key(folder))
    assert command.relay(folder, [f"{line}\n", '{"do": "pause"}\n']) == 2
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["error"]["code"] in ("WB-PLAN-237", "WB-PLAN-238")
    assert second["sent"]["do"] == "pause"
    assert [one.do for one in inbox.take()] == ["pause"]


def test_without_a_key_no_order_is_put(tmp_path, capsys):
    assert command.relay(make_run(tmp_path / "a"), ['{"do": "stop"}']) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "WB-RUN-108"


# -- jobs ------------------------------------------------------------------------------------------


class FakePlatform:
    """A platform whose jobs are in the states that their ids name."""

    def __init__(self):
        self.cancelled = []

    def state(self, ticket):
        return JobState("cancelled" if ticket.id in self.cancelled else ticket.id, "(Why)")

    def logs(self, ticket, last):
        return f"{last} lines of {ticket.id}"

    def cancel(self, ticket):
        self.cancelled.append(ticket.id)

    def place(self, ticket):
        return "ssh://host/dir"


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Keep three jobs where this user's are looked for."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home" / "runs"))
    made = FakePlatform()
    monkeypatch.setattr(submitted, "platform", lambda name: made)
    kept = submitted.Jobs()
    for state in ("running", "failed", "finished"):
        kept.add(Ticket("slurm", state, str(tmp_path), 5.0), f"{state}-job")
    return kept


def listed(capsys, *words):
    status = cli.main(["jobs", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_jobs_are_listed(jobs, capsys):
    status, found = listed(capsys)
    assert status == 0
    assert [one["name"] for one in found["jobs"]] == ["running-job", "failed-job", "finished-job"]
    assert all(set(one) == set(telling.JOB) for one in found["jobs"])
    assert found["jobs"][0]["state"] == "running"
    assert found["notes"] == []
    assert cli.main(["jobs"]) == 0
    assert "finished-job" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "code"), [("running-job", 0), ("finished", 0), ("failed-job", 1)])
def test_a_job_that_is_asked_for_sets_the_exit_status(jobs, capsys, name, code):
    status, found = listed(capsys, name)
    assert (status, len(found["jobs"])) == (code, 1)


def test_a_job_is_cancelled(jobs, capsys):
    status, found = listed(capsys, "cancel", "running-job")
    assert (status, found["jobs"][0]["state"]) == (0, "cancelled")


def test_what_a_job_printed_is_printed(jobs, capsys):
    assert cli.main(["jobs", "logs", "failed-job", "--last", "7"]) == 0
    assert capsys.readouterr().out == "7 lines of failed\n"
    assert listed(capsys, "logs", "failed-job")[1] == {
        "name": "failed-job", "log": "200 lines of failed",
    }  # fmt: skip


@pytest.mark.parametrize(("words", "code"), [(["cancel"], "WB-PLAN-260"), (["logs"], "WB-PLAN-260"),
                                             (["none"], "WB-PLAN-037")])  # fmt: skip
def test_a_job_that_is_not_there_is_an_error(jobs, capsys, words, code):
    status, found = listed(capsys, *words)
    assert (status, found["error"]["code"]) == (2, code)


def test_a_submitted_job_is_followed_by_its_name(jobs, followed, capsys):
    run = followed()
    assert cli.main(["follow", "failed-job", "--json"]) == 0
    assert run.asked == [("ssh://host/dir", 60.0)]
    assert telling.end_of(jobs["failed-job"]) == "(Why)"
    assert telling.end_of(jobs["running-job"]) == ""


# -- run: what is started --------------------------------------------------------------------------


def parsed(*words):
    """Return the arguments of `workbench run`."""
    parser = argparse.ArgumentParser()
    command.add_job_commands(parser.add_subparsers(dest="command"))
    return parser.parse_args(["run", *words])


@pytest.fixture
def script(tmp_path):
    """Hand out a script that ends with the status in its second argument."""
    path = tmp_path / "train.py"
    path.write_text("import sys\nprint('trains', *sys.argv[1:])\nsys.exit(int(sys.argv[2]))\n")
    return path


@pytest.fixture
def has_torch(monkeypatch):
    monkeypatch.setattr(here, "find_spec", lambda name: name)


def test_what_follows_the_script_is_the_script_s(script):
    given = parsed("-n", "2", "--json", str(script), "--lr", "0.1", "-n", "7", "--json")
    assert (given.n, given.what) == (2, str(script))
    assert given.args == ["--lr", "0.1", "-n", "7", "--json"]


def test_several_processes_of_a_script_are_torchrun_s(script, has_torch):
    given = parsed("-n", "2", "--out", "o", str(script), "--lr", "1")
    (one,) = here.processes_of_script(script, given)
    assert one.command[1:6] == ("-m", "torch.distributed.run", "--standalone",
                                "--nproc-per-node", "2")  # fmt: skip
    assert one.command[6:] == ("-m", "workbench", "run", "--out", "o", str(script), "--lr", "1")


def test_a_script_alone_is_one_process_that_knows_what_it_is(script):
    (one,) = here.processes_of_script(script, parsed(str(script)))
    assert one.command == (sys.executable, "-m", "workbench", "run", str(script))
    assert here.is_rank(one.env)
    assert not here.is_rank({})
    assert here.is_rank({"RANK": "0"})
    assert here.is_rank({"TF_CONFIG": "{}"})


def test_several_processes_of_a_tensorflow_script_have_a_tf_config(script):
    script.write_text("import tensorflow as tf\n")
    found = here.processes_of_script(script, parsed("-n", "3", str(script)))
    configs = [json.loads(one.env["TF_CONFIG"]) for one in found]
    assert [one["task"] for one in configs] == [{"type": "worker", "index": i} for i in range(3)]
    assert len({json.dumps(one["cluster"]) for one in configs}) == 1
    places = configs[0]["cluster"]["worker"]
    assert len(set(places)) == 3
    assert all(one.startswith("127.0.0.1:") for one in places)
    (secret,) = {one.env["WORKBENCH_JOB_KEY"] for one in found}
    assert len(secret) == 32


def test_torchrun_needs_pytorch(script, monkeypatch):
    monkeypatch.setattr(here, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="WB-PLAN-258"):
        here.processes_of_script(script, parsed("-n", "2", str(script)))


def test_a_job_folder_says_which_processes_there_are(tmp_path, has_torch):
    (one,) = here.processes_of_job(make_job(tmp_path / "a", servers=1, processes=3))
    assert one.command[-2:] == ("3", str(tmp_path / "a" / "train.py"))
    (one,) = here.processes_of_job(make_job(tmp_path / "b", processes=1), ["x"])
    assert one.command == (sys.executable, str(tmp_path / "b" / "train.py"), "x")
    found = here.processes_of_job(
        make_job(tmp_path / "c", servers=1, processes=3, framework="tensorflow")
    )
    assert [one.serves for one in found] == [False, False, True]
    assert json.loads(found[2].env["TF_CONFIG"])["task"] == {"type": "ps", "index": 0}


@pytest.mark.parametrize("launch", [{"processes": "many"}, {"processes": 0}, {"servers": 2},
                                    {"framework": "jax"}, {"processes": 10**6}])  # fmt: skip
def test_a_job_that_does_not_say_so_is_refused(tmp_path, launch):
    with pytest.raises(PlanError, match="WB-PLAN-257"):
        here.processes_of_job(make_job(tmp_path / "a", **launch))


@pytest.mark.parametrize(
    ("words", "code"),
    [(["nothing.py"], "WB-PLAN-254"), (["."], "WB-PLAN-254"), (["-n", "0", "train.py"],
     "WB-PLAN-255"), (["-n", "2", "job"], "WB-PLAN-256"), (["--plain", "job"], "WB-PLAN-256"),
     (["--strategy", "mirrored", "job"], "WB-PLAN-256"),
     (["--strategy", "", "train.py"], "WB-PLAN-261"),
     (["--strategy", "mirrored --seeds 2", "train.py"], "WB-PLAN-261"),
     (["--strategy", "mirrored --to-job x", "train.py"], "WB-PLAN-261"),
     (["-n", "1", "--strategy", "mirrored -n 3", "train.py"], "WB-PLAN-261"),
     (["--out", "job", "train.py"], "WB-PLAN-263")],
)  # fmt: skip
def test_what_cannot_run_is_refused(tmp_path, monkeypatch, script, capsys, words, code):
    make_job(tmp_path / "job")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--json", *words]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


def test_a_cell_becomes_a_job_folder_first(tmp_path, monkeypatch, script):
    made = []

    def write_job(plan, folder, *, plain):
        made.append((plan, folder, plain))
        return make_job(tmp_path / "job", processes=1)

    module = types.ModuleType("workbench.export.folder")
    module.write_job = write_job
    monkeypatch.setitem(sys.modules, module.__name__, module)
    started = []
    monkeypatch.setattr(Started, "attend", lambda self, given: started.append(self._wanted) or 0)
    words = ["run", "-n", "2", "--strategy", "sharded --steps 5", "--out", "o", str(script)]
    assert cli.main(words) == 0
    ((plan, folder, plain),) = made
    assert (plan.strategy, plan.workers, plan.overrides) == ("sharded", 2, {"steps": 5})
    assert plan.recipe.source == script.read_text()
    assert (folder, plain) == (Path("o"), False)
    assert started[0][0].command[-1].endswith("job/train.py")


# -- run: from the start to the end ----------------------------------------------------------------


def python(source, **more):
    """Return a process of some Python."""
    return Process((sys.executable, "-c", source), **more)


def attended(processes, place=None, *, as_json=True):
    return Started(processes, place).attend(argparse.Namespace(json=as_json))


@pytest.mark.parametrize(("status", "code", "state"), [(0, 0, "finished"), (3, 1, "failed")])
def test_a_plain_script_runs_and_its_end_is_told(script, capfd, status, code, state):
    assert cli.main(["run", "--plain", "--json", str(script), "x", str(status)]) == code
    out, err = capfd.readouterr()
    end = json.loads(out)
    assert set(end) == set(telling.END)
    assert (end["state"], end["exit_code"], end["folder"]) == (state, code, None)
    assert "trains x" in err  # standard output is JSON alone


def test_in_words_the_script_has_standard_output(script, capfd):
    assert cli.main(["run", "--plain", str(script), "x", "0"]) == 0
    assert capfd.readouterr().out == "trains x 0\n"


def test_one_that_fails_ends_the_others(capfd):
    waits = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " \
            "print('ready', flush=True); signal.pause()"  # fmt: skip
    assert attended([python(waits), python("import sys; sys.exit(2)")]) == 1
    assert json.loads(capfd.readouterr().out)["exit_code"] == 1


def test_servers_end_when_all_workers_have(capfd):
    serves = python("import signal; signal.pause()", serves=True)
    assert attended([python("pass"), serves]) == 0
    assert json.loads(capfd.readouterr().out)["state"] == "finished"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_passed_on_once_and_the_exit_status_is_130(tmp_path, capfd, name):
    mark = tmp_path / "heard"
    source = f"""
import os, pathlib, signal, sys
def heard(number, frame):
    with open({str(mark)!r}, "a") as file:
        file.write(f"{{number}} ")
    sys.exit(0)
signal.signal(signal.{name}, heard)
os.kill(os.getppid(), signal.{name})
signal.pause()
"""
    assert attended([python(source)]) == 130
    assert mark.read_text() == f"{getattr(here.signal, name)} "
    assert json.loads(capfd.readouterr().out)["exit_code"] == 130


def test_what_is_deaf_to_signals_is_killed_with_what_it_started():
    deaf = (
        "import os, signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']); "
        "os.write(1, b'up'); os.kill(os.getppid(), signal.SIGTERM); child.wait()"
    )
    assert said_and_status(deaf) == (b"up", 130)


def test_a_process_ends_with_the_one_that_started_it():
    inner = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
        "os.write(1, b'up'); os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    )
    assert said_and_status(inner) == (b"up", -9)


def said_and_status(inner):
    """Return what a process that starts another one says with it, once both are gone."""
    source = f"""
import argparse, sys
from workbench.jobs import here
here.GRACE_S = 0.0
process = here.Process((sys.executable, "-c", {inner!r}))
sys.exit(here.Started([process], None).attend(argparse.Namespace(json=False)))
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        said = process.stdout.read()  # ends when the last process that has it is gone
    return said, process.returncode


def test_the_records_of_this_run_are_its_result(tmp_path, monkeypatch, capfd):
    made = make_run(tmp_path / "made", "now", compute_s=0.02)
    make_run(tmp_path / "out" / "1", "before")
    copies = f"import shutil; shutil.copytree({str(made)!r}, {str(tmp_path / 'out' / '2')!r})"
    monkeypatch.setattr(here, "follow_place", _no_follower)
    assert attended([python(copies)], tmp_path / "out") == 0
    end = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert end["folder"] == str(tmp_path / "out" / "2")
    assert end["figures"]["run"] == "now"
    assert end["figures"]["step_median_s"] == pytest.approx(0.026)


def _no_follower(words):
    raise RunError("nothing to follow", code="WB-RUN-001")


@pytest.mark.parametrize("as_json", [True, False])
def test_progress_is_told_while_it_runs(tmp_path, monkeypatch, capfd, as_json):
    made = make_run(tmp_path / "made")
    go = tmp_path / "go"
    os.mkfifo(go)
    copies = (f"import shutil; shutil.copytree({str(made)!r}, {str(tmp_path / 'out' / '1')!r}); "
              f"open({str(go)!r}).read()")  # fmt: skip
    run = FakeFollowed(made)

    def tell(self, run, whole=telling.Teller.tell):
        whole(self, run)
        if go.exists():  # the process goes on once something was said
            go.open("w").close()
            go.unlink()

    monkeypatch.setattr(here, "LINE_S", 0.0)
    monkeypatch.setattr(telling.Teller, "tell", tell)
    monkeypatch.setattr(here, "follow_place", lambda words: run)
    assert attended([python(copies)], tmp_path / "out", as_json=as_json) == 0
    out, err = capfd.readouterr()
    assert run.closed
    if as_json:
        events = [json.loads(line)["event"] for line in out.splitlines()]
        assert events[0] == "progress"
        assert events[-1] == "end"
    else:
        assert (out, "0 steps" in err) == ("", True)


def test_a_run_that_failed_fails_although_its_processes_did_not(tmp_path, monkeypatch, capfd):
    made = make_run(tmp_path / "made", state="failed", error="rank 1 died")
    copies = f"import shutil; shutil.copytree({str(made)!r}, {str(tmp_path / 'out' / '1')!r})"
    monkeypatch.setattr(here, "follow_place", _no_follower)
    assert attended([python(copies)], tmp_path / "out") == 1
    end = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (end["state"], end["error"]) == ("failed", "rank 1 died")


# -- run: one of several processes -----------------------------------------------------------------


def test_a_rank_records_the_script(tmp_path, script, monkeypatch):
    calls = []
    module = types.SimpleNamespace(record_script=lambda *words: calls.append(words))
    monkeypatch.setattr(here.importlib, "import_module", lambda name: calls.append(name) or module)
    monkeypatch.setenv(here._AS_RANK, "1")
    assert here.run_rank(["--out", "o", "--json", str(script), "--lr", "1"]) == 0
    assert calls == ["workbench.engine.job", (script, ["--lr", "1"], "o")]
    assert here._AS_RANK not in os.environ


@pytest.mark.parametrize("kind", ["plain", "job"])
def test_a_rank_that_records_nothing_itself_loads_nothing_of_the_command_line(
    tmp_path, monkeypatch, kind
):
    job = make_job(tmp_path / "job")
    (job / "train.py").write_text(
        "import sys\nassert __name__ == '__main__'\n"
        "print([m for m in ('workbench.session', 'workbench.cli', 'numpy') if m in sys.modules], "
        "sys.argv[1:], sys.path[0])\n"
    )
    words = [str(job), "x"] if kind == "job" else ["--plain", str(job / "train.py"), "x"]
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "run", *words], capture_output=True, text=True,
        env={**os.environ, "RANK": "0", "PYTHONPATH": str(Path(cli.__file__).parents[1])},
    )  # fmt: skip
    assert done.stdout == f"[] ['x'] {job}\n", done.stderr


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "keys"),
    [("Keys of a run", {**telling.ABOUT, **telling.METRICS}),
     ("Keys of progress", telling.PROGRESS), ("Keys of the end", telling.END),
     ("Jobs", telling.JOB)],
)  # fmt: skip
def test_the_page_lists_the_keys(heading, keys):
    assert keys_of_page(heading) == keys
