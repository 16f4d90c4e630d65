"""Mistakes of the first day: the message says what was seen, what is allowed and what to do."""

import sys

import pytest
from needs import need
from notebook_shell import WAIT_S

import workbench as wb
from workbench.errors import ClusterError, PlanError, RunError
from workbench.session.state import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.fixture
def untouched(book):
    """Fails when an engine was asked to do anything, or cannot do anything afterwards."""
    engines = session.cluster.engine_set
    asked, submit = [], engines.submit
    engines.submit = lambda *args, **rest: asked.append(args) or submit(*args, **rest)
    yield
    del engines.submit
    assert asked == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%%distributed miror", ["strategy", "'miror'", "did you mean 'mirrored'?"]),
        ("%%distributed mirrored,ddd", ["'ddd'", "did you mean 'ddp'?"]),
        ("%%distributed mirrored -o bucket=3", ["option of mirrored", "did you mean 'bucket_mb'?"]),
        ("%%distributed mirrored -o bucket_mb=big", ["bucket_mb", "'big'", "a number"]),
        ("%%distributed mirrored -o bucket_mb", ["name and a value", "-o bucket_mb=10"]),
        ("%%distributed one_device -o x=1", ["takes no options", "'x'"]),
        ("%%distributed mirrored --epochs 0", ["--epochs", "'0'", "at least 1"]),
        ("%%distributed mirrored --steps -3", ["--steps", "'-3'", "at least 1"]),
        ("%%distributed mirrored -n 0", ["--workers", "'0'", "at least 1"]),
        ("%%distributed mirrored -n 100000", ["more workers", "100000", "1 to 256"]),
        ("%%distributed mirrored --batch-size 1", ["smaller than", "batch_size=1 over 2", "-n 1"]),
        ("%%distributed mirrored --seed -1", ["--seed", "'-1'", "at least 0"]),
        ("%%distributed sharded --framework tensorflow", ["not available", "--framework torch"]),
        ("%%distributed mirrored --framework jax", ["framework", "'jax'", "tensorflow, torch"]),
        ("%%distributed mirrored --checkpoint /dev/null", ["this is a file", "another folder"]),
        ("%%distributed mirrored --checkpoint-every 5", ["not where", "--checkpoint DIR"]),
        ("%%distributed mirrored --on-failure replace", ["from a checkpoint", "--checkpoint DIR"]),
        ("%%distributed --checkpoint d", ["names no strategy", "--checkpoint"]),
        ("%%distributed mirrored --on-failure pray", ["'pray'", "stop, continue, replace"]),
        ("%%distributed mirrored --inject bandwidth=fast", ["bandwidth=fast", "slow=RANK:50ms"]),
        ("%%distributed one_device --inject latency=5ms", ["latency=5ms", "own links"]),
        ("%%distributed mirrored --inject slow=9:50ms", ["slow=9:50ms", "ranks 0 to 1"]),
        ("%%distributed mirrored --inject slow", ["slow", "slow=RANK:50ms"]),
        ("%%distributed mirrored --plot widget", ["needs a notebook", "--plot text"]),
        ("%%distributed mirrored --plot film", ["--plot", "film"]),
        ("%%distributed mirrored --ranks 0", ["A strategy chooses its own workers", "-n"]),
        ("%%distributed --epochs 3", ["names no strategy", "--epochs", "%%distributed mirrored"]),
        ("%%distributed --inject jitter=5ms", ["names no strategy", "--inject"]),
        ("%%distributed mirrored --speed 9", ["--speed 9", "%%distributed? shows the help"]),
        ("%%distributed --ranks x", ["Ranks were not understood", "'x'", "0-2"]),
        ("%%distributed --ranks 2-0", ["goes upwards", "'2-0'"]),
        ("%%distributed mirrored --name 'open", ["not understood"]),
        ("%%distributed parameter_server -o servers=0", ["servers", "1 to 64", "servers=1"]),
        ("%%distributed parameter_server -o max_staleness=-1", ["max_staleness", "at least 0"]),
        ("%%distributed ps -o sync=true -o max_staleness=2", ["exclude", "leave one of them out"]),
        ("%%distributed mirrored -o max_staleness=2", ["one of parameter_server", "parameter_ser"]),
        (
            "%%distributed one_device -o compress=fp16",
            ["one of mirrored", "%%distributed mirrored"],
        ),
        ("%%distributed model_split -o servers=2", ["one of parameter_server", "schedule"]),
        ("%%distributed mirrored -o compress=topk:2", ["'topk:2'", "topk:FRACTION"]),
        ("%%distributed local_sgd -o every=0", ["every", "at least 1", "every=1"]),
        ("%%distributed model_split -o microbatches=1", ["one microbatch per worker", "2 or more"]),
        ("%%distributed model_split -o schedule=naive -o microbatches=4", ["has one microbatch"]),
        (
            "%%distributed model_split -o schedule=interleaved -o microbatches=5",
            ["do not divide into them", "microbatches=4"],
        ),
        (
            "%%distributed model_split -o microbatches=16 --batch-size 8",
            ["more microbatches than samples", "at most 8"],
        ),
        ("%%distributed hybrid -o stages=3", ["do not fill whole pipelines", "-n 3"]),
    ],
)
def test_a_line_that_cannot_be_run_is_refused_before_engines_are_touched(
    book, untouched, line, words
):
    cell = book.refused(f"{line}\nwb.fit()\n", *words)
    assert isinstance(cell.error, PlanError)
    assert "Traceback" not in cell.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%cluster start 0", ["number of engines", "'0'", "at least 1"]),
        ("%cluster start many", ["'many'", "at least 1"]),
        ("%cluster start 2 --keep", ["started without --keep", "%cluster stop"]),
        ("%cluster start 3 --devices cpu", ["other devices", "'cpu'", "%cluster stop"]),
        ("%cluster launch", ["action", "'launch'"]),
        ("%cluster attach nowhere", ["This notebook has a cluster", "%cluster stop"]),
        ("%cluster restart 9", ["no such engine", "9", "0, 1"]),
        ("%cluster logs 9", ["no such engine", "9"]),
        ("%distributed", ["Which strategy?", "mirrored"]),
        ("%distributed mirrored --recipe nowhere", ["run", "'nowhere'"]),
        ("%push", ["Which variables?", "%push x y"]),
        ("%push no_such_name", ["no such name", "no_such_name"]),
        ("%pull x --from 3", ["--from", "%pull loss"]),
        ("%pull a b --as c", ["--as", "a, b"]),
        ("%%rank\n1", ["Which rank?", "%%rank 0"]),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_before_engines_are_touched(
    book, untouched, line, words
):
    book.refused(line, *words)


def test_fit_in_a_plain_cell_says_which_magic_to_put_on_top(book, untouched):
    cell = book.refused("wb.fit(1, 2)", "outside a training run", "%%distributed mirrored")
    assert isinstance(cell.error, RunError)
    book.refused("wb.prepare(1, 2)", "wb.prepare", "%%distributed mirrored on top")


def test_fit_in_a_cell_without_strategy_says_which_magic_to_put_on_top(book):
    book.refused("%%distributed\nwb.fit(1, 2)", "outside a training run", "%%distributed mirrored")
    works(book)


def works(book):
    assert book.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]


def test_a_strategy_cell_that_trains_nothing_is_an_error(book):
    book.refused(
        "%%distributed mirrored --plot off\nx = 1", "Nothing was distributed", "wb.fit", "0 steps"
    )
    book.refused("%%distributed mirrored --plot off\n   ", "The cell is empty")
    works(book)


def test_a_variable_that_only_the_notebook_has_is_named_with_the_way_to_push_it(book):
    book.namespace["only_here"] = 5
    book.refused(
        "%%distributed\nprint(only_here)",
        "'only_here' is not defined",
        "exists in the notebook, but not on the engines",
        "%push only_here",
    )
    book.ok("%push only_here")
    assert book.ok("%%distributed\nonly_here").lines() == ["[ranks 0-1] 5"]
    book.ok("import fractions as fr")
    book.refused("%%distributed\nfr.Fraction(1)", "import fractions in the cell")
    book.refused("%%distributed mirrored --plot off\nlen(fr)", "import fractions in the cell")
    missing = book.refused("%%distributed\nnowhere_at_all", "nowhere_at_all")
    assert "%push" not in str(missing.error)


GOOD = {
    "model": "nn.Linear(4, 2)",
    "data": "wb.data.synthetic(64, shape=(4,), classes=2)",
    "loss": "nn.CrossEntropyLoss()",
    "optimizer": "lambda p: torch.optim.SGD(p, 0.1)",
    "batch_size": "8",
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": None}, ["not given model"]),
        ({"data": None}, ["not given data"]),
        ({"optimizer": None}, ["not given optimizer"]),
        ({"loss": None}, ["What is minimised is not clear", "neither", "CrossEntropyLoss()"]),
        ({"loss": "nn.CrossEntropyLoss"}, ["make an instance: CrossEntropyLoss()"]),
        ({"model": "'resnet'"}, ["no torch.nn.Module", "'str'", "wb.fit(model"]),
        ({"model": "nn.Linear"}, ["no torch.nn.Module", "class Linear"]),
        ({"batch_size": "1"}, ["smaller than", "batch_size=1 over 2 workers", "-n 1"]),
        ({"batch_size": "0"}, ["batch_size", "0", "at least 1"]),
        ({"epochs": "-1"}, ["epochs", "-1", "at least 1"]),
    ],
)
def test_what_fit_is_passed_is_checked_on_every_rank_and_shown_once(book, changed, words):
    given = {**GOOD, **changed}
    call = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    cell = book.refused(
        f"%%distributed mirrored --plot off\nimport torch\nfrom torch import nn\nwb.fit({call})",
        "Ranks 0-1 failed: FitError",
        *words,
    )
    assert cell.stdout.count("[ranks 0-1] FitError:") <= 1
    assert cell.seconds < 10


CHAIN = "nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))"
BRANCH = """
class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        h = self.a(x)
        if h.sum().item() > 0:
            h = h * 2
        return self.b(h)
"""


@pytest.mark.parametrize(
    ("line", "before", "changed", "words"),
    [
        ("parameter_server -o servers=5", "", {}, ["5 servers, 4 tensors", "-o servers=4"]),
        (
            "parameter_server", "", {"optimizer": "lambda p: torch.optim.LBFGS(p)"},
            ["closure", "'LBFGS'"],
        ),
        (
            "central_storage", "", {"model": "nn.Embedding(4, 2, sparse=True)"},
            ["has sparse ones", "sparse=False"],
        ),
        ("model_split", "", {"model": "nn.Sequential(nn.Linear(4, 2))"}, ["1 layers for 2 stages"]),
        (
            "model_split -o schedule=interleaved -o stages_per_worker=3", "", {},
            ["3 layers for 6 stages", "-o stages_per_worker=1"],
        ),
        ("model_split -o microbatches=16", "", {}, ["more microbatches than samples", "at most 8"]),
        ("model_split -o split_at=head", "", {}, ["'head'", "0, 1, 2", "leave split_at out"]),
        ("model_split", BRANCH, {"model": "Branch()"}, ["traced", "line 11", "[first, second]"]),
        ("tensor_parallel -o plan=head=col", "", {}, ["'head'", "-o plan=auto"]),
    ],
)  # fmt: skip
def test_what_a_strategy_cannot_train_is_named_on_every_rank(book, line, before, changed, words):
    given = {**GOOD, "model": CHAIN, **changed}
    call = ", ".join(f"{name}={value}" for name, value in given.items())
    source = f"import torch\nfrom torch import nn\n{before}\nwb.fit({call}, steps=2)"
    cell = book.refused(
        f"%%distributed {line} --plot off\n{source}", "Ranks 0-1 failed: ", "seen:", "next:", *words
    )
    assert cell.seconds < 20


def test_batchnorm_under_microbatches_is_warned_of_in_the_notebook(book):
    model = "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))"
    call = ", ".join(f"{name}={value}" for name, value in {**GOOD, "model": model}.items())
    book.ok(
        "%%distributed model_split --plot off\n"
        f"import torch\nfrom torch import nn\nwb.fit({call}, steps=2)"
    )
    assert any("normalises over a microbatch" in note for note in book["_run"].snapshot().notes)


def test_after_all_these_mistakes_the_cluster_trains(book):
    call = ", ".join(f"{name}={value}" for name, value in GOOD.items())
    source = f"import torch\nfrom torch import nn\nwb.fit({call}, steps=2)"
    book.ok(f"%%distributed mirrored --plot off\n{source}")
    run = session.cluster.run(source, strategy="mirrored").wait(WAIT_S)
    assert run.state == "finished"
    with pytest.raises(PlanError, match="strategy"):
        session.cluster.run(source, strategy="miror")
    with pytest.raises(PlanError, match="source code or a function"):
        session.cluster.run(3, strategy="mirrored")
    with pytest.raises(PlanError, match="no such argument"):
        session.cluster.run(source, strategy="mirrored", epoch=3)
    with pytest.raises(PlanError, match="lambda"):
        session.cluster.run(lambda: 1, strategy="mirrored")


def test_without_a_cluster_the_command_that_starts_one_is_offered(book, monkeypatch):
    monkeypatch.setattr(session, "cluster", None)
    for cell in ("%%distributed\n1", "%%distributed mirrored\n1", "%push book", "%cluster"):
        book.namespace["book"] = 1
        refused = book.refused(cell, "No cluster is running", "%cluster start 2")
        assert isinstance(refused.error, ClusterError)
    with pytest.raises(ClusterError, match="%cluster start 2"):
        wb.calibrate()


def test_a_framework_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ClusterError, match=r"distributed-workbench\[tensorflow\]"):
        wb.Cluster(1, framework="tensorflow")
    with pytest.raises(PlanError, match="'jax'"):
        wb.Cluster(1, framework="jax")


def test_clusters_that_cannot_be_are_refused_before_a_process_is_started():
    import psutil

    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(PlanError, match="1 to 256"):
        wb.Cluster(1000)
    with pytest.raises(PlanError, match="devices"):
        wb.Cluster(1, devices="tpu")
    with pytest.raises((PlanError, ClusterError), match=r"GPU|CUDA"):
        wb.Cluster(1, devices="97")
    assert {child.pid for child in psutil.Process().children()} <= before
