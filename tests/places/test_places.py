"""Colab and Kaggle are known by what they set; what Colab's packages allow pip to leave alone."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from workbench.views import places

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads(
    (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
)["project"]
COLAB_LIST = Path(__file__).with_name("colab-pip-freeze.txt")
COLAB_PYTHON = "3.13"
ADDED = {"nvidia-ml-py"}
"""Required packages that Colab's CPU runtime does not have; its GPU runtime has them."""


def colab_packages() -> dict[str, Version]:
    lines = COLAB_LIST.read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("_", "-"): Version(version) for name, version in pairs}


def replaced(requirements: list[str], have: dict[str, Version]) -> set[str]:
    """Names of the packages that pip would replace to meet the requirements."""
    environment = {"python_version": COLAB_PYTHON, "extra": ""}
    parsed = [Requirement(one) for one in requirements]
    wanted = [one for one in parsed if one.marker is None or one.marker.evaluate(environment)]
    return {one.name for one in wanted if one.name in have and have[one.name] not in one.specifier}


def test_pip_replaces_nothing_of_colabs() -> None:
    have = colab_packages()
    extras = PROJECT["optional-dependencies"]
    needs = [*PROJECT["dependencies"], *extras["torch"], *extras["tensorflow"]]
    assert replaced(needs, have) == set()
    names = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert names - set(have) - {"tomli"} == ADDED


def test_a_requirement_that_colab_does_not_meet_is_found() -> None:
    assert replaced(["ipykernel>=6.29", "numpy>=1.26"], colab_packages()) == {"ipykernel"}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`google.colab.output` as Colab has it, with a widget manager."""
    output = types.ModuleType("google.colab.output")
    output.enable_custom_widget_manager = lambda: None
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    return output


def test_any_other_jupyter_is_no_place_of_its_own() -> None:
    assert places.here({"PATH": "/usr/bin", "JUPYTERHUB_USER": "me"}) is None


def test_colab_with_a_manager_draws_the_dashboard(stub: types.ModuleType) -> None:
    place = places.here({})
    assert place is not None
    assert (place.name, place.plot) == ("Colab", "widget")


def test_colab_without_a_manager_has_pictures(stub: types.ModuleType) -> None:
    del stub.enable_custom_widget_manager
    place = places.here({"COLAB_RELEASE_TAG": "release-colab_20260819"})
    assert place is not None
    assert (place.name, place.plot) == ("Colab", "svg")


def test_kaggle_has_pictures() -> None:
    place = places.here({"KAGGLE_KERNEL_RUN_TYPE": "Batch"})
    assert place is not None
    assert (place.name, place.plot) == ("Kaggle", "svg")
