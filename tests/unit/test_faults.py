from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workbench.errors import PlanError
from workbench.shared.faults import PLACES, Fault, parse_duration, parse_fault

RANKS = st.integers(0, 64)
SECONDS = st.floats(0, 1e4, allow_nan=False).map(lambda s: round(s, 9))
FAULTS = st.one_of(
    st.builds(lambda r, s, w: Fault("slow", r, delay_s=s, where=w), RANKS, SECONDS,
              st.sampled_from(PLACES)),
    st.builds(lambda r, f, w: Fault("slow", r, factor=f, where=w), RANKS,
              st.floats(1.0, 100.0), st.sampled_from(PLACES)),
    st.builds(lambda s: Fault("jitter", delay_s=s), SECONDS),
    st.builds(lambda s: Fault("latency", delay_s=s), SECONDS),
    st.builds(lambda b: Fault("bandwidth", bytes_per_s=b), st.floats(1e-3, 1e12)),
    st.builds(lambda r, s: Fault("kill", r, step=s), RANKS, st.integers(0, 10**6)),
    st.just(Fault("clear")),
)  # fmt: skip


@given(FAULTS)
@example(Fault("bandwidth", bytes_per_s=0.0010000000000000002))
@example(Fault("jitter", delay_s=1.0000000000000002e-9))
def test_a_fault_survives_being_typed(fault: Fault) -> None:
    assert parse_fault(fault.text) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow=1:50ms", Fault("slow", 1, delay_s=0.05)),
        ("slow=1:3x", Fault("slow", 1, factor=3.0)),
        ("slow=0:200us/data", Fault("slow", 0, delay_s=2e-4, where="data")),
        ("jitter=20ms", Fault("jitter", delay_s=0.02)),
        ("kill=2@100", Fault("kill", 2, step=100)),
        ("bandwidth=100MB/s", Fault("bandwidth", bytes_per_s=1e8)),
        ("bandwidth=2.5GB/s", Fault("bandwidth", bytes_per_s=2.5e9)),
        ("latency=5ms", Fault("latency", delay_s=0.005)),
        (" clear ", Fault("clear")),
    ],
)
def test_the_forms_a_teacher_types(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(fault.text) == fault


@pytest.mark.parametrize(
    "text",
    ["", "slow", "slow=1", "slow=x:50ms", "slow=1:50", "slow=1:-5ms", "slow=1:5ms/nowhere",
     "slow=1:0.5x", "slow=1:-3x", "slow=1:nanx", "jitter=", "kill=2", "kill=2@x", "clear=1",
     "fast=1:5ms", "bandwidth=100", "bandwidth=0MB/s", "bandwidth=-1MB/s", "latency=5"],
)  # fmt: skip
def test_what_is_not_understood_is_answered_with_the_forms(text: str) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-040") as caught:
        parse_fault(text)
    assert "slow=RANK:50ms" in str(caught.value)


@pytest.mark.parametrize("text", ["bandwidth=100MB/s", "latency=5ms"])
def test_link_faults_need_a_strategy_with_links(text: str) -> None:
    parse_fault(text).check(workers=2, links=True)
    with pytest.raises(PlanError, match="WB-PLAN-038"):
        parse_fault(text).check(workers=2, links=False)


def test_the_examples_in_the_error_can_be_typed() -> None:
    with pytest.raises(PlanError) as caught:
        parse_fault("nonsense")
    for form in str(caught.value.allowed).split(", "):
        parse_fault(form.replace("RANK", "1").replace("STEP", "10"))


def test_a_fault_must_be_for_a_worker_of_the_run() -> None:
    parse_fault("slow=3:50ms").check(workers=4)
    parse_fault("jitter=5ms").check(workers=1)
    for text in ("slow=4:50ms", "kill=9@3", "slow=-1:5ms"):
        with pytest.raises(PlanError, match=r"WB-PLAN-039[\s\S]*3"):
            parse_fault(text).check(workers=4)


@pytest.mark.parametrize(("text", "seconds"), [("50ms", 0.05), ("1.5s", 1.5), ("200us", 2e-4)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "ms", "-5ms", "5 ms", "1e3ms", "5min"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_duration(text)
