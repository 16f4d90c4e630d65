"""What has never been run stands in one table, and no page promises it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import DOCS, REPOSITORY, name_of, pages

from workbench import catalog
from workbench.shared.magic_args import LAUNCH

TABLE = "never-run.md"
MACHINES = "clusters-of-machines.md"
BEYOND = re.compile(
    r"--launcher[ =`]+(?:ssh|slurm|mpi)|--(?:listen|hosts)|several (?:hosts|machines)|other hosts"
)
LINKED = [
    "README.md",
    "docs/index.md",
    "docs/installing.md",
    "docs/metrics.md",
    "docs/strategies.md",
]
EXEMPT = {
    "docs/error-codes.md": "the messages as they stand in the sources",
    "docs/errors.md": "what was said on this machine",
    "docs/shared-machines.md": "what an administrator forbids",
    f"docs/{TABLE}": "the table itself",
}


@pytest.mark.parametrize("page", LINKED)
def test_the_table_is_linked(page: str) -> None:
    assert f"{TABLE})" in (REPOSITORY / page).read_text("utf-8")


@pytest.mark.parametrize("page", [pytest.param(one, id=name_of(one)) for one in pages()])
def test_a_page_on_several_machines_leads_to_what_was_run_on_them(page: Path) -> None:
    text = page.read_text("utf-8")
    if name_of(page) in EXEMPT or not BEYOND.search(text):
        return
    assert TABLE in text or MACHINES in text, name_of(page)


def test_the_page_on_several_machines_names_every_flag_and_the_table() -> None:
    text = (DOCS / MACHINES).read_text("utf-8")
    assert f"{TABLE})" in text
    for flag in LAUNCH:
        name = {"launcher_options": "launcher-option"}.get(flag, flag.replace("_", "-"))
        assert f"--{name}" in text, name


def test_a_strategy_that_never_ran_on_its_device_says_so() -> None:
    page = (DOCS / "strategies.md").read_text("utf-8")
    entries = [entry for entry in catalog.CATALOG if not entry.anywhere]
    assert entries
    for entry in entries:
        assert "never run" in entry.suits
        (section,) = re.findall(rf"^### {entry.name}$.*?(?=^### |\Z)", page, re.M | re.S)
        assert TABLE in section
        assert "rounding errors" not in section
