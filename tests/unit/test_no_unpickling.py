"""No file and no peer is unpickled: what reads, says so at every call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parent
SAFE = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
KNOWN = {
    # An Unpickler that knows the classes of its index, and no others.
    "engine/torch/checkpoints.py": ["pickle"],
    # Which name a pulled value lacks here, once ipyparallel failed to read it; in its signed calls.
    "cluster/calls.py": ["pickle"],
    # Cells' variables from one engine to another, in ipyparallel's signed calls.
    "engine/entry.py": ["pickle", "cloudpickle"],
    # The same variables, written with tensors as the CPU's; it reads only what it has just written.
    "engine/torch/accelerator.py": ["pickle", "cloudpickle"],
}


def unsafe(source: str) -> Iterator[str]:
    """Yield what in a module could run code that came with data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            yield str(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            needed = SAFE.get((owner, node.func.attr))
            said = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            if needed and said.get(needed[0]) is not needed[1]:
                yield f"{owner}.{node.func.attr} without {needed[0]}={needed[1]}"


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_nothing_is_unpickled(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert list(unsafe(path.read_text())) == KNOWN.get(name, [])


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from cloudpickle import loads", "torch.load(f)", "np.load(f)",
     "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(unsafe(source))
