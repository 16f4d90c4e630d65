"""`labs.take_home`: a lab's runs in one file that a browser can download."""

from __future__ import annotations

import csv
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..execution.registry import runs as known

if TYPE_CHECKING:
    from ..execution.run import Run

_README = """Runs of a lab.

NAME/              a run: wb.load("NAME") brings it back, with history, evaluations and weights
NAME/history.csv   one row per worker and step; times in seconds, sizes in bytes
NAME/summary.txt   its figures
NAME/run.png       its picture
"""


class Bundle:
    """A file that holds runs; the notebook shows a link to it."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.path, self.names = path, names

    def text(self) -> str:
        """What it is and how to open it."""
        runs = ", ".join(self.names)
        return (
            f"{self.path}: {runs}. Download it from the file browser; at home, unzip it and "
            f'wb.load("{self.names[0]}") brings the run back.'
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
        PlanError: There is no run to take along, or the file is no `.zip`.
    """
    path = Path(to)
    if path.suffix != ".zip":
        raise PlanError(
            "The file is to be a zip file.", seen=str(to), allowed='"lab.zip"', code="WB-PLAN-049"
        )
    chosen = [known[run] if isinstance(run, str) else run for run in runs or known.values()]
    if not chosen:
        raise PlanError(
            "There is no run to take home.",
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
    """Return a folder's name for each run: its own, where that is one and no other run has it."""
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
