"""Devices are spoken to in one module, and no step waits for one by accident: read in the sources.

torch.cuda.*, torch.xpu.*, torch.mps.*   only in `accelerator.py`: elsewhere they would be one
                                         kind's, on the current device of whatever thread
fork_rng()                               names its devices, or it begins every GPU there is
dist.get_backend() == ..                 says `cpu:gloo,cuda:nccl` where there are two
.item()                                  waits for the device: not in what runs in a step
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "workbench"
ONE = PACKAGE / "engine" / "torch" / "accelerator.py"
KINDS = ("cuda", "xpu", "mps")

MAY_WAIT = {
    "strategies/torch/parts/timing.py": "of a loss that lies on the CPU, or is read on purpose",
}
"""Where `.item()` is right, of what runs in a step, and why."""

IN_STEPS = ("strategies/torch", "engine/torch", "engine/training")


@functools.cache
def _modules() -> list[tuple[Path, list[ast.AST]]]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path != ONE]
    return [(path, list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))) for path in paths]


def _speaks_to_one_kind(node: ast.AST) -> bool:
    inner = node.value if isinstance(node, ast.Attribute) else None
    return (
        isinstance(inner, ast.Attribute)
        and inner.attr in KINDS
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "torch"
    )


def _forks_all(node: ast.AST) -> bool:
    called = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fork_rng")
    return called and not any(word.arg == "devices" for word in node.keywords)  # type: ignore[attr-defined]


def _compares_backends(node: ast.AST) -> bool:
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    return any("get_backend(" in ast.unparse(side) for side in sides)


def _waits(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "item"
        and not node.args
    )


def places(found: Callable[[ast.AST], bool], under: tuple[str, ...] = ("",)) -> list[str]:
    """Return `file:line` of each node that is found."""
    listed = []
    for path, nodes in _modules():
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(under):
            lines = {node.lineno for node in nodes if found(node)}  # type: ignore[attr-defined]
            listed += [f"{name}:{line}" for line in sorted(lines)]
    return listed


def test_one_module_speaks_to_devices() -> None:
    found = places(_speaks_to_one_kind)
    # The doctor asks CUDA itself what the others rely on.
    assert not [place for place in found if not place.startswith("doctor/")]


def test_generators_that_are_kept_are_named() -> None:
    assert not places(_forks_all), "\n".join(places(_forks_all))


def test_backends_are_asked_for_by_device() -> None:
    assert not places(_compares_backends), "\n".join(places(_compares_backends))


def test_no_step_waits_for_one_number() -> None:
    left = [at for at in places(_waits, IN_STEPS) if at.partition(":")[0] not in MAY_WAIT]
    assert not left, "\n".join(left)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.cuda.synchronize()", _speaks_to_one_kind),
        ("torch.random.fork_rng()", _forks_all),
        ("dist.get_backend() == 'nccl'", _compares_backends),
        ("'gloo' != torch.distributed.get_backend(group)", _compares_backends),
        ("loss.item()", _waits),
    ],
)
def test_what_is_looked_for_is_found(text: str, found: Callable[[ast.AST], bool]) -> None:
    assert any(found(node) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.random.fork_rng(devices=[])", _forks_all),
        ("word.startswith('torch.cuda.')", _speaks_to_one_kind),
        ("values.item(0)", _waits),
    ],
)
def test_what_is_right_is_passed_over(text: str, found: Callable[[ast.AST], bool]) -> None:
    assert not any(found(node) for node in ast.walk(ast.parse(text)))
