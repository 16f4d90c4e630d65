"""Messages and clicks in any order: a run's state stays one of its states, and ends once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fuzz_profile import tries
from history_rows import make_rows
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workbench.cookbook.recipe import Recipe
from workbench.errors import RunError
from workbench.execution.run import Run
from workbench.execution.stop import Agreement
from workbench.history.store import RunHistory
from workbench.shared import events as lifecycle
from workbench.shared.messages import Down, Halt, HaltAt, Resume
from workbench.shared.plan import make_plan
from workbench.shared.protocol import Packet, decode_up
from workbench.shared.record import RECORD

WORKERS = 3
RANKS = st.integers(0, WORKERS - 1)
STEPS = st.integers(-1, 40)


class Engines:
    """Takes down what the run tells its engines."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Down]] = []
        self.interrupts = 0
        self.lost, self.banner, self.mender = 0, "", None
        self.outcomes: dict[int, Any] = {}
        self.engines = SimpleNamespace(router=self)

    def send(self, engine: int, message: Down) -> None:
        self.sent.append((engine, message))

    def interrupt(self) -> None:
        self.interrupts += 1

    def heard(self, engine: int, message: Any) -> Any:
        """Note that something came."""
        return message


class Life(RuleBasedStateMachine):
    """A run under way with three workers, and whoever clicks, answers or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        plan = make_plan(Recipe("wb.fit()"), "mirrored", workers=WORKERS)
        self.run = Run(
            plan, number=1, name="r", engines=range(WORKERS), devices=["cpu"] * WORKERS,
            folder=Path(self.folder.name),
        )  # fmt: skip
        self.engines: Any = Engines()
        self.run.task = self.engines
        self.run.advance("submit")
        self.settled = ""
        self.asked: Agreement | None = None

    def hear(self, kind: str, body: dict[str, Any], *payload: bytes) -> None:
        message: Any = decode_up(Packet(kind, {"run": 1, **body}, payload))
        self.run.receive(message)

    @rule(rank=RANKS)
    def started(self, rank: int) -> None:
        self.hear("event", {"name": "run_started", "rank": rank, "device": "cpu"})

    @rule(rank=RANKS, name=st.sampled_from(["paused", "resumed", "cell_left"]), step=STEPS)
    def paused_or_not(self, rank: int, name: str, step: int) -> None:
        self.hear("event", {"name": name, "rank": rank, "step": step})

    @rule(
        name=st.sampled_from(["epoch", "eval", "log", "note", "warning", "run_finished",
                              "unmeasured", "server", "post", "checkpoint"]),
        rank=RANKS, step=STEPS,
    )  # fmt: skip
    def told(self, name: str, rank: int, step: int) -> None:
        fields = {"rank": rank, "step": max(step, 0), "epoch": 1, "values": {"loss": float("nan")},
                  "columns": {}, "text": "<b>", "server": 0, "topic": "t", "value": 1,
                  "seconds": 0.1, "path": "p", "bytes": 1,
                  "stall_s": 0.1, "size_bytes": 9, "folder": "f"}  # fmt: skip
        self.hear("event", {"name": name, **fields})

    @rule(rank=RANKS, step=STEPS)
    def answered(self, rank: int, step: int) -> None:
        before = len(self.engines.sent)
        self.hear("position", {"rank": rank, "step": step})
        common = self.asked.answer(rank, step) if self.asked and not self.settled else None
        named = [m.step for _, m in self.engines.sent[before:] if isinstance(m, HaltAt)]
        assert named == ([] if common is None else [common] * WORKERS)

    @rule(first=st.integers(0, 30), steps=st.integers(0, 4), rank=RANKS)
    def trained(self, first: int, steps: int, rank: int) -> None:
        rows = make_rows(steps, WORKERS, first=first)[:, rank]
        self.hear("records", {"dropped": 0}, np.ascontiguousarray(rows).tobytes())

    @rule(what=st.sampled_from(["stop", "pause", "resume", "step"]))
    def clicked(self, what: str) -> None:
        before = len(self.engines.sent)
        getattr(self.run, what)()
        kinds = {type(message) for _, message in self.engines.sent[before:]}
        if Halt in kinds:
            self.asked = Agreement("stop" if what == "stop" else "pause", WORKERS)
        if Resume in kinds or (what == "resume" and self.settled):
            self.asked = None
        if self.settled:
            assert kinds == set()

    @rule(error=st.none() | st.just(RunError("boom", code="WB-RUN-000")))
    def finished(self, error: RunError | None) -> None:
        if not self.settled:
            self.run.finish(error)
            self.settled = self.run.state
            assert self.settled == "failed" if error else self.settled in ("finished", "stopped")

    @invariant()
    def a_state_that_is_over_stays(self) -> None:
        assert self.run.state in ({self.settled} if self.settled else ALIVE)
        assert self.run.is_over == bool(self.settled)

    @invariant()
    def it_can_be_drawn(self) -> None:
        snapshot = self.run.snapshot()
        assert snapshot.state == self.run.state
        assert len({len(self.run.history[name]) for name in self.run.history}) == 1

    def teardown(self) -> None:
        self.finished(None)
        self.folder.cleanup()


ALIVE = {"pending", "starting", "running", "paused", "recovering", "stopping"}
TestLife = Life.TestCase
TestLife.settings = tries(12)


@tries(80)
@given(st.lists(st.sampled_from(sorted({e for next_ in lifecycle._NEXT.values() for e in next_}))))
def test_any_order_of_events_gives_a_state_or_names_what_cannot_be(events: list[Any]) -> None:
    state: lifecycle.State = "pending"
    over = False
    for event in events:
        try:
            state = lifecycle.step(state, event)
        except lifecycle.InvalidTransitionError as error:
            assert repr(event) in str(error)  # noqa: PT017 - most orders raise nothing
        assert not over or state in lifecycle.OVER
        over = state in lifecycle.OVER


@tries(30)
@given(st.lists(st.binary(min_size=RECORD.itemsize, max_size=RECORD.itemsize), max_size=8),
       st.booleans())  # fmt: skip
def test_rows_of_noise_never_break_a_history(rows: list[bytes], joined: bool) -> None:
    history = RunHistory(range(2), joined=joined)
    with np.errstate(all="ignore"):
        history.append(np.frombuffer(b"".join(rows), RECORD))
        history.append(make_rows(5, 2).reshape(-1))
        history.finish()
        snapshot = history.snapshot()
    assert snapshot.step >= 5
    assert len({len(history[name]) for name in history}) == 1
