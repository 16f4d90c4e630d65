"""What is lost at most when a worker or a server dies, and the test that shows it.

There is one line for each kind of death and each value of `--on-failure`: the strategy, the case,
the process that dies, `--on-failure`, the loss, and the test. `docs/make_promises.py` makes the
tables of docs/recovery.md from these lines; a test fails if one of the tests does not exist. If a
line does not say what is lost, the strategy's entry says it: `dies_with` under `heal`, `loses` in
other cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from workbench.catalog.spec import Framework, Strategy

Dies = Literal["worker", "server", "warned"]
WAYS = ("stop", "continue", "replace", "heal")
"""The values of `--on-failure`, in the order of the tables' columns."""

NOTHING = "nothing"
STEPS = "the steps since the last checkpoint"
REST = "the steps that this worker had not taken yet"
PUSH = (
    "the dead worker's current push; also its remaining steps, if the other workers finish before "
    "a new engine joins"
)
CLOSURE = "nothing: another worker repeats the dead worker's current step"
REFUSED = "not possible: Workbench refuses `continue` before the run begins"
NOT_DONE = (
    "the steps since the last checkpoint (without a checkpoint: all steps). The run ends, because "
    "it cannot continue without a server"
)
ENDS = (
    "the steps since the last checkpoint: the run ends, and you can resume it from this checkpoint"
)
STOPPED = "nothing: the run stops after a step and writes a checkpoint"


@dataclass(frozen=True)
class Promise:
    """What one strategy promises.

    Attributes:
        strategy: Its name.
        case: The options or the rank; empty: the strategy with its defaults.
        dies: `worker`, `server`, or `warned` (a worker that is warned and has a checkpoint).
        ways: Values of `--on-failure`, separated by commas.
        lost: What is lost at most; empty: what the strategy's entry says.
        proof: The test, by its id: file, name, and case where it has several.
    """

    strategy: str
    case: str
    dies: Dies
    ways: str
    lost: str
    proof: str
    framework: Framework = "torch"

    @property
    def on_failure(self) -> tuple[str, ...]:
        """Each value in `ways`."""
        return tuple(self.ways.split(","))

    def at_most(self, entry: Strategy | None) -> str:
        """Return what is lost; the strategy's entry says it if this line does not."""
        if self.lost or entry is None:
            return self.lost
        return (entry.dies_with or NOTHING) if self.ways == "heal" else entry.loses


def _test(file: str, name: str) -> str:
    return f"tests/cluster/{file}::test_{name}"


_HEAL = _test("recovery/test_healing.py", "a_dead_worker_is_done_without_and_another_joins[0]")
_SERVED = _test(
    "recovery/test_served_healing.py", "a_dead_worker_is_done_without_and_another_joins"
)
_PACE = _test(
    "recovery/test_served_healing.py",
    "at_their_own_pace_nobody_waits_and_a_fresh_engine_does_the_rest[0]",
)
_BOTH = _test("recovery/test_served_healing.py", "a_worker_and_a_server_of_two_that_hold_the_same")
_MET = _test("recovery/test_healing_averaging.py", "averaged_after_each_step_nothing_is_lost[0]")
_NEAR = _test("recovery/test_healing_averaging.py", "the_loss_is_near_that_of_an_undisturbed_run")
_PIPELINES = _test(
    "recovery/test_healing_pipelines.py",
    "the_other_pipeline_goes_on_and_the_broken_one_comes_back[0]",
)
_STOP = _test("test_checkpoints.py", "a_worker_that_dies_while_writing_leaves_the_last_good_one")
_FEWER = _test(
    "recovery/test_fewer.py", "fewer_workers_go_on_with_the_same_batch_and_nothing_is_lost[True]"
)
_REPLACED = _test("recovery/test_replaced.py", "a_dead_worker_is_replaced_and_nothing_changes[0]")
_KINDS = _test("recovery/test_strategies.py", "strategies_go_on_and_end_where_they_would_have")
_COSTS = _test(
    "recovery/test_strategies.py", "a_replaced_worker_costs_the_steps_since_the_checkpoint"
)
_SPARED = _test("recovery/test_servers_die.py", "asynchronous_workers_do_without_a_dead_one")
_SAVER = _test("recovery/test_servers_die.py", "who_evaluates_and_saves_cannot_be_done_without")
_SERVER = _test("recovery/test_servers_die.py", "a_dead_server_comes_back_with_the_checkpoint")
_NO_SERVER = _test(
    "recovery/test_servers_die.py",
    "nobody_can_be_a_server_in_a_dead_ones_place_without_a_checkpoint",
)
_TWO = _test(
    "recovery/test_servers_die.py", "what_two_servers_hold_outlives_one_and_no_step_is_done_again"
)
_STAYS = _test(
    "recovery/test_warned.py", "a_run_that_does_not_go_on_stops_at_a_step_with_its_checkpoint[0]"
)
_WARNED = _test(
    "recovery/test_warned.py", "the_run_goes_on_from_the_checkpoint_of_the_step_it_stopped_at"
)
_GOES = _test("recovery/test_warned.py", "the_others_go_on_and_a_fresh_engine_joins[0]")
_ALONE = _test("recovery/test_warned.py", "a_worker_that_nobody_waits_for_leaves_alone")
_TF_ONE = _test(
    "test_tensorflow_recovery.py", "one_engine_that_holds_all_replicas_cannot_be_done_without"
)
_TF_ALL = _test("test_tensorflow_recovery.py", "the_engine_of_all_replicas_is_replaced")
_TF_SOME = _test("test_tensorflow_recovery.py", "a_worker_of_several_is_replaced_or_done_without")
_TF_SERVER = _test(
    "test_tensorflow_recovery.py", "a_parameter_servers_death_costs_the_steps_since_the_checkpoint"
)
_TF_SPARED = _test("test_tensorflow_parameter_server.py", "a_killed_worker_is_survived_and_said")
_PUSHES = "tests/contract/test_chains.py::test_every_push_counts_once[parameter_server-{}-1-s0]"
_ALL = "stop,continue,replace"
PROMISES: tuple[Promise, ...] = (
    # A worker dies.
    Promise("mirrored", "", "worker", "stop", ENDS, _STOP),
    Promise("mirrored", "", "worker", "continue", NOTHING, _FEWER),
    Promise("mirrored", "", "worker", "replace", STEPS, _REPLACED),
    Promise("mirrored", "", "worker", "heal", "", _HEAL),
    Promise("central_storage", "", "worker", "continue", STEPS,
            _KINDS + "[continue-central_storage-options1]"),
    Promise("central_storage", "", "worker", "replace", STEPS,
            _KINDS + "[replace-central_storage-options1]"),
    Promise("central_storage", "", "worker", "heal", "", _SERVED + "[central-0]"),
    Promise("parameter_server", "`sync=true`", "worker", "replace", STEPS,
            _COSTS + "[synchronous]"),
    Promise("parameter_server", "`sync=true`", "worker", "heal", NOTHING,
            _SERVED + "[two servers-0]"),
    Promise("parameter_server", "", "worker", _ALL, REST, _SPARED),
    Promise("parameter_server", "", "worker", "heal", PUSH, _PACE),
    Promise("parameter_server", "rank 0", "worker", "replace", STEPS, _SAVER),
    Promise("parameter_server", "rank 0", "worker", "heal", PUSH, _PACE),
    Promise("local_sgd", "", "worker", "replace", STEPS, _COSTS + "[local_sgd]"),
    Promise("local_sgd", "", "worker", "heal", "", _NEAR + "[local_sgd]"),
    Promise("local_sgd", "`outer=nesterov`", "worker", "replace", STEPS, _COSTS + "[nesterov]"),
    Promise("local_sgd", "`outer=nesterov`", "worker", "heal", "", _NEAR + "[nesterov]"),
    Promise("local_sgd", "`every=1`, SGD without momentum", "worker", "heal", NOTHING, _MET),
    Promise("gossip", "", "worker", "replace", STEPS, _COSTS + "[gossip]"),
    Promise("gossip", "", "worker", "heal", "", _NEAR + "[ring]"),
    Promise("hybrid", "", "worker", "heal", "", _PIPELINES),
    Promise("sharded", "", "worker", "continue", STEPS, _KINDS + "[continue-sharded-options0]"),
    Promise("sharded", "", "worker", "replace", STEPS, _KINDS + "[replace-sharded-options0]"),
    Promise("model_split", "", "worker", "continue", STEPS,
            _KINDS + "[continue-model_split-options2]"),
    Promise("model_split", "", "worker", "replace", STEPS,
            _KINDS + "[replace-model_split-options2]"),
    Promise("tensor_parallel", "", "worker", "continue", STEPS,
            _KINDS + "[continue-tensor_parallel-options3]"),
    Promise("tensor_parallel", "", "worker", "replace", STEPS,
            _KINDS + "[replace-tensor_parallel-options3]"),
    Promise("mirrored", "", "worker", "continue", REFUSED, _TF_ONE, "tensorflow"),
    Promise("mirrored", "", "worker", "replace", STEPS, _TF_ALL, "tensorflow"),
    Promise("multi_worker_mirrored", "", "worker", "continue", STEPS,
            _TF_SOME + "[continue]", "tensorflow"),
    Promise("multi_worker_mirrored", "", "worker", "replace", STEPS,
            _TF_SOME + "[replace]", "tensorflow"),
    Promise("parameter_server", "", "worker", "stop", CLOSURE, _TF_SPARED, "tensorflow"),
    # A server dies.
    Promise("central_storage", "", "server", "continue", NOT_DONE, _NO_SERVER),
    Promise("central_storage", "", "server", "replace", STEPS, _SERVER + "[central_storage]"),
    Promise("central_storage", "`replicas=2`", "server", _ALL, NOTHING,
            _TWO + "[central_storage-options1-s0]"),
    Promise("central_storage", "`replicas=2`", "server", "heal", NOTHING, _BOTH + "[central-s0]"),
    Promise("parameter_server", "", "server", "replace", STEPS, _SERVER + "[parameter_server]"),
    Promise("parameter_server", "`sync=true`, `replicas=2`", "server", _ALL, NOTHING,
            _TWO + "[parameter_server-options0-s0]"),
    Promise("parameter_server", "`sync=true`, `replicas=2`", "server", "heal", NOTHING,
            _BOTH + "[two servers-s0]"),
    Promise("parameter_server", "`replicas=2`", "server", _ALL, NOTHING, _PUSHES),
    Promise("parameter_server", "`replicas=2`", "server", "heal", NOTHING,
            _BOTH + "[at their own pace-s0]"),
    Promise("parameter_server", "", "server", "replace", STEPS, _TF_SERVER, "tensorflow"),
    # A worker is warned before it is ended; there is a checkpoint.
    Promise("mirrored", "", "warned", "stop", STOPPED, _STAYS),
    Promise("mirrored", "", "warned", "replace", NOTHING, _WARNED),
    Promise("mirrored", "", "warned", "heal", NOTHING, _GOES),
    Promise("parameter_server", "", "warned", _ALL, REST, _ALONE),
)  # fmt: skip
