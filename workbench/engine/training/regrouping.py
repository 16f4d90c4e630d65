"""Lets a training continue with other workers when a worker dies, joins or leaves.

The kernel announces a generation (`telemetry/membership.py`). All members of the generation come
here, either between two steps or after a collective that failed:

    leave    the wrappers, the links and the old process group
    meet     in a group of the new members, with the generation's name
    compare  how far each worker is: (steps completed, step evaluated last, meetings); the
             furthest workers are right
    catch up workers that are behind take over, from one of the furthest workers, the model, the
             optimizer, the scheduler, the evaluations and the place in the data
             (`transport/handover.py`); new workers also take over random states
    continue each worker with its share of the same global batches in the same order

If replicas are copies, either all workers complete a step or no worker does. No worker can be ahead
by more than one step, because the next step needs all workers. Assume that one worker has completed
a step that failed on other workers. Then the sum contained the gradients of all workers. So the
result is equal to that of an undisturbed run, and the other workers take it over. If no worker has
completed the step, all repeat it, with the shares of the present members. A failed step has changed
only gradients, and buffers, which the strategy restores.

If replicas differ between meetings (`contract.Strategy.copies`), each worker keeps its own replica.
Between meetings each worker takes its steps alone. So the workers are at different steps when a
change comes:

    meeting           F: the furthest worker                  next meeting
       |--- worker 0: ======| ------------------------------------->|
       |--- worker 1: ==|...| ------------------------------------->|
       |--- (dead):   =x    | ------------------------------------->|   new worker: begins at F
            shares as before|  the same batches, divided again

A worker that is behind takes its steps up to F on its old shares, because the others have already
done so. From F on, all workers have new shares. The result of a meeting contains the data of all
workers. So a worker whose meeting was interrupted takes over the result from a worker that
completed the meeting. If no worker completed the meeting, it is repeated. The strategy decides
whether the step before the meeting is repeated too.

If several workers hold a replica together, each worker takes over from a worker that holds the same
part. Parts meet in separate groups. So one part may have the sum of its gradients before another
part does. A worker takes its step only after it knows that all workers have everything they need
for it (`Strategy.ready`). So if one worker has taken the step, the others are told here. They take
the step with the data that they already have. A worker that has lost the other workers of its
replica waits. Then it joins again like a new worker.

If servers hold the parameters, the servers know which step counts (`Strategy.settle_steps`). Each
worker asks the servers before it compares. Workers that never meet (`Strategy.apart`) do not wait
for each other here either. Before a step, each of these workers reads the list of present members,
and one of them hands over its state to a new worker.

Two things differ from an undisturbed run. Random numbers that a failed step drew (dropout) are
drawn again. The search for the fastest all-reduce is not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import FitError, RunError, RunStopped
from ...shared import events
from ..checkpoints.checkpoints import format_of
from ..transport import address, handover
from . import fit_arguments

if TYPE_CHECKING:
    from ...shared.messages import Regroup
    from ...shared.protocol import RunSpec
    from ..checkpoints.checkpoints import Checkpoints
    from ..context import RunContext
    from ..contract import Strategy

clock = time.perf_counter
NOWHERE = (-1, -1, -1)
"""The progress of a worker that has just joined."""


class Training(Protocol):
    """The methods and attributes that a training must have (`loop.Training`).

    Attributes:
        ~base: Steps of earlier trainings of its cell.
        ~source: The training's data.
        ~evaluated: The step that was evaluated last.
        ~arrives_later: Whether a new worker still has to read its data up to the place of the
        others. It then reports when it is there (`Regrouping.arrived`).
    """

    context: RunContext
    base: int
    arrives_later: bool
    source: Any
    evaluated: int
    checkpoints: Checkpoints

    def why_not(self) -> str:
        """Return why the training cannot continue with other workers; empty if it can."""

    def place(self) -> dict[str, Any]:
        """Return the progress of this training, for a worker that takes over its state."""

    def take_place(self, place: Mapping[str, Any]) -> None:
        """Set the progress to the progress of another worker."""

    def deal(self) -> None:
        """Continue in the data at the current step, with equal shares."""

    def part(self, shard: tuple[int, int]) -> tuple[int, Any]:
        """Return this worker's share, and the number of shares or the weight of each share."""

    def catch_up(self) -> None:
        """Evaluate with the others if they will evaluate now, after the latest step."""

    def tell_evaluation(self) -> None:
        """Tell the kernel the latest evaluation; it counts once, even if several workers do."""


class Regrouping:
    """Lets one `wb.fit` continue when the set of workers changes.

    Attributes:
        lags: Whether this worker has not yet reached the furthest of the other workers.
    """

    lags = False

    def __init__(self, training: Training) -> None:
        self._training, self.context = training, training.context
        self._membership = self.context.membership
        self._framework: Any = fit_arguments.support(self.context.spec.framework)
        self._together = 0  # the step that the furthest worker had reached
        self._owed: events.Regrouped | None = None
        self._passed_over = 0  # step whose checkpoint was interrupted; others may be further

    # -- where a training can continue with others -------------------------------------------------

    def begin(self, strategy: Strategy) -> None:
        """From now on, accept changes of the workers, if this training can continue with others.

        Raises:
            RunError: This worker was started to join the training, but it cannot join.
        """
        context, membership = self.context, self._membership
        if not context.spec.heals:
            return
        if why_not := self._why_not(strategy):
            if membership.waits:
                raise RunError(
                    "A worker cannot join this training.", seen=why_not, code="WB-RUN-137"
                )
            self._tell_why_not(why_not)
            return
        membership.apart = strategy.apart
        membership.break_out = lambda: self._break_out(strategy)
        context.closers.append(self._end)
        membership.begin()
        context.emit(events.Standing(rank=membership.place, phase="in"))

    def _tell_why_not(self, why_not: str) -> None:
        place = self._membership.place
        self.context.emit(events.Standing(rank=place, phase="apart", why=why_not))
        if self.context.spec.rank == 0:
            text = (
                "If a worker dies during this training, the run cannot heal, so Workbench must run "
                f"the cell again. Reason: {why_not}."
            )
            self.context.emit(events.Noted(rank=0, text=text))

    def withdraw(self, why_not: str) -> None:
        """Stop accepting changes; called on all workers at the same step."""
        if self._membership.trains:
            self._membership.withdraw()
            self._tell_why_not(why_not)

    def _why_not(self, strategy: Strategy) -> str:
        training = self._training
        if not strategy.regroups:
            return (
                f"under {self.context.spec.strategy}, not every worker has a copy of the whole "
                "training state"
            )
        if why_not := strategy.bound():
            return why_not
        if training.base:
            return "another training came before this training in the same cell"
        if why_not := training.why_not():
            return why_not
        if training.source.own:
            return "each worker trains on its own data set"
        if training.source.samples is None:
            return "the data is a stream, which cannot return to an earlier sample"
        try:
            format_of(self.context).packed([strategy.handed_over(), training.place()])
        except FitError as error:
            return f"the training's state cannot be sent to another worker ({error.seen})"
        return ""

    def _break_out(self, strategy: Strategy) -> None:
        strategy.break_off()
        self._framework.break_collectives(store=True)

    def _end(self) -> None:
        self._membership.end()
        self._membership.break_out = lambda: None
        if self._membership.generation or self.context.spec.joins:
            self._framework.destroy_group()

    def can_follow(self, error: Exception) -> bool:
        """Return whether an error is only a consequence of another worker's end."""
        felt = self._membership.trains and bool(self._framework.was_cut(error))
        if felt:
            error.__traceback__ = None  # its frames hold the wrappers that must be freed
        return felt

    # -- operations that may have to be repeated ---------------------------------------------------

    def evaluate(self, strategy: Strategy, source: Any) -> dict[str, float] | None:
        """Evaluate; repeat if the workers change meanwhile. None: another worker has evaluated."""
        while True:
            try:
                return strategy.evaluate(source.epoch(0, *self._training.part(strategy.eval_shard)))
            except Exception as error:  # noqa: PERF203 - it ends with the first that succeeds
                if not self.can_follow(error):
                    raise
                if self.go_on():
                    self._training.catch_up()
                    return None
                if self._training.evaluated == self.context.step:
                    return None

    def save(self, save: Callable[[], object]) -> bool:
        """Save, and return the result; give up this save if a worker is lost meanwhile."""
        try:
            return bool(save())
        except Exception as error:
            if not self.can_follow(error):
                raise
            self._passed_over = self.context.trained
            if self.go_on():
                self._training.catch_up()
            return True

    def finish(self, strategy: Strategy) -> None:
        """Do the work after the last step; from then on no worker waits for this worker."""
        while True:
            try:
                strategy.finish()
                break
            except Exception as error:
                if not self.can_follow(error):
                    raise
                self.go_on()
        self._membership.end()

    # -- with others -------------------------------------------------------------------------------

    def go_on(self, completed: Callable[[], object] = lambda: None) -> bool:
        """Wait for the next set of workers, and join it.

        If another worker ends meanwhile, the resulting error here leads to the next generation.

        Args:
            ~completed: Called if other workers completed the step that failed here. The call comes
            before the kernel is told that this worker is behind all of them.

        Returns:
            ~Whether this worker has joined the others, as a new worker or after they had continued
            alone.
        """
        membership, began, before = self._membership, clock(), self.context.trained
        strategy: Strategy = self.context.strategy
        while True:
            membership.waiting()
            if not strategy.apart:
                strategy.leave_group()
                self.context.trained += strategy.completes_alone()
                self._framework.destroy_group()
            try:
                message = membership.await_next()
            except RunStopped:
                self._leave()
                raise
            try:
                (self._pass if strategy.apart else self._meet)(strategy, message)
                break
            except Exception as error:
                if not self.can_follow(error):
                    raise
        came = self._comes(message)
        if self.context.trained != before and not came:
            completed()
        self._owed = events.Regrouped(
            rank=membership.place, generation=message.generation, step=self._together,
            seconds=clock() - began,
        )  # fmt: skip
        if not (membership.waits and self._training.arrives_later):
            self.arrived()
        return came

    def arrived(self) -> None:
        """Join; report this to the kernel when this worker has reached the others."""
        self._membership.waits = self._membership.away = False
        self.tell_if_together()

    def tell_if_together(self) -> None:
        """Tell the kernel that this worker continues with the others, when it has reached them.

        From then on, the kernel counts rows of earlier steps as complete.
        """
        self.lags = self.context.trained < self._together
        if self._owed is not None and not self.lags:
            self.context.emit(self._owed)
            self._owed = None

    def _leave(self) -> None:
        """Leave no weights and no checkpoint: the other workers keep the trained state."""
        self.context.weights = self.context.copies = None
        self._training.checkpoints.give_up()

    def _meet(self, strategy: Strategy, message: Regroup) -> None:
        context, training, membership = self.context, self._training, self._membership
        spec = spec_of(context.spec, message, membership.place)
        self._framework.ensure_group(spec)
        context.spec = spec
        store = self._framework.open_store(spec)
        self._advance(strategy.settle_steps(message.generation))
        comes = self._comes(message)
        about = self._compare(store, spec, strategy, comes=comes)
        self._complete(strategy, about, spec.rank)
        at = [tuple(one["at"]) for one in about]
        if max(at) == NOWHERE:
            raise RunError(
                "The trained state is lost: all workers that had it have died.", code="WB-RUN-139"
            )
        best = max(at)
        self._together, self.lags = best[0], False
        behind = [rank for rank, one in enumerate(at) if _lacks(strategy, one, best)]
        donors = donors_of(at, [one["part"] for one in about], behind)
        if spec.rank not in behind:
            strategy.undo()
        random = None
        if receivers := [rank for rank, donor in donors.items() if donor == spec.rank]:
            self._hand_over(store, strategy, receivers, f"{handover.WHERE}/{spec.rank}")
        elif spec.rank in behind:
            donor = donors[spec.rank]
            lacks_all = about[donor]["part"] == strategy.part
            if not lacks_all and at[spec.rank][0] != best[0]:
                self._membership.quit()  # as if it had died: no worker has its part in this state
            random = self._take_over(
                store, strategy, f"{handover.WHERE}/{donor}", comes=comes, only_place=not lacks_all
            )
        if not (strategy.split and message.past):  # else all have trained to the end
            strategy.enter_group(about[at.index(best)]["agreed"])
        self._lead(strategy, message)
        training.checkpoints.regrouped(max(int(one["saved"]) for one in about))
        training.deal()
        if spec.rank == 0:
            training.tell_evaluation()
        if random is not None and comes:
            format_of(context).set_random_state(random, spec.device)

    def _comes(self, message: Regroup) -> bool:
        """Return whether this worker has no state of its own that counts in a generation."""
        membership = self._membership
        return membership.waits or (membership.away and membership.place in message.fresh)

    def _complete(self, strategy: Strategy, about: list[dict[str, Any]], rank: int) -> None:
        """Count a step for workers that had everything for it, if another worker completed it."""
        furthest = max(about, key=lambda one: one["at"])
        for each, one in enumerate(about):
            if one["ready"] and one["at"][0] == furthest["at"][0] - 1:
                one["at"] = [furthest["at"][0], *one["at"][1:]]
                if each == rank:
                    strategy.complete_step(furthest["agreed"])
                    self._advance(1)

    def _lead(self, strategy: Strategy, message: Regroup) -> None:
        """Have one worker leave the weights. If workers hold parts, each leaves its part."""
        if self.context.entry.whole:
            lead = min((*message.places, *message.past)) == self._membership.place
            self.context.weights = strategy.weights if lead else None
        else:
            self.context.weights = strategy.weights

    def _advance(self, steps: int) -> None:
        """Count steps that are complete, although this worker did not know it."""
        if not self._membership.waits or self._membership.apart:
            self.context.trained += steps
            self.context.step = self.context.trained - 1 if steps else self.context.step

    def _pass(self, strategy: Strategy, message: Regroup) -> None:
        """Read the list of members, without a meeting; hand over the state to new workers."""
        context, training, membership = self.context, self._training, self._membership
        before = context.spec.rank
        context.spec = spec = spec_of(context.spec, message, membership.place)
        random: Any = None
        fresh = [message.places.index(place) for place in message.fresh]
        others = [rank for rank in range(spec.world_size) if rank not in fresh]
        if spec.rank in fresh:
            store = self._framework.open_store(spec)
            random = self._take_over(store, strategy, comes=membership.waits, keep=membership.waits)
            if membership.waits:
                self._advance(strategy.settle_steps(message.generation))
                training.evaluated = context.trained - 1
        elif fresh and spec.rank == others[0]:
            self._hand_over(self._framework.open_store(spec), strategy, fresh)
        strategy.enter_group({})
        self._lead(strategy, message)
        if spec.rank != before or membership.waits:  # another worker may save now
            training.checkpoints.regrouped(max(training.checkpoints.saved, context.trained))
        if membership.waits:
            training.deal()
            format_of(context).set_random_state(random, spec.device)
        self._together, self.lags = context.trained, False

    def _compare(
        self, store: Any, spec: RunSpec, strategy: Strategy, *, comes: bool
    ) -> list[dict[str, Any]]:
        """Return the progress of each member, and what it knows of the agreed values."""
        training = self._training
        at = self.context.trained, training.evaluated, strategy.met
        at = NOWHERE if comes else at
        saved = training.checkpoints.saved
        if not strategy.copies:
            saved = max(saved, self._passed_over)
        mine = {
            "at": at, "agreed": strategy.agreed(), "saved": saved,
            "part": strategy.part, "ready": strategy.ready and not comes,
        }  # fmt: skip
        store.set(f"at/{spec.rank}", json.dumps(mine))
        return [json.loads(store.get(f"at/{rank}")) for rank in range(spec.world_size)]

    def _hand_over(
        self, store: Any, strategy: Strategy, behind: list[int], where: str = handover.WHERE
    ) -> None:
        spec, membership = self.context.spec, self._membership
        key = bytes.fromhex(spec.key)
        donor = handover.Donor(store, key, address.address_in(spec), spec.ports, where)
        try:
            state = {
                "strategy": strategy.handed_over(),
                "random": format_of(self.context).random_state(spec.device),
                "training": self._training.place(),
            }
            about, parts = format_of(self.context).packed(state)
            donor.give(behind, about, parts, lambda: membership.stale)
        finally:
            donor.close()

    def _take_over(
        self,
        store: Any,
        strategy: Strategy,
        where: str = handover.WHERE,
        *,
        comes: bool,
        keep: bool = True,
        only_place: bool = False,
    ) -> Any:
        """Take the donor's state and progress; return its random states.

        Args:
            ~comes: Whether this worker has no state of its own.
            ~keep: Whether to keep anything of the donor's state.
            ~only_place: Whether to keep only the progress of the training, because the rest belongs
            to another part.
        """
        spec = self.context.spec
        made: list[Any] = []

        def room_for(about: Mapping[str, Any]) -> Any:
            parts, unpacked = format_of(self.context).room_for(about)
            made.append(unpacked)
            return parts

        handover.take(store, bytes.fromhex(spec.key), spec.rank, room_for, where)
        state = made[0]()
        if keep:
            place, completed = dict(state["training"]), False
            if not only_place:
                completed = strategy.take_over(state["strategy"], comes=comes)
            if not (comes or strategy.copies):
                place["trained"] = self.context.trained + completed
            self._training.take_place(place)
        return state["random"]


Standing = tuple[int, ...]
"""The progress of a worker: steps completed, step evaluated last, meetings."""


def _lacks(strategy: Strategy, one: Standing, best: Standing) -> bool:
    """Return whether a worker must take over state; it can take steps of its own by itself."""
    return one != best if strategy.copies else one[1:] != best[1:]


def donors_of(
    at: Sequence[Standing], parts: Sequence[int], behind: Sequence[int]
) -> dict[int, int]:
    """Return, for each worker that is behind, its donor: a furthest worker with the same part.

    If no furthest worker has the same part, the donor is a worker with another part: the progress
    is the same.

    Args:
        at: The progress of each rank.
        parts: The part of each rank.
    """
    best, found = max(at), dict[int, int]()
    furthest = [rank for rank, one in enumerate(at) if one == best]
    for part in sorted({parts[rank] for rank in behind}):
        receivers = [rank for rank in behind if parts[rank] == part]
        alike = [rank for rank in furthest if parts[rank] == part]
        donor = _nearest(alike or furthest, receivers, len(at))
        found |= dict.fromkeys(receivers, donor)
    return found


def _nearest(ranks: list[int], behind: list[int], workers: int) -> int:
    """Return which of these ranks is the nearest, on a ring, to the first rank that is behind."""
    if not behind:
        return ranks[0]
    apart = {rank: abs(rank - behind[0]) for rank in ranks}
    return min(ranks, key=lambda rank: min(apart[rank], workers - apart[rank]))


def spec_of(spec: RunSpec, message: Regroup, place: int) -> RunSpec:
    """Return a worker's `RunSpec` among the members of a generation."""
    return replace(
        spec,
        rank=message.places.index(place),
        world_size=len(message.places),
        ranks=message.ranks,
        hosts=message.hosts,
        prefix=message.prefix,
        group="",
        original_rank=spec.row_rank,
    )
