"""The notebook's cluster when a cell and the panel start it at once."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

import workbench
from workbench.cluster.hosts.settings import LaunchSettings
from workbench.cookbook.recipe import Recipe
from workbench.notebook import session as state
from workbench.notebook.session import Session

WAIT_S = 20


def test_two_threads_that_start_the_cluster_get_the_same_one(monkeypatch):
    made, begun, go = [], threading.Event(), threading.Event()

    def slow(count, engines=None, **settings):
        begun.set()
        assert go.wait(WAIT_S)
        made.append(
            SimpleNamespace(
                keeping=SimpleNamespace(on_end=None), devices_asked="auto",
                launch=LaunchSettings(), worker_ids=list(range(count)),
            )
        )  # fmt: skip
        return made[-1]

    monkeypatch.setattr(state, "Cluster", slow)
    session, found = Session(), []
    threads = [
        threading.Thread(target=lambda: found.append(session.start(2)), daemon=True)
        for _ in range(2)
    ]
    threads[0].start()
    assert begun.wait(WAIT_S)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(made) == 1
    assert found == [made[0]] * 2


def test_a_session_that_is_reset_forgets_its_cells_and_keeps_its_cluster():
    recipe = Recipe("wb.fit()")
    session = Session(cluster=SimpleNamespace(), recipe=recipe, recipes={"a": recipe})
    cluster = session.cluster

    session.reset()

    assert session.recipe is None
    assert session.recipes == {}
    assert session.cluster is cluster


@pytest.mark.parametrize(("again", "stops"), [(False, 1), (True, 0)])
def test_an_extension_that_is_loaded_again_in_its_cell_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, again: bool, stops: int
) -> None:
    from IPython.core.events import EventManager, available_events

    stopped: list[bool] = []
    monkeypatch.setattr(state.Session, "stop", lambda self: stopped.append(True))
    shell: Any = SimpleNamespace(extension_manager=SimpleNamespace(loaded=set()))
    shell.events = EventManager(shell, available_events)
    workbench.unload_ipython_extension(shell)
    if again:
        shell.extension_manager.loaded.add("workbench")
    assert stopped == []
    for _ in range(2):  # cells later on do not stop it again
        shell.events.trigger("post_run_cell", None)
    assert len(stopped) == stops
