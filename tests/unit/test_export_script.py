"""A plan as a Python file: what stands in it, what is refused, and that it trains the same."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from needs import need

from workbench import data
from workbench.cookbook import builtin
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.export import script
from workbench.export.cell import check_cell
from workbench.shared.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]


def plan_of(source, strategy="mirrored", *, framework="torch", workers=2, **settings):
    recipe = source if isinstance(source, Recipe) else Recipe(source)
    return make_plan(recipe, strategy, framework=framework, workers=workers, **settings)


def code_of(function, *args, **words):
    with pytest.raises(PlanError) as caught:
        function(*args, **words)
    return caught.value


# -- train.py --------------------------------------------------------------------------------------


def test_the_cell_stands_unchanged_below_the_line_that_joins():
    source = "import math\n\n\nx = math.pi  # kept\n\n\n\n\nprint(x)\n"
    text = script.train_py(plan_of(source))
    assert text.endswith(f"\n{source}")
    assert "import workbench as wb\n\nwb.run_job(__file__)" in text
    assert "torchrun --standalone --nproc-per-node 2 train.py" in ast.get_docstring(ast.parse(text))


def test_servers_are_processes_of_the_same_torchrun():
    text = script.train_py(plan_of("x = 1", "parameter_server", options={"servers": 2}))
    assert "--nproc-per-node 4" in text


def test_one_process_is_started_by_python():
    assert "Start it:  python train.py" in script.train_py(plan_of("x = 1", "one_device"))
    tensorflow = plan_of("x = 1", "mirrored", framework="tensorflow", workers=3)
    assert "Start it:  python train.py" in script.train_py(tensorflow)
    assert script.process_count(tensorflow) == 1


def test_a_function_is_defined_and_called():
    recipe = Recipe("def train(lr):\n    return lr\n", function="train", args=(0.5,))
    tree = ast.parse(script.train_py(plan_of(recipe)))
    assert ast.unparse(tree.body[-1]) == "train(0.5)"


def test_no_name_breaks_out_of_the_docstring():
    text = script.train_py(plan_of("x = 1", name='"""; import os; os.abort() #\\'))
    assert [type(node) for node in ast.parse(text).body[:2]] == [ast.Expr, ast.Import]


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\nx: Later = 1\n",
        '"""What it is."""\nfrom __future__ import (\n    annotations,\n)\nx: Later = 1\n',
        "from __future__ import annotations; y = 2\nx: Later = 1\n",
        '"""a\u2028b \x0c c"""\nfrom __future__ import annotations\nx: Later = 1\n',
        '"""What."""\r\nfrom __future__ import annotations\r\nx: Later = 1\r\n',
    ],
)
def test_future_imports_are_on_top_and_lines_keep_their_numbers(source):
    text = script.train_py(plan_of(source))
    compile(text, "train.py", "exec")
    first = text.index("import workbench as wb")
    assert "from __future__ import annotations" in text[:first]
    shift = text.splitlines().index("x: Later = 1") - source.splitlines().index("x: Later = 1")
    begin = text[: text.index("wb.run_job")].count("\n") + 2
    assert shift == begin


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import math\n%matplotlib inline\n", "line 2: %matplotlib inline"),
        ("x = 1\n!ls data\n", "line 2: !ls data"),
        ("files = !ls\n", "line 1: files = !ls"),
        ("%%time\nx = 1\n", "line 1: %%time"),
        ("\n\n%%time\nx = 1\n", "line 3: %%time"),
        ("x = 1\nx?\n", "line 2: x?"),
        ("?x\n", "line 1: ?x"),
        ("if True:\n    %pip install torch\n", "line 2: %pip install torch"),
    ],
)
def test_a_notebooks_own_syntax_is_refused_by_its_line(source, said):
    error = code_of(script.train_py, plan_of(source))
    assert error.code == "WB-PLAN-202"
    assert said in str(error)
    assert error.next_step


@pytest.mark.parametrize(
    "source",
    ["await x()", "async with x():\n    pass", "y = [z async for z in x()]", "f(await x())"],
)
def test_awaiting_outside_of_functions_is_refused(source):
    assert code_of(script.train_py, plan_of(source)).code == "WB-PLAN-203"


@pytest.mark.parametrize("source", ["x = (", "return 1", "x = 1\n  y = 2", "x = '\udcff'"])
def test_what_is_no_python_is_refused(source):
    assert code_of(script.train_py, plan_of(source)).code == "WB-PLAN-204"


def test_what_only_looks_like_a_magic_passes():
    source = 'x = """\n%matplotlib inline\n!ls\n"""\ny = (5\n%3)\nasync def f():\n    await x\n'
    assert script.train_py(plan_of(source)).endswith(source)


# -- names -----------------------------------------------------------------------------------------

WHOLE = {
    "comprehension": "rows = [a * b for a in range(3) for b in range(a) if a]\n",
    "generator": "total = sum(k for k in (1, 2))\nd = {k: v for k, v in {}.items()}\n",
    "arguments": "def f(a, /, b=1, *c, d, **e):\n    return a, b, c, d, e\n",
    "lambda": "g = lambda x, *y: (x, y, later)\nlater = 1\n",
    "class": "class A:\n    size = 3\n    def f(self):\n        return __class__, self, A.size\n",
    "global": "def f():\n    global made\n    made = 1\nf()\nprint(made)\n",
    "nonlocal": "def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n    g()\n",
    "star": "from math import *\nprint(sin(pi))\n",
    "guard": "try:\n    kept\nexcept NameError:\n    kept = 1\nprint(kept)\n",
    "except": "try:\n    pass\nexcept (OSError, ValueError) as e:\n    print(e)\n",
    "walrus": "if (n := 3) > 2:\n    print(n)\nprint([m := k for k in (1,)], m)\n"
    "print({p: (q := p) for p in (1,)}, {(r := p) for p in (1,)}, q, r)\n",
    "with": "with open('/dev/null') as f, f as g:\n    print(f, g)\n",
    "match": "match [1, 2]:\n    case [p, *q] if p:\n        print(p, q)\n    case {'k': v, **r}:\n"
    "        print(v, r)\n",
    "engine": "print(rank, local_rank, world_size, device, dist, strategy, wb.data)\n",
    "local annotation": "def f():\n    x: Unknown = 1\n    return x\n",
    "string annotation": "def f(x: 'Unknown') -> 'Unknown':\n    return x\n",
    "future": "from __future__ import annotations\n"
    "def f(x: U) -> V:\n    y: W\nasync def g(a: Z): ...\n",
    "main": "if __name__ == '__main__':\n    print(__file__, __doc__)\n",
    "later": "def f():\n    return helper()\ndef helper():\n    return 1\nf()\n",
    "import": "import os.path, numpy as np\nfrom json import dumps as d\nprint(os, np, d)\n",
    "rebound": "print(list)\nlist = list((1,))\ndevice = str(device)\n",
    "for": "for i, (a, *b) in enumerate([]):\n    print(i, a, b)\nelse:\n    print(i)\n",
    "site": "if rank > 5:\n    exit()\n",
    "dir": "if 'kept' in dir():\n    print(kept)\n",
    "exec": "exec('a = 1')\nprint(a)\n",
    "decorator": "import functools\n@functools.cache\ndef f(x=len('a')):\n    return f\n",
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_cell_is_not_refused(name, tmp_path):
    assert check_cell(WHOLE[name], names={}, folder=tmp_path) == []


@pytest.mark.parametrize("name", builtin.names())
def test_the_built_in_recipes_are_whole(name, tmp_path):
    for framework in builtin.frameworks(name):
        cell = builtin.lookup(name, framework).cell
        assert check_cell(cell, names={}, folder=tmp_path) == []


DISTRIBUTED = re.compile(r"\s*%%distributed [a-z]\w*.*\n")


def shown_cells():
    """Yield where a cell under a strategy is shown, and its source."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page.name != "errors.md":  # what goes wrong
            for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
                yield page.name, block
    for page in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if page.name in ("lab_6.ipynb", "lab_7.ipynb"):  # their cells build on each other
            continue
        for cell in json.loads(page.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield page.name, "".join(cell["source"])


def test_the_cells_of_the_manual_are_whole(tmp_path):
    found = [(page, text) for page, text in shown_cells() if DISTRIBUTED.match(text)]
    assert len(found) > 20
    for page, text in found:
        source = text[DISTRIBUTED.match(text).end() :]
        try:
            check_cell(source, names={}, folder=tmp_path)
        except PlanError as error:
            pytest.fail(f"{page}: {error}")


def local_function():
    return 1


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("print(x_train)\n", ["x_train"]),
        ("print([k for k in (1,)], {j: j for j in (1,)})\nprint(j, k)\n", ["j", "k"]),
        ("def f():\n    return settings['lr']\nf()\n", ["settings"]),
        ("class Net(Base):\n    pass\n", ["Base"]),
        ("x = [k * scale for k in range(3)]\n", ["scale"]),
        ("model = wrap(model)\ndef wrap(m):\n    return m\n", ["model", "wrap"]),
        ("count += 1\n", ["count"]),
        ("display(3)\n", ["display"]),
        ("def f(x: Unknown): ...\n", ["Unknown"]),
        ("@decorate\ndef f(): ...\n", ["decorate"]),
    ],
)
def test_names_of_the_notebook_are_named(source, missing, tmp_path):
    error = code_of(check_cell, source, names={}, folder=tmp_path)
    assert error.code == "WB-PLAN-205"
    assert [part.split(" ")[0] for part in str(error.seen).split(", ")] == missing
    assert "%push" in str(error)


def test_what_to_write_depends_on_what_the_notebook_has(tmp_path):
    names = {
        "np": np, "m": math, "local_function": local_function, "OrderedDict": OrderedDict,
        "token": "very secret", "learning_rate": 0.1,
    }  # fmt: skip
    local_function.__module__ = "__main__"
    source = "print(np, m, local_function, OrderedDict, token, learningrate)\n"
    error = code_of(check_cell, source, names=names, folder=tmp_path)
    for said in ("import numpy as np", "import math as m", "from collections import OrderedDict"):
        assert said in error.next_step
    assert "token = ..." in error.next_step
    assert "local_function" in error.next_step
    assert " learning_rate?" in error.next_step
    assert "very secret" not in str(error)


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path):
    (tmp_path / "data" / "cats").mkdir(parents=True)
    (tmp_path / "data" / "x.csv").write_text("1")
    (tmp_path / "helpers.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "read",
    [
        "open('data/x.csv')",
        "open('data/x.csv', 'rb')",
        "np.load('data/x.csv')",
        "pd.read_csv('data/x.csv')",
        "pd.read_csv(filepath_or_buffer='data/x.csv')",
        "torch.load('data/x.csv')",
        "Path('data/x.csv').read_text()",
        "(Path('data') / 'x.csv').open()",
        "open(os.path.join('data', 'x.csv'))",
        "open(PLACE)",
        "open('data/x.csv').read(), np.save('data/y.npy', 1)",
    ],
)
def test_a_file_beside_the_notebook_must_travel(read, beside):
    source = "import os, torch, numpy as np, pandas as pd\nfrom pathlib import Path\n"
    source += f"PLACE = 'data/x.csv'\nx = {read}\n"
    error = code_of(check_cell, source, folder=beside)
    assert error.code == "WB-PLAN-206"
    assert "files=['data/x.csv']" in error.next_step
    for files in ([Path("data/x.csv")], [Path("data")], [beside / "data"]):
        assert check_cell(source, folder=beside, files=files) == []


def test_a_folder_of_images_must_travel(beside):
    source = "from torchvision.datasets import ImageFolder\nx = ImageFolder('data/cats')\n"
    assert code_of(check_cell, source, folder=beside).code == "WB-PLAN-206"


@pytest.mark.parametrize(
    "lists",
    ["os.listdir('data')", "glob.glob('data/*.csv')", "list(Path('data').iterdir())",
     "sorted(Path('data').glob('**/*.csv'))", "list(os.walk('data/cats/'))"],
)  # fmt: skip
def test_a_folder_that_is_listed_must_travel(lists, beside):
    source = f"import glob, os\nfrom pathlib import Path\nx = {lists}\n"
    assert "files=['data" in code_of(check_cell, source, folder=beside).next_step
    assert check_cell(source, folder=beside, files=[Path("data")]) == []


@pytest.mark.parametrize(
    "write",
    ["torch.save(1, 'data/x.csv')", "np.savez('data/x.csv', 1)", "open('data/x.csv', 'w').close()",
     "Path('data/x.csv').write_text('1')", "table.to_csv('data/x.csv')"],
)  # fmt: skip
def test_a_file_that_the_cell_itself_writes_need_not_travel(write, beside):
    source = f"import torch, numpy as np\nfrom pathlib import Path\ntable = input()\n{write}\n"
    assert check_cell(f"{source}x = open('data/x.csv')\n", folder=beside) == []


def test_a_module_beside_the_notebook_must_travel(beside):
    source = "import helpers\n"
    assert "helpers.py" in code_of(check_cell, source, folder=beside).next_step
    assert check_cell(source, folder=beside, files=[Path("helpers.py")]) == []


def test_a_path_that_is_nowhere_is_a_warning(tmp_path):
    (said,) = check_cell("x = open('data/x.csv')\n", folder=tmp_path)
    assert "data/x.csv" in said


@pytest.mark.parametrize(
    "source",
    [
        "open('data/x.csv', 'w')\n",
        "open('data/x.csv', mode='ab')\n",
        "open('/data/x.csv')\n",
        "import pandas as pd\npd.read_csv('https://host/x.csv')\n",
        "open('~/x.csv')\n",
        "name = input()\nopen(f'data/{name}.csv')\n",
        "from torchvision.datasets import MNIST\nMNIST('data', download=True)\n",
        "print('data/x.csv')\n",
        "import json\njson.load('{}')\n",
        "import os\nos.listdir('.'), os.listdir()\n",
        "import glob\nglob.glob('*.csv'), glob.glob('/data/*')\n",
    ],
)
def test_what_is_no_relative_path_that_is_read_passes(source, beside):
    assert check_cell(source, folder=beside) == []


# -- without Workbench -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "sharded"])
@pytest.mark.parametrize("name", builtin.names())
def test_the_plain_script_is_python_without_workbench(name, strategy):
    recipe = builtin.lookup(name)
    text = script.plain_py(plan_of(recipe, strategy))
    assert ("(dropout)" in text) == (strategy != "one_device")
    imports = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)
        for alias in node.names
    }  # fmt: skip
    assert "workbench" not in imports
    assert recipe.cell.strip("\n") in text
    assert not re.search(r"@[A-Z_]+@|^#\[", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("digits", ("test",)),
        ("corpus", ("test",)),
        ("synthetic", (50,)),
        ("ratings", ("train",)),
        ("ratings", ("test",)),
        ("tissue", ("test",)),
        ("payments", ("test",)),
    ],
)
def test_the_plain_scripts_data_are_ours(name, given):
    text = (Path(script.__file__).parent / "templates" / "plain_data.txt").read_text()
    found = {"np": np}
    exec(script._sections(text, {name, "data"}), found)
    for theirs, ours in zip(
        found[f"_{name}"](*given), getattr(data, name)(*given, arrays=True), strict=True
    ):
        assert theirs.dtype == ours.dtype
        assert (theirs == ours).all()


FIT = "import torch\nmodel = torch.nn.Linear(2, 1)\nwb.fit(model, 1, loss=2, optimizer=3"


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (f"{FIT})\n", {"strategy": "parameter_server"}),
        (f"{FIT}, precision='bf16')\n", {}),
        (f"{FIT}, compile=True)\n", {}),
        (f"{FIT}, callbacks=[print])\n", {}),
        (f"{FIT})\n", {"options": {"compress": "fp16"}}),
        (f"{FIT})\n", {"faults": ()} | {"checkpoint": "kept"}),
        (f"{FIT})\n", {"init_from": "base"}),
        ("import workbench as wb\n", {}),
        ("wb.checkpoint()\n", {}),
        ("train(wb)\n", {}),
        ("wb.data.moons()\n", {}),
        (f"data = wb.data\n{FIT.replace('1, loss', 'data.digits(), loss')})\n", {}),
        (f"print(strategy)\n{FIT})\n", {}),
        ("model, o = wb.prepare(1, 2)\n", {"overrides": {"epochs": 2}}),
        ("wb.prepare(1, 2)\n", {"strategy": "sharded"}),
        (f"np = 3\n{FIT})\n", {}),
        (f"from jax import numpy as np\n{FIT})\n", {}),
        (f"def _fit(): ...\n{FIT})\n", {}),
        ("import keras\nwb.fit(1)\n", {"framework": "tensorflow"}),
        ("import keras\nm = keras.Model()\nm.fit(1)\n",
         {"framework": "tensorflow", "strategy": "multi_worker_mirrored"}),
        ("import keras\nm = keras.Model()\nm.fit(1)\n", {}),
    ],
)  # fmt: skip
def test_what_a_plain_script_cannot_do_is_refused(source, settings):
    given = {"strategy": "mirrored", **settings}
    error = code_of(script.plain_py, plan_of(source, **given))
    assert error.code == "WB-PLAN-207"
    assert "without --plain" in error.next_step


def test_usual_imports_and_names_of_the_cell_are_no_collision():
    source = "import numpy as np\nimport torch\nimport torch.distributed as dist\nrank = 3\n"
    source += "from random import random\ndevice = torch.device('cpu')\n"
    text = script.plain_py(plan_of(source))
    assert source in text
    assert "(dropout)" not in text  # no promise about results: the loop itself divides the data


UNEVEN = """
import torch
from torch import nn

torch.manual_seed(3)
x, y = torch.randn(50, 6), torch.randint(0, 4, (50,))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
device = rank = random = "the cell's own"

def accuracy(out, y):
    return (out.argmax(-1) == y).float().mean()

result = wb.fit(
    model, (x, y), loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=15, steps=9,
    eval_data=(x, y), eval_every=4, metrics={"accuracy": accuracy}, accumulate=3, clip_norm=0.2,
    scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3), seed=5,
)
weights = {k: v.clone() for k, v in model.state_dict().items()}
evals = [one["loss"] for one in result.evals]
"""
STEP = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(64, momentum=1.0)

    def score(self, x):
        return self.inner(x.flatten(1))

data = torch.utils.data.DataLoader(wb.data.digits("train"), 100, shuffle=True, drop_last=True)
wb.fit(
    net := Net(), data,
    step_fn=lambda model, batch: nn.functional.cross_entropy(model.score(batch[0]), batch[1])
    + 0 * model.norm.weight.sum() + 0 * model.norm.bias.sum(),
    optimizer=lambda p: torch.optim.SGD(p, 0.5), epochs=1,
)
weights, evals = {k: v.clone() for k, v in net.state_dict().items()}, []
"""
LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
data = TensorDataset(torch.randn(50, 6), torch.randint(0, 4, (50,)))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model, optimizer, loader = wb.prepare(model, optimizer, DataLoader(data, 15, shuffle=True))
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
weights, evals = {k: v.clone() for k, v in model.state_dict().items()}, []
"""
CELLS = {"fit": UNEVEN, "step": STEP, "loop": LOOP}
LEAVE = """
import os
torch.save((weights, evals), f"left-{os.environ.get('RANK', '0')}.pt")
"""
REFERENCE = """
import json, sys, torch
import torch.distributed as dist
from workbench.engine.testing import EngineHarness
from workbench.shared.protocol import RunSpec

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with EngineHarness() as engine:
    for number, (name, cell) in enumerate(json.load(open("cells.json")).items(), 1):
        spec = RunSpec(
            mode="run", rank=0, world_size=1, ranks=(0,), run=number, strategy="one_device",
            store=("127.0.0.1", store.port), prefix=f"run{number}/",
        )
        report = engine.run(spec, cell, found := {"__name__": "__main__"})
        assert not report.error, report.error
        torch.save((found["weights"], found["evals"]), f"{name}.pt")
"""


def run_python(folder, *words):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    """The weights that Workbench trains each cell to, on one device."""
    need("torch")
    folder = tmp_path_factory.mktemp("truths")
    (folder / "cells.json").write_text(json.dumps(CELLS))
    (folder / "reference.py").write_text(REFERENCE)
    run_python(folder, "reference.py")
    return folder


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "strategy", "workers"),
    [
        ("fit", "one_device", 1), ("fit", "mirrored", 2), ("fit", "sharded", 2),
        ("step", "mirrored", 2), ("loop", "one_device", 1), ("loop", "mirrored", 2),
    ],
)  # fmt: skip
def test_the_plain_script_trains_as_workbench_does(name, strategy, workers, truths, tmp_path):
    import torch

    plan = plan_of(CELLS[name] + LEAVE, strategy, workers=workers)
    (tmp_path / "train.py").write_text(script.plain_py(plan))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    run_python(tmp_path, *([] if workers == 1 else torchrun), "train.py")
    weights, evals = torch.load(truths / f"{name}.pt", weights_only=True)
    kept = torch.load(tmp_path / "weights.pt", weights_only=True)
    for rank in range(workers):
        mine, mine_evals = torch.load(tmp_path / f"left-{rank}.pt", weights_only=True)
        assert mine_evals == pytest.approx(evals, abs=1e-6)
        for key, value in weights.items():
            assert torch.allclose(mine[key], value, rtol=0, atol=1e-6), key
            assert torch.equal(kept[key], mine[key])


@pytest.mark.torch
def test_a_plain_loop_that_passes_its_wrapper_by_is_stopped(tmp_path):
    need("torch")
    source = LOOP.replace("model, optimizer, loader =", "wrapped, optimizer, loader =")
    (tmp_path / "train.py").write_text(script.plain_py(plan_of(source, workers=1)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "wb.prepare returned: model(x)" in done.stderr


DATA = """
import numpy as np
x, y = wb.data.digits("test", arrays=True)
m, n = wb.data.digits("test", arrays=True, as_mnist=True)
a, b = wb.data.corpus("test", block=16, arrays=True)
p, q = wb.data.synthetic(20, shape=(2, 3), classes=4, seed=5, arrays=True)
np.savez(NAME, x=x, y=y, m=m, n=n, a=a, b=b, p=p, q=q, v=[ord(c) for c in wb.data.VOCABULARY])
"""


@pytest.mark.torch
def test_the_plain_scripts_data_are_workbenchs(tmp_path):
    need("torch", "sklearn")
    cell = DATA.replace("NAME", "'plain.npz'")
    (tmp_path / "train.py").write_text(script.plain_py(plan_of(cell, "one_device")))
    ours = DATA.replace("NAME", "'ours.npz'")
    (tmp_path / "ours.py").write_text(f"import workbench as wb\n{ours}")
    run_python(tmp_path, "train.py")
    run_python(tmp_path, "ours.py")
    with np.load(tmp_path / "plain.npz") as mine, np.load(tmp_path / "ours.npz") as theirs:
        for name in theirs.files:
            assert mine[name].dtype == theirs[name].dtype
            assert np.array_equal(mine[name], theirs[name]), name


KERAS = """
import keras
import numpy as np
from keras import layers

x, y = wb.data.digits("train")
model = keras.Sequential([
    keras.Input((1, 8, 8)), layers.Flatten(), layers.Dense(16, activation="tanh"), layers.Dense(10),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
model.fit(x[:640], y[:640], batch_size=64, shuffle=False, verbose=0)
np.savez("weights.npz", *model.get_weights())
"""


@pytest.mark.tensorflow
def test_a_plain_script_of_keras_trains_on_several_replicas_as_on_one(tmp_path):
    need("tensorflow")
    found = []
    for strategy, workers in (("one_device", 1), ("mirrored", 2)):
        plan = plan_of(KERAS, strategy, framework="tensorflow", workers=workers)
        (tmp_path / "train.py").write_text(script.plain_py(plan))
        run_python(tmp_path, "train.py")
        with np.load(tmp_path / "weights.npz") as arrays:
            found.append([arrays[name] for name in arrays.files])
    for one, several in zip(*found, strict=True):
        assert np.allclose(one, several, rtol=0, atol=1e-6)
