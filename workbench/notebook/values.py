"""`%push` and `%pull`: variables between the notebook and the engines.

`wb.to_a_cell` puts text into the notebook: a new cell below the running cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..shared.magic_args import parse_ranks, tokens

if TYPE_CHECKING:
    from ..session.cluster import Cluster


def push_values(cluster: Cluster, line: str, namespace: dict[str, Any]) -> None:
    """Copy the named variables to all engines, or to those after `--rank`.

    Raises:
        PlanError: A name does not exist in the notebook.
    """
    names, flags = _split(line, ("--rank",), "%push x y [--rank 0,1]")
    missing = [name for name in names if name not in namespace]
    if missing:
        raise PlanError(
            "The notebook has no variable with this name.",
            seen=", ".join(missing),
            code="WB-PLAN-134",
        )
    ids = _ids(cluster, flags)
    cluster.push({name: namespace[name] for name in names}, ids)


def pull_values(cluster: Cluster, line: str, namespace: dict[str, Any]) -> None:
    """Copy the named variables into the notebook: a list by rank, or one value with `--rank`.

    Raises:
        PlanError: A name does not exist on an engine.
    """
    names, flags = _split(line, ("--rank", "--as"), "%pull loss [--rank 0] [--as l]")
    targets = flags.get("--as", "").split(",") if "--as" in flags else names
    if len(targets) != len(names):
        raise PlanError(
            "--as needs one name for each pulled variable.",
            seen=f"--as {flags['--as']} for the variables {', '.join(names)}"
            if len(names) > 1
            else f"--as {flags['--as']} for the variable {names[0]}",
            allowed="one name, such as --as a"
            if len(names) == 1
            else f"{len(names)} names, separated by commas. Example with two names: --as a,b",
            code="WB-PLAN-135",
        )
    ids = _ids(cluster, flags)
    found = cluster.pull(names, ids)
    for name, target in zip(names, targets, strict=True):
        lacking = [i for i, values in found.items() if name not in values]
        if lacking:
            raise PlanError(
                f"Some of these engines do not have the variable {name!r}."
                if len(lacking) < len(found)
                else f"None of these engines has the variable {name!r}.",
                seen=f"missing on engine {', '.join(map(str, lacking))}",
                next_step="pull from an engine that has the variable (--rank ID), or define the "
                "variable in a %%distributed cell",
                code="WB-PLAN-136",
            )
        values = [found[i][name] for i in found]
        namespace[target] = values[0] if "--rank" in flags and len(values) == 1 else values


def _split(line: str, known: tuple[str, ...], usage: str) -> tuple[list[str], dict[str, str]]:
    words, names, flags = list(tokens(line)), [], {}
    while words:
        word = words.pop(0)
        if word in known and words:
            flags[word] = words.pop(0)
        elif word.startswith("-"):
            raise PlanError(
                f"{word} needs a value." if word in known else f"The flag {word} does not exist.",
                seen=line,
                allowed=usage,
                code="WB-PLAN-137",
            )
        else:
            names.append(word)
    if not names:
        raise PlanError("No variable is given.", allowed=usage, code="WB-PLAN-138")
    return names, flags


def _ids(cluster: Cluster, flags: dict[str, str]) -> list[int]:
    ids = cluster.pool.of_ranks(parse_ranks(flags["--rank"]) if "--rank" in flags else None)
    unknown = [i for i in ids if i not in cluster.ids]
    if unknown:
        raise PlanError(
            "This engine does not exist.",
            seen=unknown,
            allowed=f"{cluster.ids}",
            code="WB-PLAN-139",
        )
    return ids


def to_a_cell(text: str) -> bool:
    """Put text into a new cell below the running cell; the new cell is not run.

    Only the reply to a cell can carry the text, so a button's callback cannot do this. In
    JupyterLab and Notebook 7 the panel inserts its cells itself; elsewhere it shows the text with
    a button that copies it.

    Returns:
        Whether the notebook got the text; otherwise the caller must show it.
    """
    from IPython import get_ipython

    shell: Any = get_ipython()
    if shell is None or not _in_a_cell(shell):
        return False
    shell.set_next_input(text, replace=False)
    return True


def _in_a_cell(shell: Any) -> bool:
    """Whether a cell is running, and not a message of a widget."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:  # a terminal, which shows the text at its next prompt
        return True
    parent = kernel.get_parent() or {}
    kind = parent.get("header", {}).get("msg_type", "")
    return bool(kind == "execute_request")
