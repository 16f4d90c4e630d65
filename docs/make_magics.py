"""Writes the tables of docs/magics.md from the parsers of the magics' lines.

    python docs/make_magics.py

What a flag is called, what it takes and what it is for come from `shared/run_request.py` and
`shared/magic_args.py`. What the parser of `%cluster` does not know (the default in words, an
example) stands here, per flag; a flag that is missing here is an error, and a test parses every
example.
"""

from __future__ import annotations

import re
import sys
from argparse import Action, ArgumentParser
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "magics.md"
BEGIN, END = "<!-- {}: written by make_magics.py -->", "<!-- end of {} -->"
CODE = re.compile(
    r"(?:^|(?<=; ))(?:start|attach|ssh|slurm|debug|logs)(?=: )|"
    r"(?<![\w-])(?:--[a-z][\w-]*(?: heal)?|@?wb\.[\w.]*\w|"
    r"[\w.@]+[=:@][\w.@=:,]*\w|\w+=\.{3}|'#SBATCH \.{3}'|\d+(?:\.\d+){3}/\d+|\[\d,\d\]|\d[,-]\d|"
    r"torch|tensorflow|local|ssh|slurm|mpi|sbatch|mpiexec)(?![\w-])"
)
"""What a help text names as it is typed: flags, `name=value`, `wb.name`, hosts, addresses, ids."""

CLUSTER: dict[str, tuple[str, str]] = {
    "action": ("`status`", "%cluster"),
    "values": (
        "`start`: 2 engines. With `--on`: the sum of the numbers after the hosts' names; a host "
        "without a number counts as 1. With `--nodes` and `--gpus-per-node`: one engine for each "
        "GPU. With only `--nodes`: one engine for each node. For other actions see the table of "
        "actions",
        "%cluster start 4",
    ),
    "--devices": ("`auto`", "%cluster start 2 --devices cpu"),
    "--launcher": ("`local`", "%cluster start 2 --launcher local"),
    "--on": ("ssh needs this flag", "%cluster start 6 --launcher ssh --on node1:4,user@node2:2"),
    "--nodes": ("Slurm chooses the number", "%cluster start 8 --launcher slurm --nodes 2"),
    "--gpus-per-node": ("0 GPUs", "%cluster start 8 --launcher slurm --nodes 2 --gpus-per-node 4"),
    "--time": ("the partition's default", "%cluster start 8 --launcher slurm --time 1:30:00"),
    "--partition": ("the site's default", "%cluster start 8 --launcher slurm --partition gpu"),
    "--account": ("the user's default", "%cluster start 8 --launcher slurm --account ml"),
    "--setup": ("no line is run", "%cluster start 8 --launcher slurm --setup 'module load cuda'"),
    "--launcher-option": (
        "no other options",
        "%cluster start 8 --launcher slurm --launcher-option qos=high",
    ),
    "--listen": (
        "loopback if all engines run on the notebook's machine; otherwise the address from which "
        "the notebook's machine connects to the other machines",
        "%cluster start 4 --launcher slurm --listen eth0",
    ),
    "--ports": ("any free ports", "%cluster start 4 --launcher slurm --ports 20000-20100"),
    "--start-timeout": (
        "2 minutes; with Slurm a day",
        "%cluster start 8 --launcher slurm --start-timeout 10m",
    ),
    "--framework": ("`torch`, if it is installed", "%cluster start 2 --framework tensorflow"),
    "--keep": ("off: the cluster ends when the notebook ends", "%cluster start 8 --keep"),
    "--idle-timeout": ("`never`; with `--keep` a day", "%cluster start 2 --idle-timeout 30m"),
    "--take": ("off", "%cluster attach ID --take"),
    "--command": ("a prompt opens", '%cluster debug 1 -c "p x.shape" -c u'),
    "--port": ("debugpy is not started", "%cluster debug 1 --port 5678"),
    "--follow": ("off", "%cluster logs 1 -f"),
    "--lines": ("40", "%cluster logs 1 -n 100"),
}
"""Per flag of `%cluster`: its default in words, a line that uses it."""

ACTIONS: dict[str, tuple[str, str]] = {
    "start": (
        "%cluster start 4",
        "starts 4 engines; if engines already run, adds engines until there are 4",
    ),
    "status": ("%cluster", "shows a row per engine: device, CPU, memory, state, last log line"),
    "restart": (
        "%cluster restart 1",
        "replaces engine 1 by a new engine with the same id; without an id, replaces all engines",
    ),
    "logs": (
        "%cluster logs 1",
        "shows the last lines of engine 1's log; without an id, of every engine's log",
    ),
    "stacks": ("%cluster stacks", "shows the current call stack of every thread of every engine"),
    "debug": (
        "%cluster debug",
        "opens a debugger for a paused engine. If no engine is paused, the debugger is for the "
        "engine that failed first. With an id (`%cluster debug 1`), it is for the engine with "
        "this id",
    ),
    "free": (
        "%cluster free",
        "deletes the cells' variables on all engines, and releases GPUs until the next cell or run",
    ),
    "attach": (
        "%cluster attach ID",
        "takes over a cluster that was started with `--keep`, together with its run",
    ),
    "stop": ("%cluster stop", "ends all engines"),
}
"""Per action of `%cluster`: a line that asks for it, what it does."""


def actions_of(parser: ArgumentParser) -> list[Action]:
    """Return a parser's arguments, in the order in which they were added."""
    return list(parser._actions)


def key(action: Action) -> str:
    """Return the name under which this module knows an argument: its long flag, or its name."""
    return action.option_strings[-1] if action.option_strings else action.dest


def flags(parser: ArgumentParser, known: Mapping[str, tuple[str, str]]) -> str:
    """Return the table of a parser's arguments.

    Raises:
        ValueError: One of them is not known here, or one that is known is gone.
    """
    found = {key(action): action for action in actions_of(parser)}
    if set(found) != set(known):
        raise ValueError(f"make_magics.py and the parser differ: {sorted(set(found) ^ set(known))}")
    rows = [("flag", "takes", "what it does", "without it", "example")]
    for name, action in found.items():
        default, example = known[name]
        shown = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"{name.upper()}"
        said = action.help or ""
        if action.dest == "action":
            said = f"`{said.replace(', ', '`, `')}`"
        rows.append((shown, takes(action), sentence(said), default, f"`{example}`"))
    return table(rows)


def takes(action: Action) -> str:
    """Return what follows a flag."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if not action.option_strings:
        return "words" if action.nargs == "*" else "a word"
    more = ", repeatable" if isinstance(action.default, list) else ""
    return f"`{action.metavar or action.dest.upper()}`{more}"


def sentence(text: str) -> str:
    """Return a help text as Markdown: flags, values and names of code in backquotes."""
    parts = text.split("`")  # every second part is code already
    return "`".join(
        part if number % 2 else CODE.sub(r"`\g<0>`", part) for number, part in enumerate(parts)
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table; the first row is its head."""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def actions() -> str:
    """Return the table of what `%cluster` does.

    Raises:
        ValueError: The parser knows other actions than this module.
    """
    from workbench.shared import magic_args

    if set(magic_args.ACTIONS) != set(ACTIONS):
        odd = sorted(set(magic_args.ACTIONS) ^ set(ACTIONS))
        raise ValueError(f"make_magics.py and cluster_line.py differ: {odd}")
    rows = [(f"`{example}`", what) for example, what in ACTIONS.values()]
    return table([("line", "what it does"), *rows])


def names() -> str:
    """Return the table of names that cells find on the engines."""
    rows = [(f"`{name}`", *what) for name, what in NAMES.items()]
    return table([("name", "framework", "what it is"), *rows])


NAMES: dict[str, tuple[str, str]] = {
    "rank": ("both", "this worker's index, 0 to `world_size - 1`"),
    "local_rank": ("both", "this worker's index among the workers of its host"),
    "world_size": ("both", "the number of workers of this cell or run, without servers"),
    "device": ("both", "this worker's device: `cpu`, `cuda:0`; under TensorFlow `GPU:0`"),
    "wb": ("both", "the package Workbench: `wb.fit`, `wb.prepare`, `wb.log`, `wb.data`, ..."),
    "dist": ("PyTorch", "`torch.distributed`; the process group is already initialized"),
    "strategy": ("TensorFlow", "the run's `tf.distribute.Strategy`; the cell runs in its scope"),
}  # fmt: skip
"""What is injected, for which framework, what it is."""


def put(page: str, name: str, content: str) -> str:
    """Return the page with the part of that name replaced.

    Raises:
        ValueError: The page lacks its marks.
    """
    begin, end = BEGIN.format(name), END.format(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs {begin} and {end}, once each")
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def make_page(page: str) -> str:
    """Return the page with all its tables made anew."""
    from workbench.shared.magic_args import cluster_parser
    from workbench.shared.run_request import FLAGS, cell_parser

    cell = {flag.long: (flag.without, flag.example) for flag in FLAGS.values()}
    parts = {
        "actions of %cluster": actions(),
        "flags of %cluster": flags(cluster_parser(), CLUSTER),
        "flags of %%distributed": flags(cell_parser(), cell),
        "injected names": names(),
    }
    for name, content in parts.items():
        page = put(page, name, content)
    return page


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
