"""Mistakes of users, named: each cell, the words its error must hold, and what the error advises.

`cluster/test_mistakes.py` makes every one of them on real engines, follows the advice, and holds
`docs/errors.md` against what was shown.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))"
GOOD = {
    "model": "model",
    "data": "wb.data.synthetic(64, shape=(4,), classes=2)",
    "loss": "nn.CrossEntropyLoss()",
    "optimizer": "lambda p: torch.optim.SGD(p, 0.1)",
    "batch_size": "8",
    "steps": "2",
}


@dataclass(frozen=True)
class Mistake:
    """One mistake, and the way out that its error names.

    Attributes:
        title: What went wrong, as a user would say it.
        cell: What was typed.
        words: What the error must hold.
        cure: What the error advises, followed; empty where the advice is not a cell.
        before: A cell that must have run before.
        framework: What the engines have.
        where: `line`: refused before an engine was touched; `engines`: they found out.
        within_s: It is reported in this time.
    """

    title: str
    cell: str
    words: tuple[str, ...]
    cure: str = ""
    before: str = ""
    framework: str = "torch"
    where: str = "engines"
    within_s: float = 10.0


def fit(strategy: str = "mirrored", before: str = "", **changed: str | None) -> str:
    """Return a cell that calls `wb.fit`; an argument given as None is left out."""
    given = {name: text for name, text in {**GOOD, **changed}.items() if text is not None}
    call = ", ".join(f"{name}={text}" for name, text in given.items())
    lines = ["import torch", "from torch import nn", *([before] if before else [MODEL])]
    return "\n".join([f"%%distributed {strategy} --plot off", *lines, f"wb.fit({call})"])


def own_loop(body: str, strategy: str = "mirrored") -> str:
    """Return a cell with a training loop of the user's own."""
    return "\n".join(
        [
            f"%%distributed {strategy} --plot off",
            "import torch",
            "from torch import nn",
            MODEL,
            "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
            "data = wb.data.synthetic(64, shape=(4,), classes=2)",
            "loader = torch.utils.data.DataLoader(data, batch_size=8)",
            body,
        ]
    )


STEPS = (
    "model, optimizer, loader = wb.prepare(model, optimizer, loader)\n"
    "for x, y in loader:\n"
    "    optimizer.zero_grad()\n"
    "    nn.functional.cross_entropy(model(x), y).backward()\n"
    "    optimizer.step()"
)

LINE = [
    Mistake(
        "A strategy's name is misspelt",
        fit("miror"),
        ("'miror'", "did you mean 'mirrored'?"),
        fit("mirrored"),
    ),
    Mistake(
        "An option's name is misspelt",
        fit("mirrored -o bucket=3"),
        ("option of mirrored", "did you mean 'bucket_mb'?"),
        fit("mirrored -o bucket_mb=3"),
    ),
    Mistake(
        "An option is out of range",
        fit("local_sgd -o every=0"),
        ("at least 1", "-o every=1"),
        fit("local_sgd -o every=1"),
    ),
    Mistake(
        "An option belongs to another strategy",
        fit("mirrored -o max_staleness=2"),
        ("one of parameter_server", "%%distributed parameter_server -o max_staleness"),
        fit("parameter_server -o max_staleness=2"),
    ),
    Mistake(
        "Two options exclude each other",
        fit("parameter_server -o sync=true -o max_staleness=2"),
        ("exclude each other", "leave one of them out"),
        fit("parameter_server -o sync=true"),
    ),
    Mistake(
        "The line asks for a batch smaller than the workers",
        fit("mirrored --batch-size 1"),
        ("batch_size=1 over 2 workers", "-n 1"),
        fit("mirrored --batch-size 1 -n 1"),
    ),
    Mistake(
        "No epochs at all",
        fit("mirrored --epochs 0"),
        ("--epochs", "at least 1"),
        fit("mirrored --epochs 1", steps=None),
    ),
    Mistake(
        "A fault for a worker that is not there",
        fit("mirrored --inject slow=9:50ms"),
        ("slow=9:50ms", "ranks 0 to 1"),
        fit("mirrored --inject slow=1:5ms"),
    ),
    Mistake(
        "Epochs without a strategy",
        "%%distributed --epochs 3\nx = 1",
        ("names no strategy", "%%distributed mirrored"),
        fit("mirrored --epochs 3", steps=None),
    ),
    Mistake(
        "Ranks chosen for a strategy",
        fit("mirrored --ranks 0"),
        ("A strategy chooses its own workers", "-n"),
        fit("mirrored -n 1"),
    ),
    Mistake(
        "Microbatches that do not divide",
        fit("model_split -o schedule=interleaved -o microbatches=5"),
        ("do not divide into them", "microbatches=4"),
        fit("model_split -o schedule=interleaved -o stages_per_worker=1 -o microbatches=4"),
    ),
    Mistake(
        "Workers that do not fill whole pipelines",
        fit("hybrid -o stages=3"),
        ("do not fill whole pipelines", "-n 3"),
    ),
    Mistake(
        "A run to start from that does not exist",
        fit("mirrored --init-from nowhere"),
        ("'nowhere'",),
    ),
    Mistake(
        "A recipe that does not exist",
        "%distributed mirrored --recipe nowhere",
        ("'nowhere'",),
    ),
    Mistake("An empty cell", "%%distributed mirrored --plot off\n   ", ("The cell is empty",)),
    Mistake(
        "More engines than anybody has",
        fit("mirrored -n 100000"),
        ("100000", "1 to 256"),
    ),
    Mistake(
        "A GPU that this machine does not have",
        "%cluster start 2 --devices 97",
        ("other devices", "%cluster stop"),
    ),
    Mistake("An engine that does not exist", "%cluster restart 9", ("no such engine", "0, 1")),
    Mistake("A variable to push that does not exist", "%push no_such_name", ("no such name",)),
    Mistake(
        "wb.fit without a magic on top",
        "wb.fit(1, 2)",
        ("outside a training run", "%%distributed mirrored"),
    ),
    Mistake(
        "A framework that does not exist",
        fit("mirrored --framework jax"),
        ("'jax'", "tensorflow, torch"),
    ),
    Mistake(
        "A lambda as a recipe",
        "with wb.Cluster(1) as mine:\n    mine.run(lambda: 1, strategy='mirrored')",
        ("lambda",),
    ),
]

ENGINES = [
    Mistake(
        "wb.fit is not told what to minimise",
        fit(loss=None),
        ("neither", "CrossEntropyLoss()"),
        fit(),
    ),
    Mistake(
        "The loss is a class",
        fit(loss="nn.CrossEntropyLoss"),
        ("make an instance: CrossEntropyLoss()",),
        fit(loss="nn.CrossEntropyLoss()"),
    ),
    Mistake(
        "The model is a class",
        fit(model="nn.Linear"),
        ("no torch.nn.Module", "class Linear"),
    ),
    Mistake("The optimizer is left out", fit(optimizer=None), ("not given optimizer",), fit()),
    Mistake(
        "The batch is smaller than the workers",
        fit(batch_size="1"),
        ("batch_size=1 over 2 workers", "-n 1"),
        fit("mirrored -n 1", batch_size="1"),
    ),
    Mistake(
        "The data has another shape than the model takes",
        fit(data="wb.data.synthetic(64, shape=(5,), classes=2)"),
        ("mat1 and mat2", "nn.Linear(5, ...)"),
        fit(data="wb.data.synthetic(64, shape=(4,), classes=2)"),
    ),
    Mistake(
        "The loss returns a vector",
        fit(loss="nn.CrossEntropyLoss(reduction='none')"),
        ("one number", "reduction='mean'"),
        fit(loss="nn.CrossEntropyLoss()"),
    ),
    Mistake(
        "The optimizer holds another model's parameters",
        fit(
            before=MODEL + "; other = nn.Linear(4, 2)",
            optimizer="torch.optim.SGD(other.parameters(), 0.1)",
        ),
        ("optimizer",),
        fit(),
    ),
    Mistake(
        "The data set is empty",
        fit(data="torch.utils.data.TensorDataset(torch.ones(0, 4), torch.ones(0))"),
        ("0",),
        fit(),
    ),
    Mistake(
        "Classes out of range",
        fit(data="(torch.ones(64, 4), torch.full((64,), 7))"),
        ("out of bounds", "needs an output of its own"),
        fit(data="wb.data.synthetic(64, shape=(4,), classes=2)"),
    ),
    Mistake(
        "Targets of the wrong type",
        fit(data="(torch.ones(64, 4), torch.ones(64, dtype=torch.int32))"),
        ("Int", "y.long()"),
        fit(data="(torch.ones(64, 4), torch.ones(64, dtype=torch.int64))"),
    ),
    Mistake(
        "A device that this machine does not have",
        "%%distributed\nimport torch\ntorch.ones(3).to('cuda:0')",
        ("CUDA", "x.to(device)"),
        "%%distributed\nimport torch\ntorch.ones(3).to(device)",
    ),
    Mistake(
        "More stages than layers",
        fit("model_split", before="model = nn.Sequential(nn.Linear(4, 2))"),
        ("1 layers for 2 stages",),
        fit("model_split", before="model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))"),
    ),
    Mistake(
        "A stage that is not there",
        fit("model_split -o split_at=head"),
        ("'head'", "leave split_at out"),
        fit("model_split"),
    ),
    Mistake(
        "Weights shared over a cut",
        fit(
            "model_split",
            before="a, b = nn.Linear(4, 4), nn.Linear(4, 4); b.weight = a.weight\n"
            "model = nn.Sequential(a, nn.Tanh(), b)",
        ),
        ("0.weight in stage 0",),
    ),
    Mistake(
        "More servers than tensors",
        fit("parameter_server -o servers=5"),
        ("5 servers, 4 tensors", "-o servers=4"),
    ),
    Mistake(
        "An optimizer with a closure on a server",
        fit("parameter_server", optimizer="lambda p: torch.optim.LBFGS(p)"),
        ("closure", "'LBFGS'"),
    ),
    Mistake(
        "Sparse gradients on a server",
        fit("central_storage", before="model = nn.Embedding(4, 2, sparse=True)"),
        ("sparse=False",),
    ),
    Mistake(
        "An own loop under a strategy that cannot take it",
        own_loop(STEPS, "sharded"),
        ("wb.fit",),
        fit("sharded"),
    ),
    Mistake(
        "An own loop with the epochs on the line",
        own_loop(STEPS, "mirrored --epochs 2"),
        ("wb.options",),
        own_loop(STEPS),
    ),
    Mistake(
        "A cell that trains nothing",
        "%%distributed mirrored --plot off\nx = 1",
        ("Nothing was distributed", "wb.fit"),
        fit(),
    ),
    Mistake(
        "A variable that only the notebook has",
        "%%distributed\nprint(only_here)",
        ("exists in the notebook, but not on the engines", "%push only_here"),
        "%push only_here\n",
        before="only_here = 5",
    ),
    Mistake(
        "A module that only the notebook imported",
        "%%distributed\nfr.Fraction(1)",
        ("import fractions in the cell",),
        "%%distributed\nimport fractions as fr\nfr.Fraction(1)",
        before="import fractions as fr",
    ),
    Mistake(
        "Something to push that cannot travel",
        "%push lock",
        ("lock cannot be sent", "%%distributed"),
        before="import threading; lock = threading.Lock()",
    ),
    Mistake(
        "A syntax error",
        "%%distributed\nfor x in range(3)\n    print(x)",
        ("SyntaxError",),
        "%%distributed\nfor x in range(3):\n    print(x)",
    ),
    Mistake(
        "One rank alone fails",
        "%%distributed\nimport torch\n"
        "if rank == 1:\n    raise ValueError('no such file: part-1.csv')\n"
        "dist.all_reduce(torch.ones(3))",
        ("Rank 1", "no such file: part-1.csv"),
        "%%distributed\nimport torch\ndist.all_reduce(torch.ones(3))",
    ),
    Mistake(
        "sys.exit() in a cell",
        "%%distributed\nimport sys\nsys.exit(3)",
        ("SystemExit", "end a cell early with raise"),
        "%%distributed\nprint('still here')",
    ),
    Mistake(
        "os._exit() in a cell",
        "%%distributed\nimport os\nif rank == 1:\n    os._exit(3)",
        ("Rank 1", "%cluster restart 1"),
        "%cluster restart 1",
    ),
    Mistake(
        "An engine that fills its memory",
        "%%distributed\nimport torch, resource\n"
        "if rank == 1:\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)\n"
        "    hoard = [torch.ones(64 << 20) for _ in range(9)]",
        ("memory", "smaller batch"),
        "%cluster restart 1",
    ),
    Mistake(
        "A process is forked off in a cell",
        "%%distributed\nimport torch\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 1))\n"
        "bad = torch.utils.data.DataLoader(data, num_workers=1, batch_size=2, collate_fn=1)\n"
        "next(iter(bad))",
        ("TypeError",),
        "%%distributed\ngood = torch.utils.data.DataLoader(data, num_workers=1, batch_size=2)\n"
        "next(iter(good))",
    ),
]

KERAS = (
    "import keras, numpy as np, tensorflow as tf\n"
    "x, y = np.ones((64, 4), 'float32'), np.ones((64, 3), 'float32')\n"
    "model = keras.Sequential([keras.layers.Dense(3)])\n"
)
COMPILED = KERAS + "model.compile('sgd', 'mse')\n"


def keras(body: str, head: str = COMPILED, strategy: str = "mirrored") -> str:
    """Return a cell that trains a Keras model."""
    return f"%%distributed {strategy} --framework tensorflow --plot off\n{head}{body}"


TENSORFLOW = [
    Mistake(
        "The Keras model is not compiled",
        keras("model.fit(x, y, verbose=0)", KERAS),
        ("not compiled", "model.compile("),
        keras("model.fit(x, y, verbose=0)"),
        framework="tensorflow",
    ),
    Mistake(
        "The batch does not divide over the replicas",
        keras("model.fit(x, y, batch_size=31, verbose=0)"),
        ("31 over 2", "batch_size=32", "30"),
        keras("model.fit(x, y, batch_size=32, verbose=0)"),
        framework="tensorflow",
    ),
    Mistake(
        "The tf.data set is batched with another size",
        keras(
            "data = tf.data.Dataset.from_tensor_slices((x, y))\n"
            "model.fit(data.batch(32), batch_size=16, verbose=0)"
        ),
        ("batches of 32, batch_size=16", "leave batch_size out"),
        keras(
            "data = tf.data.Dataset.from_tensor_slices((x, y))\n"
            "model.fit(data.batch(32), verbose=0)"
        ),
        framework="tensorflow",
    ),
    Mistake(
        "PyTorch's data for a Keras model",
        keras(
            "import torch\n"
            "data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 3))\n"
            "model.fit(torch.utils.data.DataLoader(data, batch_size=32), verbose=0)"
        ),
        ("data is PyTorch's", "x.numpy()"),
        framework="tensorflow",
        within_s=30,
    ),
    Mistake(
        "A strategy that TensorFlow does not have",
        keras("model.fit(x, y)", strategy="sharded"),
        ("not available for tensorflow", "--framework torch"),
        framework="tensorflow",
    ),
    Mistake(
        "The data has another shape than the Keras model takes",
        keras("model.build((None, 5))\nmodel.fit(x, y, verbose=0)"),
        ("(16, 4)", "the layer was built for 5 on axis -1"),
        keras("model.build((None, 4))\nmodel.fit(x, y, verbose=0)"),
        framework="tensorflow",
    ),
]
