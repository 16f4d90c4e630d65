"""`workbench demo`, `lab`, `labs`, `grade`, `ps` and `stop`: the main job from a shell."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cli_clusters, cli_labs
from .errors import WorkbenchError
from .shipped import QUICKSTART, notebooks_folder
from .views.table import COMPARISON, SHOWS

if TYPE_CHECKING:
    from nbformat import NotebookNode

CELL_TIMEOUT_S = 300


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="workbench", description="A Jupyter workbench for distributed training."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run the quickstart notebook without a browser")
    demo.add_argument("--out", type=Path, default=Path("workbench-demo"), help="where results go")
    commands.add_parser("lab", help="open JupyterLab on the notebooks; other flags are passed on")
    cli_clusters.add_commands(commands)
    cli_labs.add_commands(commands)
    given, rest = parser.parse_known_args(argv)
    if rest and given.command != "lab":
        hint = f" ({cli_labs.OPENS})" if given.command == "labs" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    try:
        if given.command in ("ps", "stop"):
            return cli_clusters.run(given)
        if given.command in cli_labs.COMMANDS:
            return cli_labs.run(given)
        return _demo(given.out) if given.command == "demo" else _lab(rest)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 1


def _need(module: str) -> Any:
    try:
        return __import__(module)
    except ImportError:
        raise WorkbenchError(
            f"{module} is not installed.",
            next_step="pip install 'distributed-workbench[torch,lab]'",
            code="WB-GEN-001",
        ) from None


def _demo(out: Path) -> int:
    """Execute the quickstart, print its summary, write notebook and HTML."""
    nbformat = _need("nbformat")
    notebook = nbformat.read(notebooks_folder() / QUICKSTART, as_version=4)
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    failed = _execute(notebook, out)
    executed, page = out / QUICKSTART, out / "quickstart.html"
    nbformat.write(notebook, executed)
    _write_html(notebook, page)
    print(_summary(notebook))
    print(f"\n{time.perf_counter() - began:.0f} s; executed notebook: {executed}, page: {page}")
    if failed is not None:
        print(f"\nThe notebook failed: {failed}", file=sys.stderr)
        return 1
    return 0


def _execute(notebook: NotebookNode, out: Path) -> Exception | None:
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from tqdm import tqdm

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    bar = tqdm(total=len(code), desc="quickstart", unit="cell", file=sys.stdout)

    def done(cell: NotebookNode, **rest: Any) -> None:
        if cell.cell_type == "code":
            lines = [text for text in cell.source.splitlines() if text.strip(" #")]
            first = next((text for text in lines if not text.startswith("#")), "")
            bar.set_postfix_str(first[:40])
            bar.update()

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(out)}},
        on_cell_executed=done,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return error
    finally:
        bar.close()
    return None


def _write_html(notebook: NotebookNode, page: Path) -> None:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter()  # type: ignore[no-untyped-call,unused-ignore]
    body, _ = exporter.from_notebook_node(notebook)
    page.write_text(body)


def _summary(notebook: NotebookNode) -> str:
    """Return the text of the notebook's comparison, or of its last table where it has none."""
    tables = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    compared = [one for one in tables if one.get("metadata", {}).get(SHOWS) == COMPARISON]
    if not tables:
        return "the notebook shows no table"
    return str((compared or tables)[-1]["data"]["text/plain"])


def _lab(rest: list[str]) -> int:
    """Open JupyterLab on a copy of the notebooks, so that the originals stay as they are.

    What the copy has already is the user's, and left alone.
    """
    cli_labs.check_opening(rest)
    _need("jupyterlab")
    target = Path.cwd() / "workbench-notebooks"
    target.mkdir(exist_ok=True)
    lacking = [
        path
        for path in sorted(notebooks_folder().iterdir())
        if path.is_file() and path.name[0] != "." and not (target / path.name).exists()
    ]
    for path in lacking:
        shutil.copy2(path, target)
    _trust([target / path.name for path in lacking if path.suffix == ".ipynb"])
    command = [sys.executable, "-m", "jupyterlab", str(target), *rest]
    return subprocess.call(command, env=dict(os.environ))


def _trust(notebooks: list[Path]) -> None:
    """Sign our own notebooks: of those that are not signed, Jupyter shows no drawing."""
    nbformat = _need("nbformat")
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()  # type: ignore[no-untyped-call,unused-ignore]
    for path in notebooks:
        notary.sign(nbformat.read(path, as_version=4))  # type: ignore[no-untyped-call,unused-ignore]


if __name__ == "__main__":
    raise SystemExit(main())
