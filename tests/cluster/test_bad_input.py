"""Mistakes of the first day: the message says what was seen, what is allowed and what to do."""

import sys

import pytest
from needs import need
from notebook_shell import WAIT_S

import workbench as wb
from workbench.errors import ClusterError, PlanError, RunError
from workbench.notebook.session import session

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
        (
            "%%distributed mirrored -o bucket=3",
            ["option of", "mirrored", "did you mean 'bucket_mb'?"],
        ),
        ("%%distributed mirrored -o bucket_mb=big", ["bucket_mb", "'big'", "a number"]),
        ("%%distributed mirrored -o bucket_mb", ["WB-PLAN-094"]),
        ("%%distributed one_device -o x=1", ["WB-PLAN-006", "'x'"]),
        ("%%distributed mirrored --epochs 0", ["--epochs", "'0'", "at least 1"]),
        ("%%distributed mirrored --steps -3", ["--steps", "'-3'", "at least 1"]),
        ("%%distributed mirrored -n 0", ["--workers", "'0'", "at least 1"]),
        ("%%distributed mirrored -n 100000", ["WB-PLAN-100", "100000", "1 to 256"]),
        ("%%distributed mirrored --batch-size 1", ["WB-PLAN-087", "batch_size=1", "-n 1"]),
        ("%%distributed mirrored --seed -1", ["--seed", "'-1'", "at least 0"]),
        ("%%distributed sharded --framework tensorflow", ["WB-PLAN-001", "--framework torch"]),
        ("%%distributed mirrored --framework jax", ["framework", "'jax'", "tensorflow, torch"]),
        ("%%distributed mirrored --checkpoint /dev/null", ["WB-PLAN-016"]),
        ("%%distributed mirrored --checkpoint-every 5", ["WB-PLAN-013"]),
        ("%%distributed mirrored --on-failure replace", ["WB-PLAN-014"]),
        ("%%distributed --checkpoint d", ["WB-PLAN-129", "--checkpoint"]),
        ("%%distributed mirrored --on-failure pray", ["'pray'", "stop, continue, replace"]),
        ("%%distributed mirrored --inject bandwidth=fast", ["bandwidth=fast", "slow=RANK:50ms"]),
        ("%%distributed one_device --inject latency=5ms", ["latency=5ms", "WB-PLAN-038"]),
        ("%%distributed mirrored --inject slow=9:50ms", ["slow=9:50ms", "ranks 0 to 1"]),
        ("%%distributed mirrored --inject slow", ["slow", "slow=RANK:50ms"]),
        ("%%distributed mirrored --plot widget", ["WB-PLAN-150"]),
        ("%%distributed mirrored --plot film", ["--plot", "film"]),
        ("%%distributed mirrored --ranks 0", ["WB-PLAN-130", "-n"]),
        ("%%distributed --epochs 3", ["WB-PLAN-129", "--epochs"]),
        ("%%distributed --inject jitter=5ms", ["WB-PLAN-129", "--inject"]),
        ("%%distributed mirrored --speed 9", ["--speed 9", "%%distributed?"]),
        ("%%distributed --ranks x", ["WB-PLAN-159", "'x'", "0-2"]),
        ("%%distributed --ranks 2-0", ["WB-PLAN-160", "'2-0'"]),
        ("%%distributed mirrored --name 'open", ["WB-PLAN-157"]),
        ("%%distributed parameter_server -o servers=0", ["servers", "1 to 64", "servers=1"]),
        ("%%distributed parameter_server -o max_staleness=-1", ["max_staleness", "at least 0"]),
        ("%%distributed ps -o sync=true -o max_staleness=2", ["WB-PLAN-007"]),
        (
            "%%distributed mirrored -o max_staleness=2",
            ["WB-PLAN-005", "%%distributed parameter_server"],
        ),
        (
            "%%distributed one_device -o compress=fp16",
            ["WB-PLAN-005", "%%distributed mirrored"],
        ),
        (
            "%%distributed model_split -o servers=2",
            ["WB-PLAN-005", "%%distributed parameter_server"],
        ),
        ("%%distributed mirrored -o compress=topk:2", ["'topk:2'", "topk:FRACTION"]),
        ("%%distributed local_sgd -o every=0", ["every", "at least 1", "every=1"]),
        ("%%distributed model_split -o microbatches=1", ["WB-PLAN-080", "2 or more"]),
        ("%%distributed model_split -o schedule=naive -o microbatches=4", ["WB-PLAN-079"]),
        (
            "%%distributed model_split -o schedule=interleaved -o microbatches=5",
            ["WB-PLAN-081", "microbatches=4"],
        ),
        (
            "%%distributed model_split -o microbatches=16 --batch-size 8",
            ["WB-PLAN-082", "at most 8"],
        ),
        ("%%distributed hybrid -o stages=3", ["WB-PLAN-083", "-n 3"]),
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
        ("%cluster start 2 --keep", ["WB-PLAN-128"]),
        ("%cluster start 3 --devices cpu", ["'--devices cpu'", "WB-PLAN-127"]),
        ("%cluster launch", ["action", "'launch'"]),
        ("%cluster attach nowhere", ["WB-CLUSTER-043"]),
        ("%cluster restart 9", ["WB-CLUSTER-006", "9", "0, 1"]),
        ("%cluster logs 9", ["WB-CLUSTER-006", "9"]),
        ("%distributed", ["WB-PLAN-059"]),
        ("%distributed mirrored --recipe nowhere", ["run", "'nowhere'"]),
        ("%push", ["WB-PLAN-138", "%push x y"]),
        ("%push 'open", ["WB-PLAN-157"]),
        ("%push no_such_name", ["WB-PLAN-134", "no_such_name"]),
        ("%pull x --from 3", ["--from", "%pull loss"]),
        ("%pull a b --as c", ["WB-PLAN-135", "a, b"]),
        ("%%rank\n1", ["WB-PLAN-060"]),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_before_engines_are_touched(
    book, untouched, line, words
):
    book.refused(line, *words)


def test_fit_in_a_plain_cell_says_which_magic_to_put_on_top(book, untouched):
    cell = book.refused("wb.fit(1, 2)", "WB-RUN-007")
    assert isinstance(cell.error, RunError)
    book.refused("wb.prepare(1, 2)", "wb.prepare", "WB-RUN-007")


def test_fit_in_a_cell_without_strategy_says_which_magic_to_put_on_top(book):
    book.refused("%%distributed\nwb.fit(1, 2)", "WB-RUN-007")
    works(book)


def works(book):
    assert book.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]


def test_a_strategy_cell_that_trains_nothing_is_an_error(book):
    book.refused("%%distributed mirrored --plot off\nx = 1", "WB-RUN-092", "wb.fit")
    book.refused("%%distributed mirrored --plot off\n   ", "WB-PLAN-085")
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
    book.refused("%%distributed\nfr.Fraction(1)", "import fractions as fr")
    book.refused("%%distributed mirrored --plot off\nlen(fr)", "import fractions as fr")
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
        ({"model": None}, ["WB-FIT-005", "model"]),
        ({"data": None}, ["WB-FIT-005", "data"]),
        ({"optimizer": None}, ["WB-FIT-005", "optimizer"]),
        ({"loss": None}, ["WB-FIT-017", "neither", "CrossEntropyLoss()"]),
        ({"loss": "nn.CrossEntropyLoss"}, ["make an instance: CrossEntropyLoss()"]),
        ({"model": "'resnet'"}, ["WB-FIT-059", "'str'"]),
        ({"model": "nn.Linear"}, ["WB-FIT-059", "class Linear"]),
        ({"batch_size": "1"}, ["WB-FIT-016", "batch_size=1 over 2 workers", "-n 1"]),
        ({"batch_size": "0"}, ["batch_size", "0", "WB-FIT-014"]),
        ({"epochs": "-1"}, ["epochs", "-1", "WB-FIT-014"]),
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
        ("parameter_server -o servers=5", "", {}, ["5 servers", "4 parameter", "-o servers=4"]),
        (
            "parameter_server", "", {"optimizer": "lambda p: torch.optim.LBFGS(p)"},
            ["WB-FIT-046", "'LBFGS'"],
        ),
        (
            "sharded", "", {"model": "nn.Embedding(4, 2, sparse=True)"},
            ["WB-FIT-028"],
        ),
        ("model_split", "", {"model": "nn.Sequential(nn.Linear(4, 2))"}, ["1 layer for 2 stages"]),
        (
            "model_split -o schedule=interleaved -o stages_per_worker=3", "", {},
            ["3 layers for 6 stages", "-o stages_per_worker=1"],
        ),
        ("model_split -o microbatches=16", "", {}, ["WB-PLAN-082", "at most 8"]),
        ("model_split -o split_at=head", "", {}, ["'head'", "0, 1, 2", "remove split_at"]),
        ("model_split", BRANCH, {"model": "Branch()"}, ["WB-FIT-148", "line 11"]),
        ("tensor_parallel -o plan=head=col", "", {}, ["'head'", "WB-FIT-153"]),
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
    assert any("BatchNorm layers: 1." in note for note in book["_run"].snapshot().notes)


def test_after_all_these_mistakes_the_cluster_trains(book):
    call = ", ".join(f"{name}={value}" for name, value in GOOD.items())
    source = f"import torch\nfrom torch import nn\nwb.fit({call}, steps=2)"
    book.ok(f"%%distributed mirrored --plot off\n{source}")
    run = session.cluster.run(source, strategy="mirrored").wait(WAIT_S)
    assert run.state == "finished"
    with pytest.raises(PlanError, match=r"strategy.*WB-PLAN-037"):
        session.cluster.run(source, strategy="miror")
    with pytest.raises(PlanError, match="WB-PLAN-102"):
        session.cluster.run(3, strategy="mirrored")
    with pytest.raises(PlanError, match="WB-PLAN-095"):
        session.cluster.run(source, strategy="mirrored", epoch=3)
    with pytest.raises(PlanError, match="WB-PLAN-035"):
        session.cluster.run(lambda: 1, strategy="mirrored")


def test_without_a_cluster_the_command_that_starts_one_is_offered(book, monkeypatch):
    monkeypatch.setattr(session, "cluster", None)
    for cell in ("%%distributed\n1", "%%distributed mirrored\n1", "%push book", "%cluster"):
        book.namespace["book"] = 1
        refused = book.refused(cell, "No cluster is running", "WB-CLUSTER-044")
        assert isinstance(refused.error, ClusterError)
    with pytest.raises(ClusterError, match="WB-CLUSTER-044"):
        wb.calibrate()


def test_a_framework_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ClusterError, match=r"WB-CLUSTER-036[\s\S]*tensorflow\]"):
        wb.Cluster(1, framework="tensorflow")
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'jax'"):
        wb.Cluster(1, framework="jax")


def test_clusters_that_cannot_be_are_refused_before_a_process_is_started():
    import psutil

    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(PlanError, match=r"WB-PLAN-100[\s\S]*256"):
        wb.Cluster(1000)
    with pytest.raises(PlanError, match="WB-PLAN-025"):
        wb.Cluster(1, devices="tpu")
    with pytest.raises((PlanError, ClusterError), match=r"GPU|CUDA"):
        wb.Cluster(1, devices="97")
    assert {child.pid for child in psutil.Process().children()} <= before
