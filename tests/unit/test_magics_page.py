"""docs/magics.md says what the parsers of the lines say, and its examples can be typed."""

from __future__ import annotations

from types import ModuleType

import pytest
from doc_pages import REPOSITORY, generator

from workbench.shared.magic_args import cluster_parser, parse_cluster_line
from workbench.shared.run_request import FLAGS, cell_parser, parse_cell_line


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return generator("make_magics")


def test_the_page_is_up_to_date(maker: ModuleType) -> None:
    written = maker.PAGE.read_text(encoding="utf-8")
    assert written == maker.make_page(written), "run python docs/make_magics.py"


def test_every_flag_and_action_is_on_the_page(maker: ModuleType) -> None:
    page = maker.PAGE.read_text(encoding="utf-8")
    for parser in (cell_parser(), cluster_parser()):
        for action in maker.actions_of(parser):
            for flag in action.option_strings:
                assert f"`{flag}`" in page


def test_a_flag_that_the_page_does_not_explain_is_an_error(maker: ModuleType) -> None:
    known = {flag: what for flag, what in maker.CLUSTER.items() if flag != "--lines"}
    with pytest.raises(ValueError, match="--lines"):
        maker.flags(cluster_parser(), known)


def test_examples_are_understood_and_use_their_flag(maker: ModuleType) -> None:
    for flag in FLAGS.values():
        line = flag.example
        plain = line.lstrip("%").removeprefix("distributed")
        asked = parse_cell_line(plain)
        assert asked != parse_cell_line(""), line
        given = vars(cell_parser().parse_args(plain.split()))
        assert given[flag.long.lstrip("-").replace("-", "_")], line
    for flag, (_, line) in maker.CLUSTER.items():
        asked = parse_cluster_line(line.removeprefix("%cluster"))
        assert flag in ("action",) or asked != parse_cluster_line(""), line
    for action, (line, _) in maker.ACTIONS.items():
        assert parse_cluster_line(line.removeprefix("%cluster")).action == action


def test_the_injected_names_are_those_that_the_engines_set(maker: ModuleType) -> None:
    runtime = (REPOSITORY / "workbench" / "engine" / "runtime.py").read_text()
    body = runtime.partition("def _inject(")[2].partition("\ndef ")[0]
    support = {
        "PyTorch": ("torch/support.py", "dist"),
        "TensorFlow": ("tensorflow/support.py", "strategy"),
    }
    for name, (where, _) in maker.NAMES.items():
        if where == "both":
            assert f'"{name}":' in body
            continue
        file, only = support[where]
        assert name == only
        assert f'"{name}":' in (REPOSITORY / "workbench" / "engine" / file).read_text()


def test_a_page_without_the_marks_is_refused(maker: ModuleType) -> None:
    with pytest.raises(ValueError, match="actions"):
        maker.make_page("no marks here")
