from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import get_args

import pytest

from workbench import catalog
from workbench.catalog import CATALOG, FIT_FEATURES, FRAMEWORKS, Option, Strategy, Way
from workbench.errors import PlanError

OPTIONS = [(entry, option) for entry in CATALOG for option in entry.options]


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: f"{entry.framework}-{entry.name}")
def test_every_entry_is_complete(entry: Strategy) -> None:
    assert entry.framework in FRAMEWORKS
    assert entry.module.startswith(f"workbench.strategies.{entry.framework}.")
    assert entry.module.count(":") == 1
    assert entry.supports <= FIT_FEATURES
    assert set(entry.ways) <= set(get_args(Way))
    assert entry.ways
    for text in (entry.term, entry.summary, entry.suits, entry.source):
        assert text.strip()
    if entry.servers_option:
        assert entry.option(entry.servers_option).kind == "int"


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: f"{entry.framework}-{entry.name}")
def test_every_entrys_module_is_there_and_holds_its_class(entry: Strategy) -> None:
    # Read, not imported: the contract suite passes over an entry whose module is not there.
    module, _, name = entry.module.partition(":")
    found = importlib.util.find_spec(module)
    assert found is not None, f"there is no module {module}"
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    assert name in {one.name for one in tree.body if isinstance(one, ast.ClassDef)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_names_and_aliases_are_unique_within_a_framework(framework: str) -> None:
    entries = catalog.strategies(framework)
    known = [name for entry in entries for name in (entry.name, *entry.aliases)]
    assert len(known) == len(set(known))


@pytest.mark.parametrize(("entry", "option"), OPTIONS, ids=lambda x: getattr(x, "name", ""))
def test_every_default_is_a_value_its_option_accepts(entry: Strategy, option: Option) -> None:
    assert option.parse(option.default) == option.default
    assert option.help
    assert entry.settings({})[option.name] == option.default


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: f"{entry.framework}-{entry.name}")
def test_every_entry_is_found_by_name_and_alias(entry: Strategy) -> None:
    for name in (entry.name, *entry.aliases):
        assert catalog.lookup(name, entry.framework) is entry
    assert entry.name in catalog.names(entry.framework)


def test_ddp_is_another_word_for_mirrored() -> None:
    assert catalog.lookup("ddp").name == "mirrored"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PlanError) as caught:
        catalog.lookup("mirored")
    assert "'mirrored'" in str(caught.value.next_step)
    assert "one_device" in str(caught.value.allowed)


def test_a_name_like_nothing_points_to_the_list() -> None:
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*wb\.strategies\(\)"):
        catalog.lookup("zzzzzz")


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(PlanError, match=r"framework.*WB-PLAN-037"):
        catalog.lookup("mirrored", "jax")


def test_a_strategy_of_the_other_framework_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = Strategy("lonely", "tensorflow", "t", "s", "m:C", "su", "so", aliases=("alone",))
    monkeypatch.setattr(catalog, "CATALOG", (*CATALOG, only))
    for name in ("lonely", "alone"):
        with pytest.raises(PlanError, match=r"WB-PLAN-001[\s\S]*tensorflow"):
            catalog.lookup(name, "torch")


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        (Option("n", "int", 1, "h", minimum=1), "3", 3),
        (Option("n", "int", 1, "h", optional=True), "none", None),
        (Option("x", "float", 1.0, "h"), "2.5", 2.5),
        (Option("b", "bool", False, "h"), "Yes", True),
        (Option("b", "bool", True, "h"), False, False),
        (Option("c", "choice", "a", "h", choices=("a", "b")), "b", "b"),
        (Option("s", "str", "", "h"), "free text", "free text"),
    ],
)
def test_options_read_what_is_typed(option: Option, text: object, value: object) -> None:
    assert option.parse(text) == value


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        (
            Option("n", "int", 1, "h", minimum=1, maximum=8),
            "9",
            r"WB-PLAN-004[\s\S]*a whole number from 1 to 8",
        ),
        (Option("n", "int", 1, "h", minimum=1), "0", r"WB-PLAN-004[\s\S]*at least 1"),
        (Option("n", "int", 1, "h"), "2.5", r"WB-PLAN-002[\s\S]*a whole number"),
        (Option("n", "int", 1, "h"), "none", r"WB-PLAN-002[\s\S]*a whole number"),
        (Option("x", "float", 1.0, "h", maximum=2), "7", r"WB-PLAN-004[\s\S]*at most 2"),
        (Option("x", "float", 1.0, "h", minimum=0), "nan", r"WB-PLAN-002[\s\S]*a number"),
        (Option("x", "float", 1.0, "h", minimum=0), "inf", r"WB-PLAN-002[\s\S]*a number"),
        (Option("b", "bool", False, "h"), "maybe", r"WB-PLAN-002[\s\S]*true or false"),
        (
            Option("c", "choice", "a", "h", choices=("alpha", "beta")),
            "betta",
            r"WB-PLAN-037[\s\S]*'beta'",
        ),
    ],
)
def test_options_refuse_the_rest_in_words(option: Option, text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        option.parse(text)
    assert str(caught.value.seen) in (text, f"{text}.0")


def test_settings_hold_every_option_and_refuse_others() -> None:
    mirrored = catalog.lookup("mirrored")
    settings = mirrored.settings({"bucket_mb": "1.5"})
    assert settings["bucket_mb"] == 1.5
    assert set(settings) == {option.name for option in mirrored.options}
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'bucket_mb'"):
        mirrored.settings({"bucket": "2"})
    with pytest.raises(PlanError, match="WB-PLAN-006"):
        catalog.lookup("one_device").settings({"colour": "2"})


def test_another_strategys_option_is_answered_with_its_name() -> None:
    with pytest.raises(PlanError, match=r"parameter_server.*WB-PLAN-005") as caught:
        catalog.lookup("mirrored").settings({"max_staleness": "4"}, catalog.CATALOG)
    assert "%%distributed parameter_server" in str(caught.value.next_step)


def test_options_that_exclude_each_other_are_refused() -> None:
    entry = catalog.lookup("ps")
    with pytest.raises(PlanError, match="WB-PLAN-007"):
        entry.settings({"sync": "true", "max_staleness": "4"})
    assert entry.settings({"sync": "true", "servers": "2"})["servers"] == 2


def test_an_option_of_another_options_value_is_refused_without_it() -> None:
    entry = catalog.lookup("local_sgd")
    for name, value in (("outer_lr", "0.5"), ("outer_momentum", "0")):
        with pytest.raises(PlanError, match="WB-PLAN-318") as caught:
            entry.settings({name: value})
        assert "-o outer=nesterov" in str(caught.value)
        assert name in str(caught.value.next_step)
        assert entry.settings({"outer": "nesterov", name: value})[name] == float(value)
    assert entry.settings({"outer_lr": "0.7"})["outer"] == "average"  # as it is anyway


@pytest.mark.parametrize(
    "given",
    [
        {"outer": "adam"},
        {"outer": "nesterov", "outer_lr": "0"},
        {"outer": "nesterov", "outer_lr": "nan"},
        {"outer": "nesterov", "outer_momentum": "1"},
        {"outer": "nesterov", "outer_momentum": "-0.1"},
        {"fragments": "0"},
        {"fragments": "2", "fraction": "0.5"},
    ],
    ids=str,
)
def test_outer_steps_that_cannot_be_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(PlanError):
        catalog.lookup("local_sgd").settings(given)


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: f"{entry.framework}-{entry.name}")
def test_what_an_option_needs_is_a_value_that_another_one_takes(entry: Strategy) -> None:
    for option in entry.options:
        if option.only_with is not None:
            name, value = option.only_with
            assert entry.option(name).parse(value) == value != entry.option(name).default


def test_servers_are_counted_by_option_or_by_nature() -> None:
    assert catalog.lookup("central_storage").server_count({}) == 1
    entry = catalog.lookup("parameter_server")
    assert entry.server_count(entry.settings({"servers": "3"})) == 3
    with pytest.raises(PlanError, match="WB-PLAN-004"):
        entry.settings({"servers": "0"})


def test_an_asynchronous_strategy_may_be_made_synchronous() -> None:
    entry = catalog.lookup("parameter_server")
    assert not entry.is_sync(entry.settings({}))
    assert entry.is_sync(entry.settings({"sync": "yes"}))
    assert catalog.lookup("mirrored").is_sync({})
