"""The step loop behind `wb.fit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from ...errors import FitError, RunStopped
from ...shared import events
from ..checkpoints.checkpoints import checkpoints_of
from ..context import RunContext, current
from . import fit_arguments
from .notes import announce
from .regrouping import Regrouping

if TYPE_CHECKING:
    from ..contract import Job, Share, Strategy
    from ..telemetry.recorder import StepResult
    from .shares import Workers

clock = time.perf_counter


@dataclass
class FitResult:
    """What `wb.fit` returns; the run's history is in the notebook.

    Attributes:
        model: The plain module with the final weights.
        steps: Number of optimizer steps done.
        loss: This worker's mean loss in the last step.
        evals: One mapping per evaluation: step, epoch, loss, metrics.
        stopped: Whether Stop ended the training.
    """

    model: Any
    steps: int = 0
    loss: float = float("nan")
    evals: list[dict[str, float]] = field(default_factory=list)
    stopped: bool = False

    def __repr__(self) -> str:
        words = [f"{self.steps} steps", f"loss {self.loss:.4g}"]
        if self.evals:
            last = {k: v for k, v in self.evals[-1].items() if k not in ("step", "epoch")}
            words += [f"eval {name} {value:.4g}" for name, value in last.items()]
        return f"<fit: {', '.join(words)}{', stopped' if self.stopped else ''}>"

    def _ipython_display_(self) -> None:
        """Show nothing if this is the last value of a training cell: the dashboard shows it all."""
        if current() is None:
            print(repr(self))  # noqa: T201 - the text that a cell shows is printed


class Training:
    """The step loop of one `wb.fit`; each step runs as little Python as possible."""

    arrives_later = False

    def __init__(
        self,
        context: RunContext,
        job: Job,
        sources: tuple[Any, Any],
        hooks: fit_arguments.Callbacks,
        eval_every: int | None,
    ) -> None:
        self.context, self.job, self.hooks, self.eval_every = context, job, hooks, eval_every
        self.source, self.eval_source = sources
        self.result = FitResult(job.model)
        self.base = context.trained  # steps of an earlier fit in the same cell
        self.logs = Logs()
        self.evaluated = -1
        self._evaluation_s = 0.0
        self.weighing_s = self.saving_s = self.aside_s = 0.0
        self.checkpoints = checkpoints_of(context)
        self.first = self.base  # the first step of this fit
        self.regrouping = Regrouping(self)
        self._dealt: Iterator[Share] = iter(())
        self._deal: Callable[[int], Iterator[Share]] = lambda first: iter(())
        self._portions: tuple[int, ...] = ()  # samples of each worker's share; empty: equal shares

    def run(self, epochs: int | None) -> FitResult:
        """Train to the end, or until Stop."""
        context, spec = self.context, self.context.spec
        strategy: Strategy = fit_arguments.load_strategy(context)
        context.strategy = strategy
        strategy.seed = self.job.seed
        source = strategy.shard_source(self.source)
        strategy.prepare(self.job)
        if context.entry.data_parallel:  # the memory that the model does not need
            for each in (source, self.eval_source):
                if hasattr(each, "stay_on"):
                    each.stay_on(spec.device)
        self._deal = lambda first: self._shares(strategy, source, first)
        self._dealt = self._begin(strategy)
        sheds = context.entry.sheds and context.sync
        context.gate.deals = sheds and source.samples is not None and not source.own
        # Replicas are equal: rank 0 leaves the weights for all. A worker that has not joined has
        # none.
        leaves = spec.rank == 0 or not context.entry.whole
        if leaves and not context.membership.waits:
            context.weights = strategy.weights
        self.regrouping.begin(strategy)
        announce(
            context,
            fit_arguments.support(spec.framework).parameter_count(self.job.model),
            batch_size=self.job.batch_size,
            total_steps=self.base + self.job.total_steps,
            epochs=epochs,
            epoch_samples=(self.source.steps_per_epoch or 0) * self.job.batch_size or None,
        )
        began, paused_s, eval_s = clock(), context.gate.paused_s, context.eval_s
        if strategy.owns_loop:
            last = strategy.run_loop(self)
        else:
            last = self._steps(strategy)
            context.settle()  # the device's remaining computation is training too
            idle_s = context.gate.paused_s - paused_s + context.eval_s - eval_s
            idle_s += self.weighing_s + self.saving_s + self.aside_s
            context.train_s += clock() - began - idle_s
        if context.gate.leaves_alone:
            raise RunStopped  # the rest of the cell would wait for the others
        result = self.result
        result.steps = context.trained - self.base
        result.loss = _loss(last)
        if self.eval_source is not None and not result.stopped and self.evaluated != context.step:
            self.evaluate(strategy, (self.job.total_steps - 1) // self.job.steps_per_epoch)
        if context.sync:
            self.regrouping.save(self.checkpoints.save)
        context.gate.deals = False
        self.regrouping.finish(strategy)  # asynchronous workers push their last updates here
        if not strategy.owns_loop:
            self.checkpoints.save()
        if context.gate.leaving:
            raise RunStopped  # only workers that continue run the rest of the cell
        for hook in self.hooks.train_end:
            hook({**self.logs, "loss": result.loss})
        return result

    def close(self) -> None:
        """End the processes that load the data.

        The garbage collector would wait 5 s for each: when it ends a `DataLoader`'s iterator, the
        message that tells these processes to end is not sent any more.
        """
        self._dealt = iter(())
        for source in (self.source, self.eval_source):
            if source is not None:
                source.close()

    def deal(self, portions: tuple[int, ...] = ()) -> None:
        """Continue in the data at the current step, with these shares (by default equal shares)."""
        self._portions = portions
        self._dealt = self._deal(self.context.trained - self.base)

    def why_not(self) -> str:
        """Return why it cannot continue with other workers; empty, because it always can."""
        return ""

    def place(self) -> dict[str, Any]:
        """Return the progress of this training, for a worker that takes over its state."""
        logs = {name: value for name, value in self.logs.items() if name.startswith("eval_")}
        return {
            "trained": self.context.trained,
            "evaluated": self.evaluated,
            "evals": self.result.evals,
            "logs": logs,
        }

    def take_place(self, place: Mapping[str, Any]) -> None:
        """Set the progress to the progress of another worker."""
        self.context.trained, self.evaluated = place["trained"], place["evaluated"]
        self.context.step = self.context.trained - 1
        self.result.evals[:] = place["evals"]
        self.logs.update(place["logs"])

    def catch_up(self) -> None:
        """Evaluate with the others if they will evaluate now, after the latest step."""
        done = self.context.trained - self.base
        every = self.eval_every or self.job.steps_per_epoch
        pending = self.evaluated != self.context.trained - 1
        if self.eval_source is not None and done and done % every == 0 and pending:
            self.evaluate(self.context.strategy, (done - 1) // self.job.steps_per_epoch)

    def _steps(self, strategy: Strategy) -> StepResult | None:
        context = self.context
        gate, faults, membership = context.gate, context.faults, context.membership
        per_epoch = self.job.steps_per_epoch
        after = self.hooks.step_end or self.eval_source is not None or self.hooks.epoch_end
        left = self.base + self.job.total_steps - self.first
        remembered = self.first + min(2, left)  # optimizers have allocated their state by then
        result: StepResult | None = None
        start, paused_s = clock(), gate.paused_s
        end_step = self.base + self.job.total_steps
        while (step := context.trained) < end_step:
            if membership.stale or membership.waits:
                self.regrouping.go_on()
                self.catch_up()
                start, paused_s = clock(), gate.paused_s
                continue
            if not gate.enter(step):
                self.result.stopped = True
                break
            if gate.paused_s != paused_s:  # a pause belongs to no step
                start, paused_s = clock(), gate.paused_s
            if gate.dealt and (portions := gate.take_portions()):
                self.deal(portions)
            faults.before_step(step)
            context.step = step
            asked = clock()
            share = next(self._dealt)
            if faults.active and not strategy.injects_data_delay:
                faults.spend("data")
            fed = clock()
            context.fetch_s = fed - asked
            try:
                result = strategy.step(share)
            except Exception as error:
                end = clock()
                if not self.regrouping.can_follow(error):
                    raise
                result = replace(strategy.contributed(share), compute_s=end - fed)
                recorded = partial(self._record, step, result, start, end, fed - asked)
                came = self.regrouping.go_on(recorded)
                if came:
                    self.catch_up()
                if came or context.trained == step:  # no worker has completed it: all repeat it
                    start, paused_s = clock(), gate.paused_s
                    continue
            else:
                end = clock()
                start += result.set_up_s + result.aside_s
                self.aside_s += result.aside_s
                self._record(step, result, start, end, fed - asked)
                context.trained += 1
                if self.regrouping.lags:
                    self.regrouping.tell_if_together()
            start = end
            done = step - self.base + 1
            if after:
                start = self._after_step(strategy, done, end, result)
            if context.trained == remembered:
                start = self._weigh(strategy)
            if done % per_epoch == 0:
                self.end_epoch(done // per_epoch - 1)
            if self.checkpoints.every:
                start = self._checkpoint(start)
        return result

    def _record(
        self, step: int, result: StepResult, start_s: float, end_s: float, data_wait_s: float
    ) -> None:
        """Write a row for each replica that took part in the step."""
        add, place = self.context.recorder.add_step, self.context.membership.place
        for rank, one in enumerate(result.replicas or (result,), place):
            add(step, one, start_s, end_s, data_wait_s=data_wait_s, rank=rank)

    def _begin(self, strategy: Strategy) -> Iterator[Share]:
        """Continue from a checkpoint of this training, if there is one; return the shares."""
        job = self.job
        batches = {
            "base": self.base,
            "batch_size": job.batch_size,
            "per_epoch": self.source.steps_per_epoch,  # None: a stream does not know it
        }
        about = self.checkpoints.enter(strategy, lambda: batches)
        if about is None:
            return self._deal(0)
        for name in ("batch_size", "per_epoch"):
            if about[name] != batches[name]:
                raise FitError(
                    "The checkpoint was saved with other data or another batch size. So this run "
                    "cannot find the batch with which the training must continue.",
                    seen=f"{name.replace('per_epoch', 'steps per epoch')}: {batches[name]}",
                    allowed=f"{name.replace('per_epoch', 'steps per epoch')}: {about[name]}",
                    next_step="continue with the data and batch size of the checkpoint",
                    code="WB-FIT-067",
                )
        self.first = int(about["step"])
        shares = self._deal(self.first - self.base)
        self.checkpoints.restore()
        self.context.trained = self.first
        self.context.step = self.evaluated = self.first - 1
        self.checkpoints.tell(self.base + job.total_steps)
        return shares

    def part(self, shard: tuple[int, int]) -> tuple[int, Workers]:
        """Return this worker's share, and the number of shares or the weight of each share."""
        rank, workers = shard
        return (rank, self._portions) if len(self._portions) == workers else shard

    def _shares(self, strategy: Strategy, source: Any, first: int) -> Iterator[Share]:
        if strategy.owns_loop:  # such a strategy divides the data itself
            return iter(())
        dealt: list[Iterator[Share]] = []
        for shard, steps in strategy.shares(first):
            dealt.append(islice(source.shares(*self.part(shard), first), steps))
            first += steps or 0
        return chain.from_iterable(dealt)

    def _after_step(self, strategy: Strategy, done: int, end_s: float, result: StepResult) -> float:
        """Call hooks and evaluate; return when the next step begins."""
        if self.hooks.step_end or self.hooks.epoch_end:
            self.logs.take(result)
            for hook in self.hooks.step_end:
                hook(self.context.step, self.logs)
        every = self.eval_every or self.job.steps_per_epoch
        if self.eval_source is None or done % every:
            return end_s
        self.evaluate(strategy, (done - 1) // self.job.steps_per_epoch)
        return clock()

    def _checkpoint(self, start_s: float) -> float:
        """Save if it is time; return when the next step begins."""
        began = clock()
        if not self.regrouping.save(self.checkpoints.step_done):
            return start_s
        end = clock()
        self.saving_s += end - began
        return end

    def _weigh(self, strategy: Strategy) -> float:
        """Log the memory that this worker uses between steps; return when the next step begins."""
        began = clock()
        self.context.log_memory(strategy.memory_bytes())
        end = clock()
        self.weighing_s = end - began
        return end

    def end_epoch(self, epoch: int) -> None:
        """Tell the kernel and the hooks that a pass over the data has ended."""
        context = self.context
        context.emit(events.EpochBegan(rank=context.spec.rank, epoch=epoch, step=context.step))
        for hook in self.hooks.epoch_end:
            hook(epoch, self.logs)

    def evaluate(self, strategy: Strategy, epoch: int) -> None:
        """Evaluate if there is evaluation data; the time is not part of a step."""
        context = self.context
        context.settle()  # steps that the device has not finished are not part of it
        began = clock()
        found = self.regrouping.evaluate(strategy, self.eval_source)
        if found is None:  # another worker evaluated; this worker took over its values
            return
        values = found
        context.settle()
        seconds = clock() - began
        context.eval_s += seconds
        self.evaluated = context.step
        if not values:
            return
        self.result.evals.append({"step": context.step, "epoch": epoch, **values})
        self.logs.update({f"eval_{name}": value for name, value in values.items()})
        if context.spec.rank == 0:  # equal on all ranks
            self._evaluation_s = seconds
            self.tell_evaluation()

    def tell_evaluation(self) -> None:
        """Tell the kernel the latest evaluation; it counts once, even if several workers do."""
        if self.result.evals:
            values = dict(self.result.evals[-1])
            step, epoch = int(values.pop("step")), int(values.pop("epoch"))
            seconds = self._evaluation_s
            self.context.emit(
                events.Evaluated(step=step, epoch=epoch, values=values, seconds=seconds)
            )


class Logs(dict[str, Any]):
    """The dictionary of numbers that callbacks receive.

    The loss may still be on the device. It is fetched only when a callback reads it. If no callback
    reads it, nothing waits, and the host stays ahead of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._result: StepResult | None = None

    def take(self, result: StepResult) -> None:
        """Keep the loss of a step."""
        self["loss"] = result.loss
        self._result = result if result.deferred is not None else None

    def _fetch(self) -> None:
        if self._result is not None:
            result, self._result = self._result, None
            super().__setitem__("loss", _loss(result))

    def __getitem__(self, name: str) -> Any:
        if name == "loss":
            self._fetch()
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "loss":
            self._result = None
        super().__setitem__(name, value)

    def __iter__(self) -> Iterator[str]:
        # Same as the inherited method, but needed: else `dict(logs)` and `{**logs}` copy the
        # memory.
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a number, or `default`."""
        if name == "loss":
            self._fetch()
        return super().get(name, default)

    def items(self) -> Any:
        """Return the names and numbers."""
        self._fetch()
        return super().items()

    def values(self) -> Any:
        """Return the numbers."""
        self._fetch()
        return super().values()

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return dict(self.items())

    def pop(self, *given: Any) -> Any:
        """Remove a number and return it."""
        self._fetch()
        return super().pop(*given)

    def __eq__(self, other: object) -> bool:
        self._fetch()
        return super().__eq__(other)

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


def _loss(result: StepResult | None) -> float:
    """Return the worker's loss of a step; wait for the device if the loss is still there."""
    if result is None:
        return float("nan")
    if result.deferred is None:
        return result.loss
    return result.deferred.values().get("local_loss", float("nan"))
