"""Notices that a host goes away: a file that appears, a function that says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebook_shell import soon

from workbench.engine.telemetry import notices
from workbench.engine.telemetry.departure import Departure, Notice
from workbench.engine.telemetry.notices import Watch, leave_when
from workbench.errors import PlanError, RunError

OFTEN_S = 0.005


@pytest.fixture
def departure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Departure]:
    """One that hears of what is looked for in this process."""
    monkeypatch.setattr(notices, "_departure", None)
    monkeypatch.setattr(notices, "_watch", None)
    monkeypatch.delenv(notices.VARIABLE, raising=False)
    one = Departure(end=lambda: None)
    notices.serve(one)
    yield one
    if notices._watch is not None:
        notices._watch.close()


@pytest.mark.parametrize(
    ("content", "seconds"),
    [("", None), ("120\n", 120.0), ("90.5", 90.5), ("-3", 0.0), ("soon", None), ("nan", None)],
)
def test_a_file_that_appears_is_a_notice(
    departure: Departure, tmp_path: Path, content: str, seconds: float | None
) -> None:
    path, looked = tmp_path / "notice", []
    exists = Path.exists

    def look(self: Path) -> bool:
        looked.append(self)
        return exists(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", look)
        leave_when(path, every_s=OFTEN_S)
        assert soon(lambda: len(looked) > 2)
        assert departure.notice is None
        (tmp_path / "written").write_text(content)
        (tmp_path / "written").rename(path)
        assert soon(lambda: departure.notice is not None)
    assert departure.notice == Notice(f"notice: {path} exists", seconds, host=True)


@pytest.mark.parametrize(("said", "seconds"), [(True, None), (30, 30.0), (0, 0.0), (0.5, 0.5)])
def test_a_function_says_it(departure: Departure, said: Any, seconds: float | None) -> None:
    answers = iter([None, False, said])
    leave_when(lambda: next(answers), every_s=OFTEN_S)
    assert soon(lambda: departure.notice is not None)
    found = departure.notice
    assert (found.seconds, found.host) == (seconds, True)


def test_a_function_that_fails_is_asked_again_and_its_failure_told_once(
    departure: Departure, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def ask() -> object:
        asked.append(1)
        if len(asked) < 4:
            raise OSError("no route to host")
        return 60

    leave_when(ask, every_s=OFTEN_S)
    assert soon(lambda: departure.notice is not None)
    assert capfd.readouterr().err.count("no route to host") == 1


def test_the_last_source_counts(departure: Departure) -> None:
    first: list[int] = []
    leave_when(lambda: first.append(1), every_s=OFTEN_S)
    assert soon(lambda: first)
    was = notices._watch
    assert isinstance(was, Watch)
    leave_when(lambda: True, every_s=OFTEN_S)
    was._thread.join(10)
    assert not was._thread.is_alive()
    assert soon(lambda: departure.notice is not None)


def test_the_environment_names_a_file_for_all_engines(
    departure: Departure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notice").touch()
    monkeypatch.setenv(notices.VARIABLE, str(tmp_path / "notice"))
    notices.serve(departure)
    assert soon(lambda: departure.notice is not None)


@pytest.mark.parametrize("source", [None, 5, ["a", "b"]])
def test_what_is_no_source_is_refused(departure: Departure, source: Any) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-328"):
        leave_when(source)


@pytest.mark.parametrize("every_s", [0, -1, True, "5", float("nan")])
def test_what_is_no_time_is_refused(departure: Departure, every_s: Any) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-329"):
        leave_when("/nowhere", every_s=every_s)


def test_where_no_worker_is_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_departure", None)
    with pytest.raises(RunError, match="WB-RUN-150"):
        leave_when("/nowhere")
