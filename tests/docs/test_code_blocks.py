"""Every block of code in the pages runs as it stands, page by page, in a notebook.

A block of Python is a cell; all pages share one cluster of two engines, and each begins with a
fresh notebook and no variables on the engines. What is not run says why (see `doc_pages.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import DOCS, REPOSITORY, Block, blocks, name_of, pages
from real_kernel import Kernel, kernel

TESTS = REPOSITORY / "tests"
ENGINES = 2
COMMAND_LIMIT_S = 60
COVERED = {
    "docs/errors.md": "cluster/test_mistakes.py",
    "docs/recipes.md": "cluster/test_recipes.py",
    "docs/strategies.md": "unit/test_strategies_page.py",
    "docs/teaching.md": "cluster/test_teaching.py",
}
"""Pages that other tests run, or hold against what they are written from."""
TENSORFLOW = {"README.md"}
NEEDS_TENSORFLOW = [pytest.mark.tensorflow, pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed"
)]  # fmt: skip
FORGET = """
from workbench.execution import registry
from workbench.notebook.session import session
for other in registry.running_clusters():
    if other is not session.cluster:
        other.stop()
registry.runs.clear()
session.reset()
"""
"""Run between pages, so that none builds on the one before."""
RUN = [page for page in pages() if name_of(page) not in COVERED]


def marked(language: str) -> list[pytest.param]:
    """Return the pages that have blocks of a language to run."""
    return [
        pytest.param(page, id=name_of(page),
                     marks=NEEDS_TENSORFLOW if name_of(page) in TENSORFLOW else ())
        for page in RUN
        if any(block.language == language and not block.not_run for block in blocks(page))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Hand out the kernel of all pages, in a folder of its own: pages write files."""
    with kernel(tmp_path_factory.mktemp("pages")) as shared:
        shared.ok("%load_ext workbench")
        yield shared


@pytest.fixture
def notebook(shared: Kernel) -> Kernel:
    """Hand out the kernel as a page finds it, whatever the one before has done."""
    shared.ok(FORGET)
    shared.ok("%reset -f")
    shared.ok(f"import workbench as wb\n%cluster start {ENGINES}\n%cluster free")
    return shared


def run_as_a_cell(notebook: Kernel, block: Block) -> None:
    if first := block.said.get("first"):
        before = notebook.run(first)
        assert not before.error, f"{block.place}, what comes first: {before.error}\n{before.text}"
    cell = notebook.run(block.source)
    expected = block.said.get("fails")
    if expected is None:
        assert not cell.error, f"{block.place}: {cell.error}\n{cell.text[-3000:]}"
    else:
        assert cell.error, f"{block.place} goes through"
        assert expected in cell.error, f"{block.place}: {cell.error}"


@pytest.mark.cluster
@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("page", marked("python"))
def test_a_page_runs_as_it_stands(page: Path, notebook: Kernel) -> None:
    for block in blocks(page):
        if block.language == "python" and not block.not_run:
            run_as_a_cell(notebook, block)


@pytest.mark.cluster
@pytest.mark.parametrize("page", marked("bash"))
def test_the_commands_of_a_page_run(page: Path, checkout: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page):
        if block.language == "bash" and not block.not_run:
            code, said = run_in_a_shell(
                block.source, checkout, os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY)}
            )
            assert code == 0, f"{block.place}: {said}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Hand out a copy of what commands read and write; the repository stays as it is."""
    for folder in ("benchmarks", "docs", "notebooks"):
        hidden = shutil.ignore_patterns("_build", ".ipynb_checkpoints", "__pycache__")
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=hidden)
    return tmp_path


def run_in_a_shell(source: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Return the exit status and what was said; nothing that was started is left."""
    process = subprocess.Popen(
        ["bash", "-euc", source], cwd=folder, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=COMMAND_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


@pytest.mark.parametrize(
    "block",
    [pytest.param(one, id=one.place) for page in RUN for one in blocks(page) if one.not_run],
)
def test_what_is_not_run_says_why(block: Block) -> None:
    assert len(block.not_run.split()) >= 3, f"{block.place} needs a reason"
    for path in re.findall(r"tests/[\w/.]*\w", block.not_run):
        assert (REPOSITORY / path).exists(), f"{block.place}: there is no {path}"
    pytest.skip(f"{block.place} is not run: {block.not_run}")


@pytest.mark.parametrize("page", [pytest.param(one, id=name_of(one)) for one in pages()])
def test_blocks_are_of_languages_that_are_known(page: Path) -> None:
    """A misspelt language would let a block go by."""
    known = {"python", "bash", "text", "toml", "ini", "json", "yaml", "diff", ""}
    for block in blocks(page):
        assert block.language in known or block.language.startswith("{"), block.place


@pytest.mark.parametrize("page", list(COVERED))
def test_a_page_that_is_left_out_here_is_run_elsewhere(page: str) -> None:
    assert (REPOSITORY / page).is_file()
    text = (TESTS / COVERED[page]).read_text("utf-8")
    assert page in text or f'"docs" / "{Path(page).name}"' in text


def test_no_page_is_overlooked() -> None:
    assert set(COVERED) <= {name_of(page) for page in pages()}
    assert len(pages()) > len(COVERED) + 10
    assert DOCS / "index.md" in RUN
