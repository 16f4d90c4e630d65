"""The panel's choice without a browser: cards, options, recipes, and the plans that come of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from workbench import catalog
from workbench.cookbook import Recipe, builtin
from workbench.cookbook.ways import use_of
from workbench.errors import PlanError
from workbench.limits import Limits
from workbench.line import parse_cell_line
from workbench.panels import fitness
from workbench.panels.choice import Choice
from workbench.panels.model import Panel
from workbench.panels.recipe import RecipePart
from workbench.panels.strategies import StrategiesPart, glyph
from workbench.session import frameworks
from workbench.session.recipes import recipe, recipes
from workbench.session.state import Session

PREPARE = 'model = wb.prepare(model)\nwb.log(fit="wb.fit(")\n'


class FakeCluster:
    def __init__(self, engines=2, framework="torch", device="cpu"):
        self.worker_ids = list(range(engines))
        self.framework, self.devices_asked, self._device = framework, device, device

    def lease(self, workers):
        return SimpleNamespace(leases=[SimpleNamespace(device=self._device)] * workers)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr("workbench.session.checks.installed", lambda framework: True)
    monkeypatch.setattr(frameworks, "installed", lambda framework: True)
    fitness._missing.cache_clear()
    yield
    fitness._missing.cache_clear()


@pytest.fixture
def panel():
    return Panel(Session(cluster=FakeCluster()), (RecipePart, StrategiesPart))


@pytest.fixture
def tiny():
    @recipe
    def tiny(lr=0.1, width=16, nesterov=False, name="a", sizes=(1, 2)):
        "One layer."
        wb.fit(None, None, optimizer=lr)  # noqa: F821

    yield tiny
    recipes.forget("tiny")


def cards(panel):
    return {card["name"]: card for card in panel.wire()["strategies"]["cards"]}


def do(panel, action, /, **fields):
    """Do it; return what it answers, and the newest error."""
    found = []
    panel.notices.clear()
    panel.do(action, fields, lambda value, **_: found.append(value))
    return (found or [None])[0], (panel.notices or [None])[-1]


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
    assert "smaller than the number of workers" in cards(panel)["mirrored"]["problem"]
    assert not panel.wire()["strategies"]["ready"]
    do(panel, "strategies.common", name="batch_size", value="")
    do(panel, "strategies.common", name="inject", value="slow=5:50ms")
    assert "ranks 0 to 1" in cards(panel)["mirrored"]["problem"]
    do(panel, "strategies.common", name="inject", value="--inject slow=1:50ms, jitter=20ms")
    assert [f.text for f in panel.choice.plans(panel.session)[0].faults] == [
        "slow=1:50ms", "jitter=20ms",
    ]  # fmt: skip


def test_what_the_machine_lacks_greys_a_card_with_the_reason(panel, monkeypatch):
    do(panel, "strategies.framework", name="tensorflow")
    assert "No TPU" in cards(panel)["tpu"]["reason"]
    assert not cards(panel)["mirrored"]["reason"]
    monkeypatch.setattr("workbench.session.checks.installed", lambda name: name == "torch")
    fitness._missing.cache_clear()
    panel.parts["strategies"]._known = None
    assert all("not installed" in card["reason"] for card in cards(panel).values())
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
    two = fitness.Place("torch", 2, ("cpu",), Limits(max_engines=2))
    nothing = use_of("")
    assert fitness.reason(catalog.lookup("mirrored"), two, nothing) == ""
    assert "limits engines to 2" in fitness.reason(catalog.lookup("central_storage"), two, nothing)


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


def test_the_list_has_cells_newest_first_functions_and_built_ins(panel, tiny, monkeypatch):
    from workbench.session.state import session

    old, new = Recipe("# old\n", origin="In[3]"), Recipe("x = 1\n", origin="In[4]")
    monkeypatch.setattr(session, "recipes", {"a": old, "b-seed0": new, "b-seed1": new})
    groups = panel.wire()["recipe"]["groups"]
    assert [(g["title"], [r["name"] for r in g["recipes"]]) for g in groups] == [
        ("This notebook's cells", ["b-seed1", "a"]),
        ("Functions", ["tiny"]),
        ("Built-in", builtin.names()),
    ]
    assert groups[0]["recipes"][1]["summary"] == "old"
    do(panel, "recipe.pick", name="a")
    assert panel.wire()["recipe"]["picked"]["source"] == "# old"
    assert panel.wire()["recipe"]["selected"] == "a"


def test_the_last_cell_is_trained_where_nothing_was_picked(panel):
    assert panel.wire()["recipe"]["selected"] == builtin.names()[0]
    panel.session.recipe = Recipe("wb.fit()", origin="In[9]", framework="tensorflow")
    assert panel.wire()["recipe"]["picked"]["source"] == "wb.fit()"
    assert panel.wire()["strategies"]["framework"] == "tensorflow"


def test_a_functions_parameters_reach_its_plan_and_its_cell(panel, tiny):
    do(panel, "recipe.pick", name="tiny")
    for name, value in (("lr", "1"), ("nesterov", "true"), ("name", "b c"), ("sizes", "(3,)")):
        do(panel, "recipe.parameter", name=name, value=value)
    (plan,) = panel.choice.plans(panel.session)
    assert plan.recipe.parameters == {
        "lr": 1.0, "width": 16, "nesterov": True, "name": "b c", "sizes": (3,),
    }  # fmt: skip
    answer, _ = do(panel, "recipe.cell")
    assert "tiny(lr=1.0, width=16, nesterov=True, name='b c', sizes=(3,))" in answer["cells"][0]
    do(panel, "recipe.parameter", name="width", value="1.5")
    shown = {p["name"]: p for p in panel.wire()["recipe"]["picked"]["parameters"]}
    assert "like 16" in shown["width"]["error"]
    assert (shown["width"]["value"], shown["width"]["default"]) == ("1.5", "16")
    with pytest.raises(PlanError, match="width"):
        panel.choice.plans(panel.session)
    do(panel, "recipe.pick", name="digits_mlp")
    assert panel.choice.plans(panel.session)
    do(panel, "recipe.pick", name="tiny")
    do(panel, "recipe.parameter", name="lr", value=None)
    shown = {p["name"]: p for p in panel.wire()["recipe"]["picked"]["parameters"]}
    assert (shown["lr"]["value"], shown["lr"]["given"]) == ("0.1", False)


def test_a_recipe_brings_its_framework_and_is_not_run_under_the_other(panel, monkeypatch):
    from workbench.session.state import session

    cell = Recipe("import keras\nmodel.fit()", origin="In[2]", framework="tensorflow")
    monkeypatch.setattr(session, "recipes", {"k": cell})
    do(panel, "recipe.pick", name="k")
    assert panel.wire()["strategies"]["framework"] == "tensorflow"
    assert panel.wire()["strategies"]["ready"]
    do(panel, "strategies.framework", name="torch")
    assert "written for tensorflow" in panel.wire()["recipe"]["problem"]
    assert not panel.wire()["strategies"]["ready"]
    with pytest.raises(PlanError, match="written for tensorflow"):
        panel.choice.plans(panel.session)


def test_a_recipe_that_is_gone_is_said_and_the_panel_goes_on(panel, tiny):
    do(panel, "recipe.pick", name="tiny")
    recipes.forget("tiny")
    wire = panel.wire()
    assert "no recipe" in wire["recipe"]["problem"].lower()
    assert not wire["strategies"]["ready"]
    do(panel, "recipe.pick", name="digits_cnn")
    assert panel.wire()["strategies"]["ready"]
    recipes.register(tiny)


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
    with pytest.raises(PlanError, match="No strategy"):
        choice.plans(Session(cluster=FakeCluster()))
