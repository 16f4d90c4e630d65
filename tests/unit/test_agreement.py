from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.gate import Gate
from workbench.session.agreement import Agreement


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
    reached = []
    for gate, step, eager in zip(gates, begun, more, strict=False):
        open_steps = [later for later in range(step + 1, step + eager + 1) if later < gate._limit]
        assert all(gate.enter(later) for later in open_steps)
        reached.append(max([step, *open_steps]))
    assert common is not None
    assert max(reached) <= common
    for gate, step in zip(gates, reached, strict=True):
        gate.halt_at("stop", common)
        assert all(gate.enter(later) for later in range(step + 1, common + 1))
        assert not gate.enter(common + 1)
