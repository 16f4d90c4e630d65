"""An administrator's limits: read from two places, the stricter holds, mistakes are named."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from workbench.devices import limits
from workbench.devices.limits import Limits
from workbench.errors import PlanError


def _load(tmp_path: Path, text: str = "", **environment: str) -> Limits:
    path = tmp_path / "limits.toml"
    if text:
        path.write_text(text)
    return limits.load(environment, path)


def test_without_file_and_variables_everything_is_allowed(tmp_path: Path) -> None:
    found = _load(tmp_path)
    assert found == Limits()
    found.check_engines(10_000)
    found.check_hosts("10.0.0.1")
    assert found.permits(3, "GPU-1")
    assert found.idle_timeout(5.0) == 5.0


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    found = _load(
        tmp_path, 'max_engines = 4\ndevices = "0,GPU-5f"\nidle_timeout = "2h"\nhosts = false\n'
    )
    assert found == Limits(4, (("0", "GPU-5f"),), 7200.0, False)
    assert found.permits(0, "GPU-aa")
    assert found.permits(7, "GPU-5f3e")
    assert not found.permits(1, "GPU-aa")


@pytest.mark.parametrize(
    ("text", "variable", "value", "expected"),
    [
        ("max_engines = 4", "WORKBENCH_MAX_ENGINES", "8", Limits(4)),
        ("max_engines = 4", "WORKBENCH_MAX_ENGINES", "2", Limits(2)),
        ('idle_timeout = "1h"', "WORKBENCH_IDLE_TIMEOUT", "never", Limits(idle_timeout_s=3600)),
        ('idle_timeout = "1h"', "WORKBENCH_IDLE_TIMEOUT", "90", Limits(idle_timeout_s=90)),
        ("hosts = false", "WORKBENCH_HOSTS", "true", Limits(hosts=False)),
        ("hosts = true", "WORKBENCH_HOSTS", "no", Limits(hosts=False)),
    ],
)
def test_a_user_can_only_be_stricter(
    tmp_path: Path, text: str, variable: str, value: str, expected: Limits
) -> None:
    assert _load(tmp_path, text, **{variable: value}) == expected


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ('devices = "0,1"', "1,2", [1]),
        ('devices = "0"', "all", [0]),
        ('devices = "all"', "2", [2]),
        ('devices = "0"', "3", []),
        ('devices = "cpu"', "0,1", []),
        ("devices = [0, 1]", "cpu", []),
        ('devices = ["GPU-b1", "GPU-c"]', "GPU-b", [1]),
        ('devices = "0,1"', "GPU-b1", [1]),
        ('devices = "0"', "", [0]),
    ],
)
def test_gpus_must_be_in_both_lists(
    tmp_path: Path, text: str, value: str, expected: list[int]
) -> None:
    found = _load(tmp_path, text, WORKBENCH_DEVICES=value)
    gpus = enumerate(["GPU-a1", "GPU-b1", "GPU-c1"])
    assert [number for number, uuid in gpus if found.permits(number, uuid)] == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_engines = 0", "max_engines"),
        ("max_engines = true", "max_engines"),
        ("max_engines = 2.5", "max_engines"),
        ("max_engine = 2", "max_engine"),
        ('devices = "cuda"', "devices"),
        ('devices = "0,,1"', "devices"),
        ("idle_timeout = -1", "idle_timeout"),
        ('idle_timeout = "soon"', "idle_timeout"),
        ('hosts = "maybe"', "hosts"),
        ("max_engines 4", "limits.toml"),
        ("[limits]\nmax_engines = 4", "limits"),
    ],
)
def test_a_mistaken_file_stops_everything(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(PlanError, match=re.escape(named)) as caught:
        _load(tmp_path, text)
    assert "limits.toml" in str(caught.value)


def test_a_file_that_is_no_file_stops_everything(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-057"):
        limits.load({}, tmp_path)


def test_engines_elsewhere_count(tmp_path: Path) -> None:
    found = _load(tmp_path, "max_engines = 4")
    found.check_engines(4)
    found.check_engines(1, elsewhere=3)
    with pytest.raises(PlanError, match=r"4.*clusters have 3.*WB-PLAN-055") as caught:
        found.check_engines(2, elsewhere=3)
    assert caught.value.allowed is not None
    assert caught.value.allowed.startswith("at most 1 ")
    assert "limits.toml" in caught.value.allowed


def test_other_hosts_can_be_forbidden(tmp_path: Path) -> None:
    found = _load(tmp_path, "hosts = false")
    found.check_hosts("")
    with pytest.raises(PlanError, match="WB-PLAN-056"):
        found.check_hosts("10.0.0.1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("45m", 2700), ("2h", 7200), ("1.5h", 5400), ("1d", 86400),
     ("never", math.inf)],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert limits.duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "1w", "1e3", "nan", "inf", "٣", "1 2"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError):
        limits.duration_s(text)
