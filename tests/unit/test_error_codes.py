"""Each place that makes an error has a code of its own; docs/error-codes.md lists all."""

from __future__ import annotations

import ast
from collections import Counter
from types import ModuleType

import pytest
from doc_pages import generator


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return generator("make_error_codes")


@pytest.fixture(scope="module")
def sites(maker: ModuleType) -> list:
    return maker.places()


def test_the_page_is_up_to_date(maker: ModuleType) -> None:
    written = maker.PAGE.read_text(encoding="utf-8")
    assert written == maker.make_page(written), "run python docs/make_error_codes.py"


def test_each_place_that_makes_an_error_has_a_literal_code_of_its_kind(
    maker: ModuleType, sites: list
) -> None:
    assert len(sites) > 400
    kinds = maker.kinds(maker.package().values())
    free = maker.next_free(maker.all_codes())
    for site in sites:
        found = maker.CODE.fullmatch(site.given or "")
        middle = kinds[site.kind]
        assert found is not None, f"{site.where}: {site.kind} needs code={free[middle]!r}"
        assert found[1] == middle, f"{site.where}: {site.given} is no code of a {site.kind}"


def test_no_code_is_given_twice(maker: ModuleType, sites: list) -> None:
    often = [code for code, times in Counter(site.given for site in sites).items() if times > 1]
    assert not often, f"the next free ones are {maker.next_free(maker.all_codes())}"


def test_a_retired_code_is_not_given_again(maker: ModuleType, sites: list) -> None:
    assert not maker.retired() & {site.given for site in sites}


def test_every_number_is_in_use_or_retired(maker: ModuleType) -> None:
    codes = maker.all_codes()
    for middle, free in maker.next_free(codes).items():
        numbers = range(1, int(free.rpartition("-")[2]))
        missing = {f"WB-{middle}-{number:03d}" for number in numbers} - codes
        assert not missing, f"put them in RETIRED (workbench/errors.py): {missing}"


def test_a_code_that_vanished_from_the_sources_is_noticed(maker: ModuleType) -> None:
    written = maker.PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="WB-FIT-999"):
        maker.make_page(written + "WB-FIT-999  FitError: It was here once.\n")


SOURCE = """
from . import errors

class OddError(errors.PlanError): ...

class ToldError(OddError):
    def __init__(self, name):
        if name:
            what = f"{name!r} is odd."
        else:
            what = "It is odd."
        super().__init__(what, code="WB-PLAN-004")

WORDS = "It is " "even."

def say():
    return "Said."

def check(code, name):
    raise errors.FitError("No.", code=code)
    raise OddError(f"No {name}\\n  at all.", code="WB-FIT-002")
    raise ToldError(name)
    raise errors.DataError(WORDS)
    raise errors.RunError(say() if name else name, code="WB-RUN-001")
"""


def test_what_is_found_in_a_source(maker: ModuleType) -> None:
    found = maker.sites({"a.py": ast.parse(SOURCE)})
    assert [(one.kind, one.given, one.words) for one in found] == [
        ("ToldError", "WB-PLAN-004", "{name} is odd. / It is odd."),
        ("FitError", None, "No."),
        ("OddError", "WB-FIT-002", "No {name}"),
        ("DataError", None, "It is even."),
        ("RunError", "WB-RUN-001", "Said. / {name}"),
    ]
    assert found[0].where == "a.py:12"
