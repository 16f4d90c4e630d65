"""No control does nothing: every action that the panel's scripts name is one that a part has."""

import inspect
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("anywidget")

from workbench.panels.model import Panel
from workbench.panels.show import PARTS
from workbench.views.live.frames import COMMANDS
from workbench.views.panel import script, style

ACTION = re.compile(r'"([a-z]+)\.([a-z_]+)"')
CALL = re.compile(r'\bdo\("([a-z]+)\.([a-z_]+)"(?:, \{((?:[^{}]|\{[^{}]*\})*)\})?\)')


@pytest.fixture(scope="module")
def panel():
    return Panel(SimpleNamespace(cluster=None, lost="", recipe=None, recipes={}), PARTS)


def actions():
    """What stands in the calls of `do` and `ask`, also where it is chosen between two."""
    calls = re.findall(r"\b(?:do|ask)\(([^;]*?\)?)[;)]", script())
    return {found for call in calls for found in ACTION.findall(call)} - {("panel", "dismiss")}


def test_every_action_in_the_scripts_is_one_that_a_part_has(panel):
    found = actions()
    assert len(found) > 25
    missing = [f"{part}.{name}" for part, name in found
               if part not in panel.parts or name not in panel.parts[part]._actions]  # fmt: skip
    assert missing == []
    live = panel.parts["live"]._actions
    assert set(COMMANDS) <= set(live)  # what the dashboard's own buttons ask for


def test_every_call_gives_fields_that_its_action_takes(panel):
    calls = CALL.findall(script())
    assert len(calls) > 20
    for part, name, fields in calls:
        if part == "panel":  # the model's own: closing a message
            continue
        given = re.findall(r"(?:^|,)\s*([a-z_]+)\s*(?=:|,|$)", re.sub(r"\([^()]*\)", "", fields))
        takes = inspect.signature(panel.parts[part]._actions[name].call).parameters
        assert set(given) <= set(takes), (part, name, given)


def test_every_action_has_a_control(panel):
    named = actions()
    idle = [
        f"{part}.{name}"
        for part, found in panel.parts.items()
        for name in found._actions
        if (part, name) not in named and not (part == "live" and name in COMMANDS)
    ]
    assert idle == []


def test_all_classes_of_the_panel_are_its_own():
    classes = set(re.findall(r"\.([a-z][\w-]*)", re.sub(r"/\*.*?\*/|url\(.*?\)", "", style())))
    foreign = {one for one in classes if not one.startswith(("wbp", "wb-", "jp-"))}
    assert foreign <= {"s", "f"}, foreign  # strokes and fills of the drawn pictures
