"""A plan as the text of a Python file.

    train_py     the cell below one line that joins the run: it trains, records and stops as in the
                 notebook, under torchrun or alone
    plain_py     the same training without Workbench, for PyTorch and Keras as they are
    check_cell   what the cell takes from its notebook: names, modules and files (`cell.py`)

The cell's lines are not changed. Only `from __future__` imports move to the top, as Python
requires.

The texts of plain scripts are in `templates/`. There, lines between `#[a|b]` and `#[/a|b]` are left
out unless a or b is wanted, and `@NAME@` stands for a value.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..cookbook.recipe import WORDS, framework_of, use_of
from ..errors import PlanError
from .cell import ENGINE_NAMES, Cell, bound_on_top, read_cell
from .cell import check_cell as check_cell

if TYPE_CHECKING:
    from ..shared.plan import Plan

_TEMPLATES = Path(__file__).parent / "templates"


def train_py(plan: Plan) -> str:
    """Return the file that trains a plan as the notebook would.

    Raises:
        PlanError: The cell contains code for notebooks only, or is not valid Python.
    """
    cell = read_cell(plan.recipe.cell)
    processes = process_count(plan)
    alone = processes == 1 or plan.framework != "torch"
    start = _start(1 if alone else processes)
    lines = [f'"""{_title(plan)}', "", f"Start it:  {start}", ""]
    if plan.framework != "torch" and processes > 1:
        lines += [
            (
                "Run this script once for each of the "
                f"{processes} processes that TF_CONFIG describes."
            ),
            "",
        ]
    lines += [
        "Records, logs and weights go to runs/1, runs/2, ... next to this file. run.json contains"
    ]
    lines += [
        "the run's settings, requirements.txt lists the packages, and README.md explains the rest.",
        '"""',
        "",
    ]
    lines += [*cell.future, ""] if cell.future else []
    lines += ["import workbench as wb", ""]
    join = "joins the run that run.json describes; the notebook's cell is below"
    lines += [f"wb.run_job(__file__)  # {join}", "", cell.text]
    return "\n".join(lines)


def process_count(plan: Plan) -> int:
    """Return the number of processes of a plan's job: its workers and its servers."""
    return plan.engines + len(plan.helpers)


def _title(plan: Plan) -> str:
    """Return a line about the training, suitable for a docstring."""
    name = plan.name or plan.recipe.name
    safe = "".join(c if c.isprintable() else " " for c in name).replace("\\", "/")
    title = safe.replace('"', "'").strip() or "A training run"
    workers = f"{plan.workers} worker{'s' if plan.workers > 1 else ''}"
    servers = f", {plan.servers} server{'s' if plan.servers > 1 else ''}" if plan.servers else ""
    return f"{title}: {plan.strategy} ({plan.entry.term}), {workers}{servers}."


# -- without Workbench ---------------------------------------------------------------------------

_PLAIN = {
    "torch": ("one_device", "mirrored", "sharded"),
    "tensorflow": ("one_device", "mirrored", "multi_worker_mirrored"),
}
_PLAIN_ABLE = (
    "in PyTorch: one_device or mirrored, if the cell uses wb.fit, wb.prepare or your own loop with "
    "torch.distributed; sharded, if the cell uses wb.fit. In TensorFlow: one_device or mirrored, "
    "if the cell uses model.fit or your own loop; multi_worker_mirrored, if the cell uses your own "
    "loop"
)
_LEFT_OUT = {"precision", "compile", "callbacks"}
_DATA = {
    "digits": "_digits", "corpus": "_corpus", "synthetic": "_synthetic", "ratings": "_ratings",
    "tissue": "_tissue", "payments": "_payments",
}  # fmt: skip
_MEMBERS = {"fit", "prepare", "watch", "log", "RunStopped", "data"}


def plain_py(plan: Plan) -> str:
    """Return a file with the same training without Workbench: no records, no stop, no resume.

    Raises:
        PlanError: The training cannot be repeated exactly; the message says what is possible.
    """
    cell = read_cell(plan.recipe.cell)
    used = _used_of_wb(cell.tree)
    _check_plain(plan, cell, used)
    sets = {name.partition(".")[2] for name in used if name.startswith("data.")}
    wanted = {plan.strategy, plan.framework, *(used & {"fit", "prepare"}), *(sets & set(_DATA))}
    if sets & {"VOCABULARY"}:
        wanted.add("corpus")
    wanted |= {"data"} if sets else set()
    shown = [name for name in _DATA if name in wanted]
    members = [f"        {name} = staticmethod({_DATA[name]})" for name in shown]
    members += ["        VOCABULARY = _VOCABULARY"] if "corpus" in shown else []
    options, overrides = plan.options, plan.overrides
    values = {
        "DATA": _sections((_TEMPLATES / "plain_data.txt").read_text("utf-8"), wanted),
        "SEED": str(overrides.get("seed", 0)),
        "OVERRIDES": repr(overrides),
        "WORKERS": str(plan.workers),
        "BUCKET_MB": repr(options.get("bucket_mb", 25.0)),
        "FIND_UNUSED": repr(options.get("find_unused_parameters", False)),
        "UNIT_MB": repr(options.get("unit_mb", 1.0)),
        "RESHARD": repr(options.get("reshard", True)),
        "EVEN": repr(plan.strategy == "sharded"),
        "MEMBERS": "\n".join(members),
    }
    text = _sections((_TEMPLATES / f"plain_{plan.framework}.txt").read_text("utf-8"), wanted)
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    text = re.sub(r"\n{4,}", "\n\n\n", text)  # where sections were left out
    # The cell comes last: it may hold such words, and blank lines.
    script = f"{_plain_head(plan, cell)}{text}".replace("@CELL@", cell.text.strip("\n"))
    _check_collisions(cell, script)
    read = {node.id for node in ast.walk(cell.tree) if isinstance(node, ast.Name)}
    if lost := sorted(read & ENGINE_NAMES - bound_on_top(ast.parse(script))):
        raise _refused(f"not defined in the script: {', '.join(lost)}", _REMOVE)
    return script


def _start(processes: int) -> str:
    if processes == 1:
        return "python train.py"
    return f"torchrun --standalone --nproc-per-node {processes} train.py"


def _plain_head(plan: Plan, cell: Cell) -> str:
    alone = plan.framework != "torch" or plan.workers == 1
    start = _start(1 if alone else plan.workers)
    words = "PyTorch" if plan.framework == "torch" else "TensorFlow"
    lines = [
        f'"""{_title(plan)}',
        "",
        (f"Workbench made this plain {words} script from a notebook's cell."),
    ]
    lines += [f"Start it:  {start}"]
    if plan.strategy == "multi_worker_mirrored":
        lines += [
            (
                "Run this script once for each of the "
                f"{plan.workers} workers that TF_CONFIG describes."
            )
        ]
    shared = use_of(plan.recipe.cell).way in ("fit", "prepare")
    if shared and plan.framework == "torch" and plan.strategy != "one_device":
        lines += [
            "The order of samples is the same with any number of workers. The result is the same",
            "up to rounding, unless the model uses random numbers (dropout) or BatchNorm.",
        ]
    return "\n".join([*lines, '"""', "", *cell.future, *([""] if cell.future else []), ""])


def _sections(text: str, wanted: set[str]) -> str:
    """Return a template's lines without the sections that are not wanted."""
    kept: list[str] = []
    open_ones: list[tuple[str, bool]] = []
    for line in text.splitlines():
        if mark := re.fullmatch(r"#\[(/?)([\w|]+)\]", line):
            if mark[1]:
                assert open_ones.pop()[0] == mark[2], line
            else:
                open_ones.append((mark[2], bool(wanted & set(mark[2].split("|")))))
        elif all(one for _, one in open_ones):
            kept.append(line)
    return "\n".join(kept) + "\n"


def _used_of_wb(tree: ast.Module) -> set[str]:
    """Return the names that a cell uses from `wb`: `fit`, `data.digits`; `` for the whole of it."""
    used = set()
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used |= {node.attr} if node.value.id == "wb" else set()
            if (node.value.id, node.attr) == ("wb", "data") and id(node) not in owners:
                used.add("data as a value")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            inner = node.value
            if isinstance(inner.value, ast.Name) and (inner.value.id, inner.attr) == ("wb", "data"):
                used.add(f"data.{node.attr}")
        elif isinstance(node, ast.Name) and node.id == "wb" and id(node) not in owners:
            used.add("")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            if any(name.split(".")[0] == "workbench" for name in
                   (module, *(a.name for a in node.names if not module))):  # fmt: skip
                used.add("import workbench")
    return used


def _check_plain(plan: Plan, cell: Cell, used: set[str]) -> None:
    """Raise PlanError if a script without Workbench would not train the same."""
    source, entry = plan.recipe.cell, plan.entry
    way = use_of(source).way
    if plan.strategy not in _PLAIN[plan.framework]:
        raise _refused(f"strategy {plan.strategy}", "use one of these strategies", _PLAIN_ABLE)
    if "import workbench" in used:
        raise _refused("import workbench in the cell", "remove the import: wb is already defined")
    known = _MEMBERS | {f"data.{name}" for name in (*_DATA, "VOCABULARY")}
    if strange := sorted(used - known):
        names = ", ".join(f"wb.{name}".rstrip(".") for name in strange)
        raise _refused(f"not defined in the script: {names}", _REMOVE)
    if plan.framework == "tensorflow" and way in ("fit", "prepare"):
        used_way = f"wb.{way} in a TensorFlow cell"
        raise _refused(used_way, "train with model.fit(...)", _PLAIN_ABLE)
    if way is not None and way not in entry.ways:
        raise _refused(f"{WORDS[way]} under {plan.strategy}", "use wb.fit", _PLAIN_ABLE)
    if plan.strategy == "multi_worker_mirrored" and way == "keras":
        raise _refused(
            "model.fit with strategy multi_worker_mirrored; this works only with Workbench's "
            "changes to Keras 3",
            "write your own loop with strategy.run",
            _PLAIN_ABLE,
        )
    features = set(use_of(source).features) & _LEFT_OUT
    if features:
        arguments = ", ".join(f"{name}=..." for name in sorted(features))
        raise _refused(f"wb.fit(..., {arguments})", f"remove {arguments} from the call")
    odd = {"compress": "none", "sync_batchnorm": False, "cross_device_ops": "auto"}
    for name, usual in odd.items():
        if plan.options.get(name, usual) != usual:
            raise _refused(f"-o {name}={plan.options[name]}", "remove the option")
    lost = set(plan.overrides) - {"seed"}
    if lost and way != "fit":
        flags = ", ".join("--" + name.replace("_", "-") for name in sorted(lost))
        step = f"write the value into the cell's code, and remove {flags}"
        raise _refused(f"{flags}: the script can use these values only in wb.fit", step)
    for name in ("faults", "init_from", "checkpoint", "values"):
        if getattr(plan, name):
            flag = {"faults": "--inject", "values": "--set"}.get(
                name, "--" + name.replace("_", "-")
            )
            raise _refused(flag, "remove the option")
    if plan.framework != (framework_of(source) or plan.framework):
        raise _refused(
            "a cell that does not use the framework of the job",
            f"use --framework {framework_of(source)}",
        )


_REMOVE = "remove each of these names from the cell"


def _refused(seen: str, next_step: str, allowed: str | None = None) -> PlanError:
    return PlanError(
        "A script without Workbench would not train in exactly the same way as the cell.",
        seen=seen,
        allowed=allowed,
        next_step=f"{next_step}; or export without --plain: the script then uses Workbench",
        code="WB-PLAN-207",
    )


def _check_collisions(cell: Cell, script: str) -> None:
    """Raise PlanError if the cell redefines a name of the script's functions."""
    own = ast.parse(script[: script.index("class wb:")])
    theirs, same = _imports(own), _imports(cell.tree)
    for name in ("os", "random", "inspect"):  # used before the cell alone
        theirs.pop(name, None)
    functions = bound_on_top(own)
    for name in bound_on_top(cell.tree):
        meant = same.get(name)
        if name in theirs and (meant is None or meant.split(".")[0] != theirs[name].split(".")[0]):
            seen = f"the cell defines {name}, but the script imports something else with this name"
            raise _refused(seen, f"give {name} another name")
        if name.startswith("_") and name in functions:
            seen = f"the cell defines {name}, but the script has its own function with this name"
            raise _refused(seen, f"give {name} another name")


def _imports(tree: ast.Module) -> dict[str, str]:
    """Return the imported objects of a source, by their names."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found
