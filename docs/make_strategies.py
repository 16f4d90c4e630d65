"""Writes docs/strategies.md from the catalog and the strategies' own docstrings.

    python docs/make_strategies.py

No framework is imported: docstrings are read from the source. Indented blocks in them are the
diagrams. If a docstring names a file or folder of the same folder in backquotes (`compression.py`),
the docstring of that file is added, if it gives a source.
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

A strategy divides the work and the parameters among the workers. To train the same recipe under
another strategy, change the word after `%%distributed`. (Some strategies work only with `wb.fit`,
or only in one framework.) `-o name=value` sets an option of the
strategy. Instead of the strategy's name you can also write a name that PyTorch, TensorFlow or
another system uses: `DistributedDataParallel`, `MultiWorkerMirroredStrategy`, `megatron`.

All strategies except `tpu` are tested on the CPUs of one machine. For `tpu`, tests check only the
errors that appear if there is no TPU. Nothing on this page was ever run on a GPU, on a TPU or on
several machines ([never run](never-run.md)).

Some sections say that the result is the same as on one device. BatchNorm and dropout are
exceptions: with these layers the result can depend on the number of workers
([reasons](choosing.md#which-strategies-can-win)).

## Loops of your own in PyTorch

`wb.prepare(model, optimizer, loader)` returns the model itself, without a wrapper. So you can
compute the loss in any way: with `model(x)`, with a method (`model.training_step(batch)`) or with
parts of the model. Because there is no wrapper, use `model` where code for DistributedDataParallel
uses `model.module`.

Under `mirrored`, the gradients are averaged when a backward pass ends. The loss can contain a
gradient penalty (`torch.autograd.grad`). During the loop you can freeze, unfreeze and add layers,
and replace the optimizer. Make each such change at the same step on every rank. In a block with
`model.no_sync()`, each worker adds up its own gradients without averaging, as in
DistributedDataParallel. Every other strategy has its own section on this page. That section
explains what its workers exchange.

If a loop trains several models, call `wb.prepare` for each pair of model and optimizer. Pass the
loader with the first pair:

```text
netG, optG, loader = wb.prepare(netG, optG, loader)
netD, optD = wb.prepare(netD, optD)
```

For each of these models, the gradients are averaged over the workers. Workbench also checks that
all workers have [equal copies](metrics.md#equal-copies) of the models. For Workbench, a step ends
when the first pair's `optimizer.step()` has ended. If the loop then updates another model,
Workbench counts the time of this update in the next step, as `other`
(one of the [parts of a step](metrics.md#the-parts-of-a-step)). To avoid this, find the pair whose
`optimizer.step()` comes last in each iteration, and pass this pair to the first `wb.prepare` of the
cell. Only the strategies `one_device` and `mirrored` accept several pairs. The run's final weights
are the weights of the first model. If you save checkpoints, pass the other models and their
optimizers to the first `wb.prepare`: `keep=[netD, optD]`.

If an optimizer updates parameters of a model that you did not pass to `wb.prepare`, the gradients
of these parameters are not averaged. A warning shows the shapes of these parameters.
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
    return table(("strategy", "standard term", "steps", "used with", "suitable for"), rows)


WAYS = {
    "fit": "`wb.fit`", "prepare": "`wb.prepare`", "keras": "`model.fit`",
    "loop": "your own loop with the variable `strategy`",
}  # fmt: skip


def anchor(entry) -> str:
    """Return the name under which GitHub links to an entry's heading."""
    from workbench import catalog

    earlier = catalog.FRAMEWORKS[: catalog.FRAMEWORKS.index(entry.framework)]
    same = [other for framework in earlier for other in catalog.names(framework)]
    return f"{entry.name}-1" if entry.name in same else entry.name


def cadence(entry) -> str:
    """Return whether workers step together."""
    if entry.cadence:
        return entry.cadence
    if entry.sync:
        return "synchronous"
    return (
        f"asynchronous; synchronous with the option `{entry.sync_option}`"
        if entry.sync_option
        else ("asynchronous")
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
    """Return the flag that an example line needs for TensorFlow; empty for PyTorch."""
    return "" if entry.framework == "torch" else f" --framework {entry.framework}"


MEANT = {"own_data": "`own_data` (`wb.data.own`)"}
"""Features whose names do not say what they are."""

SAME = "the result of several workers is the same as on one device, except for rounding errors"


def facts(entry) -> str:
    """Return the other facts of the catalog about a strategy, as a list."""
    from workbench import catalog

    lines = [f"- source: {entry.source}"]
    if entry.aliases:
        lines.append("- other names: " + ", ".join(f"`{alias}`" for alias in entry.aliases))
    if entry.max_workers is not None:
        lines.append(f"- workers: at most {entry.max_workers}")
    if entry.servers_option:
        lines.append(f"- servers: the option `{entry.servers_option}` sets their number")
    elif entry.servers:
        lines.append(f"- servers: {entry.servers}, started automatically")
    if entry.copies_option:
        lines[-1] += f". With `{entry.copies_option}=2`, " + (
            "each server also holds a copy of another server's parameters and optimizer state. "
            f"With `{entry.servers_option}=1`, Workbench then starts a second server, which holds "
            "only the copy"
            if entry.servers_option
            else "Workbench starts a second server, which holds a copy of the parameters and the "
            "optimizer's state"
        )
    if entry.max_workers != 1 and entry.anywhere:
        inside = entry.one_engine and not entry.remote_workers
        one = "worker" if not inside else "stage" if entry.takes_turns else "replica"
        lines.append(
            "- several workers can share one GPU (`--devices cuda`)"
            if entry.shares_gpu
            else f"- on GPUs, each {one} needs its own GPU"
        )
    if missing := sorted(catalog.FIT_FEATURES - entry.supports):
        lines.append(
            "- not supported by `wb.fit` under this strategy: "
            + ", ".join(MEANT.get(name, f"`{name}`") for name in missing)
        )
    if entry.links:
        lines.append(
            "- links: `--inject bandwidth=...` and `--inject latency=...` simulate a slower link"
        )
    lines.append(f"- if a run continues from its last checkpoint, it loses at most {entry.loses}")
    if entry.max_workers == 1:
        return "\n".join(lines)
    if not entry.anywhere:
        lines.append(
            "- [never run](never-run.md) on a TPU: TensorFlow's documentation says that "
            "the result is the same as on one device; no test of Workbench checks this"
        )
    elif entry.exact_with is None:
        lines.append("- with several workers, the result is not the same as on one device")
    elif entry.exact_with or entry.sync_option:
        named = [f"`{name}={value}`" for name, value in entry.exact_with]
        if entry.sync_option:
            named.append(f"`{entry.sync_option}=true`")
        given = ", ".join(named)
        lines.append(
            f"- {SAME}, if {given}, the optimizer is SGD, and all other options have their defaults"
            if entry.linear_only
            else f"- with {given}, {SAME}"
        )
    else:
        lines.append(f"- {SAME}")
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
            # Continued list items have a smaller indent; a fenced block needs empty lines.
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
