"""The panel's choice without a browser: cards, options, and the plans that come of it."""

from __future__ import annotations

import json

import pytest
from panel_choosing import FakeCluster, cards, choosing, do

from workbench import catalog
from workbench.cookbook.recipe import Recipe, use_of
from workbench.devices.limits import Limits
from workbench.errors import PlanError
from workbench.notebook.session import Session
from workbench.panels import strategies
from workbench.panels.choice import Choice
from workbench.panels.strategies import glyph
from workbench.shared.run_request import parse_cell_line

PREPARE = 'model = wb.prepare(model)\nwb.log(fit="wb.fit(")\n'


@pytest.fixture(autouse=True)  # which frameworks are installed concerns all tests
def panel(monkeypatch):
    with choosing(monkeypatch) as panel:
        yield panel


@pytest.mark.parametrize("framework", catalog.FRAMEWORKS)
def test_every_strategy_has_a_card_that_json_can_carry(panel, framework):
    do(panel, "strategies.framework", name=framework)
    assert list(cards(panel)) == catalog.names(framework)
    assert json.loads(json.dumps(panel.wire())) == panel.wire()
    for card in cards(panel).values():
        assert [o["name"] for o in card["options"]] == [
            o.name for o in catalog.lookup(card["name"], framework).options
        ]


def test_the_order_of_picking_is_the_order_of_running(panel):
    do(panel, "strategies.toggle", strategy="gossip")
    do(panel, "strategies.toggle", strategy="one_device")
    assert [plan.strategy for plan in panel.choice.plans(panel.session)] == [
        "mirrored", "gossip", "one_device",
    ]  # fmt: skip
    do(panel, "strategies.toggle", strategy="mirrored")
    assert {n: c["picked"] for n, c in cards(panel).items() if c["picked"]} == {
        "gossip": 1, "one_device": 2,
    }  # fmt: skip


def test_each_framework_has_picks_and_options_of_its_own(panel):
    do(panel, "strategies.option", strategy="mirrored", option="compress", value="fp16")
    do(panel, "strategies.toggle", strategy="gossip")
    do(panel, "strategies.framework", name="tensorflow")
    assert [p.strategy for p in panel.choice.plans(panel.session)] == ["mirrored"]
    do(panel, "strategies.framework", name="torch")
    first, second = panel.choice.plans(panel.session)
    assert (first.options["compress"], second.strategy) == ("fp16", "gossip")


def test_the_summary_counts_strategies_times_seeds(panel):
    said = lambda: panel.wire()["strategies"]["summary"]  # noqa: E731
    assert said() == "1 run of digits_mlp: mirrored on 2 workers"
    do(panel, "strategies.toggle", strategy="gossip")
    assert said() == "2 runs of digits_mlp: mirrored, then gossip, on 2 workers"
    do(panel, "strategies.common", name="seeds", value="3")
    do(panel, "strategies.common", name="workers", value="1")
    assert said() == "2 strategies × 3 seeds = 6 runs of digits_mlp on 1 worker"
    assert len(panel.choice.plans(panel.session)) == 6


@pytest.mark.parametrize(
    ("name", "typed", "said"),
    [
        ("workers", "0", "1 to 256"),
        ("workers", "257", "1 to 256"),
        ("seeds", "11", "1 to 10"),
        ("steps", "2.5", "1 or more"),
        ("seed", "-1", "0 or more"),
        ("batch_size", "many", "1 or more"),
        ("workers", "1,2,x", ": 1,2,4"),
        ("workers", "1,2,2", "value twice"),
        ("workers", "1,,300", "1 to 256"),
        ("workers", ",", "no value"),
        ("batch_size", "64,0", "1 or more"),
        ("steps", "50,100", "1 or more"),
        ("seeds", "1,2", "1 to 10"),
        ("inject", "sloow=1", "slow=RANK:50ms"),
    ],
)
def test_what_is_typed_wrongly_stays_in_its_field_and_holds_everything_up(panel, name, typed, said):
    do(panel, "strategies.common", name=name, value=typed)
    wire = panel.wire()["strategies"]
    assert wire["common"][name]["value"] == typed
    assert said in wire["common"][name]["error"]
    assert not wire["ready"]
    with pytest.raises(PlanError):
        panel.choice.plans(panel.session)
    do(panel, "strategies.common", name=name, value="")
    assert panel.wire()["strategies"]["ready"]


def said(panel):
    return panel.wire()["strategies"]


def test_several_numbers_of_workers_are_a_plan_each_and_one_device_is_one(panel):
    do(panel, "strategies.toggle", strategy="one_device")
    do(panel, "strategies.common", name="workers", value="1, 2,4")
    assert said(panel)["ready"], said(panel)["problem"]
    assert said(panel)["common"]["workers"]["value"] == "1,2,4"
    assert said(panel)["common"]["workers"]["hint"] == '"Run" starts 2 more engines; 2 are running'
    assert said(panel)["summary"] == (
        "4 runs of digits_mlp: mirrored, then one_device, on 1, 2, 4 workers"
    )
    plans = panel.choice.plans(panel.session)
    assert [(plan.strategy, plan.workers, plan.name) for plan in plans] == [
        ("mirrored", 1, "mirrored-n1"), ("mirrored", 2, "mirrored-n2"),
        ("mirrored", 4, "mirrored-n4"), ("one_device", 1, ""),
    ]  # fmt: skip
    do(panel, "strategies.common", name="workers", value="2")
    assert [plan.workers for plan in panel.choice.plans(panel.session)] == [2, 1]


def test_workers_batches_and_seeds_are_multiplied_and_named(panel):
    for name, value in (("workers", "1,2"), ("batch_size", "64,128"), ("seeds", "2")):
        do(panel, "strategies.common", name=name, value=value)
    assert said(panel)["summary"] == (
        "8 runs of digits_mlp: mirrored, on 1, 2 workers; batch sizes 64, 128; 2 seeds each"
    )
    plans = panel.choice.plans(panel.session)
    assert {(p.workers, p.overrides["batch_size"], p.overrides["seed"]) for p in plans} == {
        (workers, batch, seed) for workers in (1, 2) for batch in (64, 128) for seed in (0, 1)
    }
    assert len({plan.name for plan in plans}) == 8
    do(panel, "strategies.common", name="batch_size", value="64")
    assert {p.overrides["batch_size"] for p in panel.choice.plans(panel.session)} == {64}
    do(panel, "strategies.common", name="batch_size", value="")
    assert all("batch_size" not in p.overrides for p in panel.choice.plans(panel.session))


def test_one_of_several_that_cannot_be_is_said_before_anything_begins(panel):
    do(panel, "strategies.common", name="workers", value="1,2,4")
    do(panel, "strategies.common", name="batch_size", value="2")
    assert "batch_size=2 on 4 workers" in cards(panel)["mirrored"]["problem"]
    assert not said(panel)["ready"]
    do(panel, "strategies.common", name="batch_size", value="")
    do(panel, "strategies.common", name="workers", value=",".join(map(str, range(1, 14))))
    do(panel, "strategies.common", name="seeds", value="10")
    assert "130 runs" in cards(panel)["mirrored"]["problem"]
    with pytest.raises(PlanError, match="WB-PLAN-273"):
        panel.choice.plans(panel.session)


@pytest.mark.parametrize("started", [True, False])
def test_many_strategies_together_ask_for_no_more_runs_than_a_line(panel, started):
    cluster = panel.session.cluster
    panel.session.cluster = cluster if started else None
    do(panel, "strategies.common", name="workers", value="1,2,3,4,5,6,7,8")
    do(panel, "strategies.common", name="seeds", value="10")
    assert said(panel)["ready"]
    do(panel, "strategies.toggle", strategy="gossip")
    assert "120 runs" in said(panel)["problem"]
    panel.session.cluster = cluster
    with pytest.raises(PlanError, match="WB-PLAN-273"):
        panel.choice.plans(panel.session)


def test_several_values_stand_on_the_lines_of_the_cells(panel):
    do(panel, "strategies.toggle", strategy="one_device")
    for name, value in (("workers", "1,2,4"), ("batch_size", "64,128"), ("seeds", "3")):
        do(panel, "strategies.common", name=name, value=value)
    answer, _ = do(panel, "recipe.cell")
    lines = [text.splitlines()[0].removeprefix("%%distributed ") for text in answer["cells"]]
    mirrored, alone = (parse_cell_line(line) for line in lines)
    assert {axis.field: axis.values for axis in mirrored.several} == {
        "workers": (1, 2, 4), "batch_size": (64, 128),
    }  # fmt: skip
    assert {axis.field: axis.values for axis in alone.several} == {"batch_size": (64, 128)}
    assert (mirrored.seeds, alone.seeds) == (3, 3)


def test_options_are_checked_by_the_catalog_and_reset_by_nothing(panel):
    field = lambda: cards(panel)["mirrored"]["options"][2]  # noqa: E731
    do(panel, "strategies.option", strategy="mirrored", option="bucket_mb", value="-3")
    assert (field()["value"], field()["given"]) == ("-3", True)
    assert "0.001 to 4096" in field()["error"]
    assert "bucket_mb" in panel.wire()["strategies"]["problem"]
    do(panel, "strategies.option", strategy="mirrored", option="bucket_mb", value="10")
    assert panel.choice.plans(panel.session)[0].options["bucket_mb"] == 10.0
    do(panel, "strategies.option", strategy="mirrored", option="bucket_mb", value=None)
    assert (field()["value"], field()["given"], field()["error"]) == ("25", False, "")


def test_a_wrong_option_of_a_strategy_that_is_not_picked_holds_nothing_up(panel):
    do(panel, "strategies.option", strategy="gossip", option="graph", value="star?")
    do(panel, "strategies.option", strategy="local_sgd", option="every", value="0")
    assert panel.wire()["strategies"]["ready"]
    do(panel, "strategies.toggle", strategy="local_sgd")
    assert not panel.wire()["strategies"]["ready"]


def test_settings_that_do_not_go_together_are_said_on_the_card(panel):
    do(panel, "strategies.common", name="batch_size", value="1")
    assert "of workers" in cards(panel)["mirrored"]["problem"]
    assert not panel.wire()["strategies"]["ready"]
    do(panel, "strategies.common", name="batch_size", value="")
    do(panel, "strategies.common", name="inject", value="slow=5:50ms")
    assert "ranks 0 to 1" in cards(panel)["mirrored"]["problem"]
    do(panel, "strategies.common", name="inject", value="--inject slow=1:50ms, jitter=20ms")
    assert [f.text for f in panel.choice.plans(panel.session)[0].faults] == [
        "slow=1:50ms", "jitter=20ms",
    ]  # fmt: skip


def test_outer_steps_are_set_on_the_card_and_what_needs_them_is_said_without(panel):
    do(panel, "strategies.toggle", strategy="mirrored")
    do(panel, "strategies.toggle", strategy="local_sgd")
    do(panel, "strategies.option", strategy="local_sgd", option="outer_lr", value="0.9")
    assert "outer=nesterov" in cards(panel)["local_sgd"]["problem"]
    assert not panel.wire()["strategies"]["ready"]
    do(panel, "strategies.option", strategy="local_sgd", option="outer", value="nesterov")
    (plan,) = panel.choice.plans(panel.session)
    assert (plan.options["outer"], plan.options["outer_lr"]) == ("nesterov", 0.9)
    do(panel, "strategies.option", strategy="local_sgd", option="fragments", value="9")
    assert "fragments" in cards(panel)["local_sgd"]["problem"]
    do(panel, "strategies.option", strategy="local_sgd", option="every", value="50")
    assert panel.wire()["strategies"]["ready"]
    answer, _ = do(panel, "strategies.diagram", strategy="local_sgd")
    assert "outer step" in answer["text"]


def test_what_the_machine_lacks_greys_a_card_with_the_reason(panel, monkeypatch):
    do(panel, "strategies.framework", name="tensorflow")
    assert "No TPU" in cards(panel)["tpu"]["reason"]
    assert not cards(panel)["mirrored"]["reason"]
    monkeypatch.setattr("workbench.execution.requests.installed", lambda name: name == "torch")
    strategies._missing.cache_clear()
    panel.parts["strategies"]._known = None
    shown = cards(panel)
    assert {"mirrored", "tpu"} <= set(shown)
    assert all("not installed" in card["reason"] for card in shown.values())
    do(panel, "strategies.framework", name="torch")
    assert not cards(panel)["mirrored"]["reason"]


def test_choices_that_need_gpus_are_offered_where_there_are_some(panel):
    fits = lambda: {  # noqa: E731
        c["name"]: c["fits"] for c in cards(panel)["mirrored"]["options"][0]["choices"]
    }
    do(panel, "strategies.framework", name="tensorflow")
    assert fits()["nccl"] is False
    assert fits()["hierarchical"] is True
    do(panel, "strategies.option", strategy="mirrored", option="cross_device_ops", value="nccl")
    assert "needs a GPU" in cards(panel)["mirrored"]["problem"]
    panel.session.cluster = FakeCluster(device="cuda:0", engines=2)
    assert fits()["nccl"] is True
    assert not cards(panel)["mirrored"]["problem"]


def test_the_administrators_limit_greys_what_needs_more_engines():
    two = strategies.Place("torch", 2, ("cpu",), Limits(max_engines=2))
    nothing = use_of("")
    assert strategies.reason(catalog.lookup("mirrored"), two, nothing) == ""
    assert " 2 " in strategies.reason(catalog.lookup("central_storage"), two, nothing)


def test_a_recipe_greys_the_strategies_that_its_way_does_not_suit(panel):
    panel.session.recipe = Recipe(PREPARE, framework="torch")
    found = {name: card["reason"] for name, card in cards(panel).items()}
    assert "wb.prepare" in found["model_split"]
    assert "wb.fit" in found["model_split"]
    assert not found["mirrored"]


def test_without_a_cluster_everything_can_be_chosen_and_written_down(panel):
    panel.session.cluster = None
    wire = panel.wire()["strategies"]
    assert wire["ready"]
    assert "Run starts 2" in wire["note"]
    do(panel, "strategies.toggle", strategy="one_device")
    do(panel, "strategies.common", name="seeds", value="3")
    answer, _ = do(panel, "recipe.cell")
    lines = [text.splitlines()[0].removeprefix("%%distributed ") for text in answer["cells"]]
    said = [parse_cell_line(line) for line in lines]
    assert [(one.strategies, one.seeds) for one in said] == [
        (("mirrored",), 3), (("one_device",), 3),
    ]  # fmt: skip


def test_a_diagram_follows_options_and_workers(panel):
    drawn, _ = do(panel, "strategies.diagram", strategy="mirrored")
    assert "2 workers" in drawn["text"]
    assert drawn["svg"].startswith("<svg")
    do(panel, "strategies.common", name="workers", value="4")
    again, _ = do(panel, "strategies.diagram", strategy="mirrored")
    assert "4 workers" in again["text"]


def test_small_pictures_show_as_many_nodes_as_messages_say():
    assert glyph("torch", "one_device")["nodes"] == ["worker"]
    small = glyph("torch", "central_storage")
    assert sorted(small["nodes"]) == ["server", "worker", "worker", "worker"]
    ends = {end for phase in small["phases"] for a in phase["arrows"] for end in a[:2]}
    assert ends == set(range(4))


def test_unknown_names_become_a_message(panel):
    for name, fields in (
        ("strategies.toggle", {"strategy": "mirored"}),
        ("strategies.framework", {"name": "jax"}),
        ("strategies.common", {"name": "colour", "value": "1"}),
        ("strategies.option", {"strategy": "mirrored", "option": "buckets", "value": "1"}),
        ("recipe.pick", {"name": "nothing"}),
    ):
        _, notice = do(panel, name, **fields)
        assert notice is not None, name
        assert not notice.detail, notice.detail


def test_nothing_picked_is_said():
    choice = Choice()
    choice.toggle("torch", "ddp")
    with pytest.raises(PlanError, match="WB-PLAN-063"):
        choice.plans(Session(cluster=FakeCluster()))


def test_name_checkpoints_failures_and_logs_reach_the_plans_and_the_cells(panel, tmp_path):
    do(panel, "strategies.toggle", strategy="gossip")
    for name, value in {
        "name": "base", "checkpoint": str(tmp_path), "checkpoint_every": "20",
        "on_failure": "continue", "log": f"tensorboard:{tmp_path}",
    }.items():  # fmt: skip
        do(panel, "strategies.common", name=name, value=value)
    first, second = panel.choice.plans(panel.session)
    assert (first.name, second.name) == ("base-mirrored", "base-gossip")
    assert first.checkpoint != second.checkpoint
    assert (first.checkpoint_every, first.on_failure, len(first.log)) == (20, "continue", 1)
    do(panel, "strategies.common", name="on_failure", value="hope")
    assert panel.wire()["strategies"]["common"]["on_failure"]["error"].startswith("This value")
    with pytest.raises(PlanError, match=r"On failure.*WB-PLAN-064"):
        panel.choice.plans(panel.session)


def test_without_a_cluster_the_engines_field_says_how_many_workers_there_will_be(panel):
    panel.session.cluster = None
    panel.choice.engines = 4
    assert "on 4 workers" in panel.wire()["strategies"]["summary"]
    assert panel.wire()["strategies"]["note"].endswith("Run starts 4 engines.")
