import threading

from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.telemetry.step_gate import Gate
from workbench.execution.stop import Agreement

WAIT_S = 10


def test_the_common_step_is_known_when_the_last_rank_has_answered():
    agreement = Agreement("stop", 3)
    assert agreement.answer(2, 7) is None
    assert agreement.answer(0, 8) is None
    assert agreement.silent == {1}
    assert agreement.answer(1, 7) == 8
    assert agreement.silent == frozenset()


def test_a_rank_counts_once():
    agreement = Agreement("pause", 2)
    assert agreement.answer(0, 3) is None
    assert agreement.answer(0, 9) is None
    assert agreement.answer(1, 4) == 4
    assert agreement.answer(1, 9) is None


def go_on(gate, first, last, seen):
    """Begin steps as long as the gate lets one through."""
    for step in range(first, last + 1):
        if not gate.enter(step):
            return
        seen.append(step)


@given(
    begun=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    more=st.lists(st.integers(0, 6), min_size=5, max_size=5),
)
def test_no_worker_can_pass_the_common_step_while_the_answers_travel(begun, more):
    """Each rank goes on after its answer as far as its gate lets it, before it hears the step."""
    gates = [Gate() for _ in begun]
    agreement, common = Agreement("stop", len(gates)), None
    for rank, (gate, step) in enumerate(zip(gates, begun, strict=True)):
        gate.enter(step)
        common = agreement.answer(rank, gate.halt())
    entered = [[] for _ in gates]
    threads = [
        threading.Thread(target=go_on, args=(gate, step + 1, step + eager, seen), daemon=True)
        for gate, step, eager, seen in zip(gates, begun, more, entered, strict=False)
    ]
    for thread in threads:
        thread.start()
    assert common == max(begun)
    for gate in gates:
        gate.halt_at("stop", common)
    for thread in threads:
        thread.join(WAIT_S)
    for gate, step, eager, seen in zip(gates, begun, more, entered, strict=False):
        assert seen == [*range(step + 1, min(step + eager, common) + 1)]
        assert not gate.enter(common + 1)
