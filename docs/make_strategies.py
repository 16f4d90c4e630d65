"""Writes docs/strategies.md from the catalog and the strategies' own docstrings.

    python docs/make_strategies.py

No framework is imported: docstrings are read from the source. Indented blocks in them are the
diagrams. A docstring that names a file or folder beside it in backquotes (`compression.py`) has
that file's page added, where it gives a source.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "strategies.md"

HEAD = """# Strategies

<!-- Written by docs/make_strategies.py from the catalog and the strategies' docstrings. -->

How the work and the parameters are laid out over the workers. The same recipe runs under every one
of them: change the word after `%%distributed`. Options are set with `-o name=value`.
Words of other systems and names of classes lead to a strategy as well: `megatron`,
`DistributedDataParallel`, `MultiWorkerMirroredStrategy`.

All of them are tested on CPUs of one machine, but for `tpu`, of which only the refusals are tested.
Nothing on this page was ever run on a GPU, on a TPU or over several machines
([never run](never-run.md)).

## Loops of your own in PyTorch

`wb.prepare(model, optimizer, loader)` gives back the same module. Gradients are averaged at the end
of each backward, so the loss may come about in any way: `model(x)`, a method
(`model.training_step(batch)`), parts of the model, a gradient penalty by `torch.autograd.grad`.
Layers may be frozen, unfrozen and added, and optimizers exchanged in mid-loop, at the same step on
every rank. `model.no_sync()` lets gradients add up without averaging, as in
DistributedDataParallel; there is no `model.module`: it is `model`.

A loop over several models hands over each pair, the loader with the first:

```text
netD, optD, loader = wb.prepare(netD, optD, loader)
netG, optG = wb.prepare(netG, optG)
```

All of them are averaged and [compared](metrics.md#equal-copies). A step ends with an optimizer of
the first pair; what the loop does after it counts to the next step, as `other`. So hand over first
the pair that steps last in an iteration, where that time matters. `one_device` and `mirrored` take
several pairs. The run's final weights are those of the first model; a checkpoint needs the others
in `keep=`.

An optimizer that steps over parameters nobody averages is named in a warning.
"""


def make_page() -> str:
    """Return the page's text."""
    from workbench import catalog

    parts = [HEAD]
    for framework in catalog.FRAMEWORKS:
        entries = catalog.strategies(framework)
        if not entries:
            continue
        parts.append(f"## {'PyTorch' if framework == 'torch' else 'TensorFlow'}")
        parts.append(overview(entries))
        parts += [chapter(entry) for entry in entries]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def overview(entries: Iterable) -> str:
    """Return a table with a row per strategy."""
    rows = [
        (
            f"[`{entry.name}`](#{anchor(entry)})",
            entry.term,
            cadence(entry),
            ", ".join(WAYS[way] for way in entry.ways),
            entry.suits,
        )
        for entry in entries
    ]
    return table(("strategy", "term", "steps", "used with", "suits"), rows)


WAYS = {
    "fit": "`wb.fit`", "prepare": "`wb.prepare`", "keras": "`model.fit`",
    "loop": "own loop with `strategy`",
}  # fmt: skip


def anchor(entry) -> str:
    """Return the name under which GitHub links to an entry's heading."""
    from workbench import catalog

    earlier = catalog.FRAMEWORKS[: catalog.FRAMEWORKS.index(entry.framework)]
    same = [other for framework in earlier for other in catalog.names(framework)]
    return f"{entry.name}-1" if entry.name in same else entry.name


def cadence(entry) -> str:
    """Return whether workers step together."""
    if entry.sync:
        return "together"
    return (
        f"each on its own; together with `{entry.sync_option}`"
        if entry.sync_option
        else ("each on its own")
    )


def chapter(entry) -> str:
    """Return the section of one strategy."""
    module = REPOSITORY / (entry.module.partition(":")[0].replace(".", "/") + ".py")
    text = docstring(module)
    lines = [f"### {entry.name}", f"**{entry.term}.** {entry.summary}"]
    lines[-1] += f" `%%distributed {entry.name}{flags(entry)}`"
    lines.append(to_markdown(text.partition("\n")[2]))
    lines += naive(module)
    lines.append(facts(entry))
    if entry.options:
        lines.append(options(entry))
    lines += [companion(part) for part in dict.fromkeys(companions(text, module.parent))]
    return "\n\n".join(line.strip() for line in lines if line.strip())


def naive(path: Path) -> Iterator[str]:
    """Return the functions in which a strategy's file shows its algorithm in plain lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("naive"):
            yield f"```python\n{ast.get_source_segment(source, node)}\n```"


def flags(entry) -> str:
    """Return what an example line may add: TensorFlow's name."""
    return "" if entry.framework == "torch" else f" --framework {entry.framework}"


def facts(entry) -> str:
    """Return the rest of what the catalog says, as a list."""
    from workbench import catalog

    lines = [f"- described in: {entry.source}"]
    if entry.aliases:
        lines.append("- also called: " + ", ".join(f"`{alias}`" for alias in entry.aliases))
    if entry.max_workers is not None:
        lines.append(f"- workers: at most {entry.max_workers}")
    if entry.servers_option:
        lines.append(f"- servers: as many as option `{entry.servers_option}` says")
    elif entry.servers:
        lines.append(f"- servers: {entry.servers}, started by itself")
    if entry.copies_option:
        lines[-1] += f"; `{entry.copies_option}=2` keeps what each holds on another one too"
    if entry.max_workers != 1 and entry.anywhere:
        able = "can share a GPU (`--devices cuda`)" if entry.shares_gpu else "need a GPU each"
        who = "replicas" if entry.one_engine and not entry.remote_workers else "workers"
        lines.append(f"- on GPUs, {who} {able}")
    if missing := sorted(catalog.FIT_FEATURES - entry.supports):
        lines.append("- not supported: " + ", ".join(f"`{name}`" for name in missing))
    if entry.links:
        lines.append("- `--inject bandwidth=...` and `latency=...` are simulated on its links")
    lines.append(f"- lost at most when a run goes on from its last checkpoint: {entry.loses}")
    if entry.max_workers == 1:
        return "\n".join(lines)
    if not entry.anywhere:
        lines.append(
            "- never run on its device ([never run](never-run.md)): that several workers give what "
            "one device gives is what TensorFlow says, and no test here shows it"
        )
    elif entry.exact_with is None:
        lines.append("- several workers do not give what one device gives")
    elif entry.exact_with:
        given = ", ".join(f"`{name}={value}`" for name, value in entry.exact_with)
        lines.append(f"- several workers give what one device gives, up to rounding, with {given}")
    else:
        lines.append("- several workers give what one device gives, up to rounding")
    return "\n".join(lines)


def options(entry) -> str:
    """Return the table of an entry's options."""
    rows = [
        (f"`{option.name}`", option.allowed, f"`{shown(option.default)}`", option.help)
        for option in entry.options
    ]
    return table(("option", "values", "default", "what it does"), rows)


def shown(value: object) -> str:
    """Return a default as it would be typed."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def companions(text: str, folder: Path) -> Iterator[str]:
    """Return the docstrings with a source in the files that a docstring names in backquotes."""
    for name in dict.fromkeys(re.findall(r"`([a-z_]+/|[a-z_]+(?:/[a-z_]+)*\.py)`", text)):
        path = folder / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            for found in docstrings(file) if file.exists() else ():
                if re.search(r"^Sources?:", found, re.MULTILINE):
                    yield found.partition("\n\nArgs:")[0]


def companion(text: str) -> str:
    """Return the sub-section of a part that a strategy builds on."""
    title, _, rest = text.partition("\n")
    return f"#### {title.rstrip('.')}\n\n{to_markdown(rest)}"


def docstrings(path: Path) -> Iterator[str]:
    """Return the docstrings of a module and of its functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in (tree, *(one for one in tree.body if isinstance(one, ast.FunctionDef))):
        if text := ast.get_docstring(node):
            yield text


def docstring(path: Path) -> str:
    """Return a module's docstring, read from its source.

    Raises:
        ValueError: It has none.
    """
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path} has no docstring")
    return text


def to_markdown(text: str) -> str:
    """Return a docstring's body with its indented blocks fenced."""
    parts, block = [], []
    for line in [*text.strip("\n").split("\n"), "end"]:
        if line.startswith("    ") or (block and not line.strip()):
            block.append(line)
            continue
        if block:
            body = "\n".join(line[4:] for line in block).rstrip()
            # A continued list item is indented too, but less; what is fenced stands on its own.
            parts.append(f"```text\n{body}\n```\n")
            block = []
        parts.append(line)
    return "\n".join(parts[:-1])


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    PAGE.write_text(make_page(), encoding="utf-8")
