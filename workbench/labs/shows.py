"""What labs show and hand out: `labs.beside`, `labs.namespaces`, `labs.take_home`.

The first is a formula with its prediction and the measured value. The second is a picture of the
names that the notebook and the engines hold at this moment, side by side. The third is one file
with a lab's runs, which a browser can download.
"""

from __future__ import annotations

import csv
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, RunError
from ..execution.registry import runs as known
from ..execution.stop import ending
from ..notebook.session import session
from ..views.table import Column, Table
from ..views.text import UNKNOWN, duration, number, size
from ..views.theme import Canvas, Picture, svg_text, width_of

if TYPE_CHECKING:
    from ..execution.run import Run

_SHOWN: dict[str, Callable[[float], str]] = {
    "s": duration,
    "bytes": size,
    "share": lambda value: f"{value * 100:.1f} %",
    "x": lambda value: f"{value:.2f}x",
    "": number,
}


def beside(
    *rows: tuple[str, str, float, float] | tuple[str, str, float, float, str], title: str = ""
) -> Table:
    """Return a table that compares the predictions of formulae with measured numbers.

    Args:
        rows: What it is; its formula; the predicted and the measured value; the unit: `s`, `bytes`,
            `share` (0..1), `x` (how many times as much), empty for a plain number, or any word.
    """
    shown = [_row(*row) for row in rows]
    columns = [
        Column("", "left"), Column("formula", "left"), Column("predicted"), Column("measured"),
        Column("measured / predicted"),
    ]  # fmt: skip
    return Table(columns, shown, title)


def _row(what: str, formula: str, predicted: float, measured: float, unit: str = "") -> list[str]:
    def in_unit(value: float) -> str:
        return f"{number(value)} {unit}"

    show = _SHOWN.get(unit, in_unit)
    ratio = measured / predicted if predicted else math.nan
    values = [show(v) if math.isfinite(v) else UNKNOWN for v in (predicted, measured)]
    return [what, formula, *values, f"{ratio:.2f}" if math.isfinite(ratio) else UNKNOWN]


_FOUND = "_labs_names"
_SHOW = f"""
def _labs_shorten(value):
    import math
    kind = type(value).__name__
    try:
        if hasattr(value, "shape") and not isinstance(value, type):
            words = kind + " " + ("x".join(map(str, value.shape)) or "scalar")
            few = math.prod(value.shape) <= 4 and hasattr(value, "tolist")
            return words + (f" {{value.tolist()}}" if few else "")
        words = " ".join(repr(value).split())
    except Exception:  # looking at an object of the user may raise anything
        return f"<{{kind}}>"
    return words if len(words) <= 60 else words[:57] + "..."
def _labs_held(names, ours):
    from types import ModuleType
    return {{
        name: _labs_shorten(value) for name, value in sorted(names.items())
        if not name.startswith("_") and name not in ours and not isinstance(value, ModuleType)
    }}
{_FOUND} = _labs_held
"""
_OURS = (
    *("rank", "local_rank", "world_size", "device", "wb", "dist", "strategy", "labs"),
    *("get_ipython", "In", "Out", "exit", "quit", "open"),
)


def namespaces() -> Namespaces:
    """Return a picture of the names in the notebook's process and in each engine's.

    Modules and the names that Workbench sets on every engine (`rank`, `device`, ...) are left out.

    Raises:
        ClusterError: No cluster is running.
        RunError: The engines are busy.
    """
    from IPython.core.getipython import get_ipython

    cluster = session.need_cluster()
    last = f"{_FOUND} = {_FOUND}(dict(globals()), {_OURS!r})\n"
    with ending(cluster):
        task = cluster.execute(_SHOW + last + "del _labs_held, _labs_shorten")
        task.over.wait()
    failure = task.failure()
    if failure is not None:
        raise RunError(failure.what, next_step=failure.next_step, code="WB-RUN-049")
    found = cluster.pull([_FOUND], task.ids)
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    hidden = {} if shell is None else shell.user_ns_hidden
    mine: dict[str, Any] = {} if shell is None else dict(shell.user_ns)
    mine = {name: value for name, value in mine.items() if name not in hidden}
    here: dict[str, Any] = {}
    exec(_SHOW, here)  # the same rules on both sides
    return Namespaces(here[_FOUND](mine, _OURS), [found[i][_FOUND] for i in task.ids])


_WIDTH, _LEFT, _RIGHT = 680.0, 250.0, 300.0
_LINE, _HEAD, _PAD, _GAP = 15.0, 22.0, 8.0, 12.0
_MOST = 8
"""Names that are shown of each process; the rest is counted."""


@dataclass(frozen=True)
class Namespaces(Picture):
    """What the notebook's process and each engine's process hold.

    Attributes:
        notebook: Shortened values by name.
        engines: The same of each engine, in the order of the ranks.
    """

    notebook: Mapping[str, str]
    engines: Sequence[Mapping[str, str]]

    def text(self) -> str:
        """The same as text, a paragraph per process."""
        found = [_paragraph("the notebook", self.notebook)]
        found += [_paragraph(f"engine {i}", held) for i, held in enumerate(self.engines)]
        return "\n".join(found)

    def canvas(self) -> Canvas:
        """The notebook on the left, the engines on the right, the magics between them."""
        y, body, middles = 20.0, [], []
        x = _WIDTH - _RIGHT
        for rank, held in enumerate(self.engines):
            part, high = _box(x, y, _RIGHT - 1, f"engine {rank} · rank {rank}", held)
            body += part
            middles.append(y + high / 2)
            y += high + _GAP
        height = max(y, _high(self.notebook) + 40)
        top = (height - _high(self.notebook)) / 2
        part, _ = _box(1, top, _LEFT - 1, "the notebook's kernel", self.notebook)
        body += part
        middle = height / 2
        for target in middles:
            body.append(
                f'<path class="l" d="M{_LEFT:.0f} {middle:.1f}C{_LEFT + 60:.0f} {middle:.1f} '
                f'{x - 60:.0f} {target:.1f} {x:.0f} {target:.1f}"/>'
            )
        words = (_LEFT + x) / 2
        body.append(svg_text(words, 12, "%push →   ← %pull", "m", anchor="middle"))
        body.append(svg_text(1, 12, "a normal cell runs here", "m"))
        body.append(svg_text(_WIDTH, 12, "a %%distributed cell runs here", "m", anchor="end"))
        title = f"Variables of the notebook and of {len(self.engines)} engines"
        return Canvas(_WIDTH, height + 4, body, title, self.text())


def _high(held: Mapping[str, str]) -> float:
    lines = min(len(held), _MOST) + (len(held) > _MOST) or 1
    return _HEAD + lines * _LINE + _PAD


def _box(
    x: float, y: float, width: float, title: str, held: Mapping[str, str]
) -> tuple[list[str], float]:
    high = _high(held)
    body = [
        f'<rect class="b" rx="6" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{high:.1f}"/>',
        svg_text(x + 10, y + 16, title, bold=True),
    ]
    lines = [f"{name} = {value}" for name, value in list(held.items())[:_MOST]]
    if len(held) > _MOST:
        lines.append(f"and {len(held) - _MOST} more")
    for i, line in enumerate(lines or ["no variables of yours"]):
        most = int((width - 20) / width_of("x"))
        shown = line if len(line) <= most else line[: most - 1] + "…"
        body.append(svg_text(x + 10, y + _HEAD + 11 + i * _LINE, shown, "" if lines else "m"))
    return body, high


def _paragraph(who: str, held: Mapping[str, str]) -> str:
    lines = [f"  {name} = {value}" for name, value in held.items()]
    return "\n".join([f"{who}:", *(lines or ["  no variables of yours"])])


_README = """Runs of a lab.

NAME/              a run: wb.load("NAME") loads this run, with history, evaluations and weights
NAME/history.csv   one row per worker and step; times in seconds, sizes in bytes
NAME/summary.txt   the key figures of the run
NAME/run.png       the picture of the run
"""


class Bundle:
    """A file that holds runs; the notebook shows a link to it."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.path, self.names = path, names

    def text(self) -> str:
        """What the file contains and how to open it."""
        runs = ", ".join(self.names)
        return (
            f"{self.path}: {runs}. Download this file from the file browser. At home, unzip "
            f'the file and load a run, for example with wb.load("{self.names[0]}").'
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        import html

        link = html.escape(self.path.as_posix())
        words = html.escape(self.text().partition(": ")[2])
        page = f'<a href="{link}" download>{link}</a>: {words}'
        return {"text/html": page, "text/plain": self.text()}

    def __repr__(self) -> str:
        return self.text()


def take_home(*runs: Run | str, to: str | Path = "lab.zip") -> Bundle:
    """Write runs to a zip file: records, weights, history as CSV, figures, and how to read them.

    Args:
        runs: Runs or their names; all of `wb.runs` by default.
        to: The file, in the notebook's folder by default.

    Raises:
        PlanError: There is no run to write to the file, or the file is not a `.zip`.
    """
    path = Path(to)
    if path.suffix != ".zip":
        raise PlanError(
            "The argument to= must be the name of a zip file.",
            seen=str(to),
            allowed='"lab.zip"',
            code="WB-PLAN-049",
        )
    chosen = [known[run] if isinstance(run, str) else run for run in runs or known.values()]
    if not chosen:
        raise PlanError(
            "There is no run to write to the zip file.",
            next_step="run a training cell first",
            code="WB-PLAN-050",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        top = Path(folder, "runs")
        for name, run in _folders(chosen).items():
            _put(run, top / name)
        (top / "README.txt").write_text(_README, encoding="utf-8")
        made = shutil.make_archive(str(Path(folder, "made")), "zip", top)
        Path(made).replace(path)
    return Bundle(path, [run.name for run in chosen])


def _folders(chosen: Sequence[Run]) -> dict[str, Run]:
    """Return a folder name for each run: the run's own name if it is valid and unique."""
    folders: dict[str, Run] = {}
    for run in chosen:
        name = plain = re.sub(r"[^\w .+-]", "_", run.name).strip(" .") or "run"
        again = 2
        while name in folders:
            name, again = f"{plain} ({again})", again + 1
        folders[name] = run
    return folders


def _put(run: Run, folder: Path) -> None:
    run.save(folder)
    columns = run.history.columns
    with (folder / "history.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(run.history[name] for name in columns), strict=True))
    (folder / "summary.txt").write_text(repr(run.summary()) + "\n", encoding="utf-8")
    picture = run.plot()._repr_mimebundle_()
    if "image/png" in picture:
        (folder / "run.png").write_bytes(_bytes(picture["image/png"]))


def _bytes(png: str | bytes) -> bytes:
    import base64

    return png if isinstance(png, bytes) else base64.b64decode(png)
