"""Mistakes that engines with PyTorch find (see `mistakes.py`)."""

from __future__ import annotations

from mistakes import MODEL, Mistake, fit, own_loop

STEPS = (
    "model, optimizer, loader = wb.prepare(model, optimizer, loader)\n"
    "for x, y in loader:\n"
    "    optimizer.zero_grad()\n"
    "    nn.functional.cross_entropy(model(x), y).backward()\n"
    "    optimizer.step()"
)

ENGINES = [
    Mistake(
        "wb.fit is not told what to minimise",
        fit(loss=None),
        "WB-FIT-017",
        fit(),
    ),
    Mistake(
        "The loss is a class",
        fit(loss="nn.CrossEntropyLoss"),
        "WB-FIT-018",
        fit(loss="nn.CrossEntropyLoss()"),
    ),
    Mistake(
        "The model is a class",
        fit(model="nn.Linear"),
        "WB-FIT-059",
    ),
    Mistake("The optimizer is left out", fit(optimizer=None), "WB-FIT-005", fit()),
    Mistake(
        "The batch is smaller than the workers",
        fit(batch_size="1"),
        "WB-FIT-016",
        fit("mirrored -n 1", batch_size="1"),
    ),
    Mistake(
        "The data has another shape than the model takes",
        fit(data="wb.data.synthetic(64, shape=(5,), classes=2)"),
        "WB-RUN-066",
        fit(data="wb.data.synthetic(64, shape=(4,), classes=2)"),
    ),
    Mistake(
        "The loss returns a vector",
        fit(loss="nn.CrossEntropyLoss(reduction='none')"),
        "WB-RUN-066",
        fit(loss="nn.CrossEntropyLoss()"),
    ),
    Mistake(
        "The optimizer holds another model's parameters",
        fit(
            before=MODEL + "; other = nn.Linear(4, 2)",
            optimizer="torch.optim.SGD(other.parameters(), 0.1)",
        ),
        "WB-FIT-062",
        fit(),
    ),
    Mistake(
        "The data set is empty",
        fit(data="torch.utils.data.TensorDataset(torch.ones(0, 4), torch.ones(0))"),
        "WB-FIT-054",
        fit(),
    ),
    Mistake(
        "Classes out of range",
        fit(data="(torch.ones(64, 4), torch.full((64,), 7))"),
        "WB-RUN-066",
        fit(data="wb.data.synthetic(64, shape=(4,), classes=2)"),
    ),
    Mistake(
        "Targets of the wrong type",
        fit(data="(torch.ones(64, 4), torch.ones(64, dtype=torch.int32))"),
        "WB-RUN-066",
        fit(data="(torch.ones(64, 4), torch.ones(64, dtype=torch.int64))"),
    ),
    Mistake(
        "A device that this machine does not have",
        "%%distributed\nimport torch\ntorch.ones(3).to('cuda:0')",
        "WB-RUN-066",
        "%%distributed\nimport torch\ntorch.ones(3).to(device)",
    ),
    Mistake(
        "More stages than layers",
        fit("model_split", before="model = nn.Sequential(nn.Linear(4, 2))"),
        "WB-FIT-137",
        fit("model_split", before="model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))"),
    ),
    Mistake(
        "A stage that is not there",
        fit("model_split -o split_at=head"),
        "WB-FIT-138",
        fit("model_split"),
    ),
    Mistake(
        "A chain of layers that is given a dictionary",
        fit("model_split", data="[({'a': torch.ones(4)}, 0) for _ in range(64)]"),
        "WB-FIT-134",
    ),
    Mistake(
        "More servers than tensors",
        fit("parameter_server -o servers=5"),
        "WB-FIT-132",
    ),
    Mistake(
        "An optimizer with a closure on a server",
        fit("parameter_server", optimizer="lambda p: torch.optim.LBFGS(p)"),
        "WB-FIT-046",
    ),
    Mistake(
        "Sparse gradients where whole tensors are needed",
        fit("sharded", before="model = nn.Embedding(4, 2, sparse=True)"),
        "WB-FIT-028",
    ),
    Mistake(
        "Sparse gradients on a server, with momentum",
        fit(
            "central_storage",
            before="model = nn.Embedding(4, 2, sparse=True)",
            optimizer="lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)",
        ),
        "WB-FIT-185",
    ),
    Mistake(
        "An own loop under a strategy that cannot take it",
        own_loop(STEPS, "sharded"),
        "WB-FIT-026",
        fit("sharded"),
    ),
    Mistake(
        "An own loop with the epochs on the line",
        own_loop(STEPS, "mirrored --epochs 2"),
        "WB-RUN-093",
        own_loop(STEPS),
    ),
    Mistake(
        "A cell that trains nothing",
        "%%distributed mirrored --plot off\nx = 1",
        "WB-RUN-092",
        fit(),
    ),
    Mistake(
        "A variable that only the notebook has",
        "%%distributed\nprint(only_here)",
        "WB-RUN-052",
        "%push only_here\n",
        before="only_here = 5",
    ),
    Mistake(
        "A module that only the notebook imported",
        "%%distributed\nfr.Fraction(1)",
        "WB-RUN-052",
        "%%distributed\nimport fractions as fr\nfr.Fraction(1)",
        before="import fractions as fr",
    ),
    Mistake(
        "Something to push that cannot travel",
        "%push lock",
        "WB-PLAN-099",
        before="import threading; lock = threading.Lock()",
    ),
    Mistake(
        "A syntax error",
        "%%distributed\nfor x in range(3)\n    print(x)",
        "WB-RUN-066",
        "%%distributed\nfor x in range(3):\n    print(x)",
    ),
    Mistake(
        "One rank alone fails",
        "%%distributed\nimport torch\n"
        "if rank == 1:\n    raise ValueError('no such file: part-1.csv')\n"
        "dist.all_reduce(torch.ones(3))",
        "WB-RUN-066",
        "%%distributed\nimport torch\ndist.all_reduce(torch.ones(3))",
    ),
    Mistake(
        "sys.exit() in a cell",
        "%%distributed\nimport sys\nsys.exit(3)",
        "WB-RUN-066",
        "%%distributed\nprint('still here')",
    ),
    Mistake(
        "os._exit() in a cell",
        "%%distributed\nimport os\nif rank == 1:\n    os._exit(3)",
        "WB-RUN-066",
        "%cluster restart 1",
    ),
    Mistake(
        "An engine that fills its memory",
        "%%distributed\nimport torch, resource\n"
        "if rank == 1:\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)\n"
        "    hoard = [torch.ones(64 << 20) for _ in range(9)]",
        "WB-RUN-066",
        "%cluster restart 1",
    ),
    Mistake(
        "A process is forked off in a cell",
        "%%distributed\nimport torch\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 1))\n"
        "bad = torch.utils.data.DataLoader(data, num_workers=1, batch_size=2, collate_fn=1)\n"
        "next(iter(bad))",
        "WB-RUN-066",
        "%%distributed\ngood = torch.utils.data.DataLoader(data, num_workers=1, batch_size=2)\n"
        "next(iter(good))",
    ),
]
