"""`wb.fit`: train a model under the run's strategy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import FitError
from ..strategies.base import Job, Share, StepResult, Strategy
from . import settings
from .context import RunContext, require

clock = time.perf_counter


@dataclass
class FitResult:
    """What `wb.fit` returns; the run's history is in the notebook.

    Attributes:
        model: The plain module with the final weights.
        steps: Optimizer steps done.
        loss: This worker's mean loss in the last step.
        evals: One mapping per evaluation: step, epoch, loss, metrics.
        stopped: Whether Stop ended it.
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


def fit(
    model: Any = None,
    data: Any = None,
    *,
    loss: Any = None,
    step_fn: Any = None,
    optimizer: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    metrics: Any = None,
    scheduler: Any = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    precision: str | None = None,
    compile: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    callbacks: Any = (),
) -> FitResult:
    """Train `model` in place, under the strategy of the cell.

    A step is one optimizer step; it consumes `batch_size` samples over all workers, accumulation
    included. `--epochs`, `--steps`, `--batch-size` and `--seed` on the line win over what is
    passed here.

    Args:
        model: A module, or a function without arguments that returns one.
        data: A Dataset, `(x, y)` arrays or tensors, or a DataLoader (its dataset, batch size,
            collate function, worker processes and order are taken). An IterableDataset is read
            whole by every worker, and needs `steps` where it has no length.
        loss: `loss(output, y)`, a mean over the batch, for batches that are pairs.
        step_fn: Instead of `loss`: `step_fn(model, batch) -> loss`, a mean over the batch.
        optimizer: A function of the parameters, or a built optimizer.
        batch_size: Global batch size.
        epochs: Passes over the data.
        steps: Number of steps, in place of `epochs`; the data cycles.
        eval_data: As `data`; evaluated at each epoch's end and after the last step.
        eval_every: Evaluate every so many steps instead.
        metrics: Names to functions of (output, y), each a mean over the batch.
        scheduler: A function of the optimizer, or a built scheduler; stepped after each
            optimizer step, not after each epoch.
        clip_norm: Largest norm of the gradient of the whole batch.
        accumulate: Micro-batches into which each worker cuts its share.
        precision: None, `"bf16"` or `"fp16"` (autocast; fp16 with loss scaling on CUDA).
        compile: Whether to compile the model.
        shuffle: Whether the order of samples is drawn anew each epoch, from `seed`.
        seed: Seed of the order; the same whatever the number of workers.
        callbacks: Functions `(step, logs)`, or objects with `on_step_end(step, logs)`,
            `on_epoch_end(epoch, logs)`, `on_train_end(logs)`. On CUDA a callback for steps makes
            each step wait for the device, since it is shown the loss.

    Returns:
        A small summary; the model itself is trained in place.

    Raises:
        RunError: There is no run: the cell lacks `%%distributed STRATEGY`.
        FitError: Something cannot be trained; raised on every rank before any collective.
    """
    context = require("wb.fit")
    context.options_read = True  # the line's overrides are honoured here
    needed = {"model": model, "data": data, "optimizer": optimizer}
    if missing := [name for name, value in needed.items() if value is None]:
        raise FitError(
            f"wb.fit was not given {' or '.join(missing)}.",
            next_step="wb.fit(model, data, loss=..., optimizer=..., batch_size=...)",
        )
    used = {
        "step_fn": step_fn, "eval_data": eval_data, "metrics": metrics, "scheduler": scheduler,
        "clip_norm": clip_norm, "accumulate": accumulate != 1, "precision": precision,
        "compile": compile, "callbacks": callbacks,
    }  # fmt: skip
    settings.check_supported(context.entry, "fit", (name for name, value in used.items() if value))
    chosen = settings.check_objective(loss, step_fn, metrics)
    settings.check_extras(clip_norm, accumulate, precision, eval_every, eval_data)
    hooks = settings.Callbacks.of(callbacks)
    counts = settings.check_counts(context, batch_size, epochs, steps, seed)
    sources = _sources(context, data, eval_data, counts, shuffle=shuffle, paired=loss is not None)
    module = _model(context, model, optimizer, scheduler)
    steps_per_epoch = sources[0].steps_per_epoch
    total_steps = counts.steps or counts.epochs * steps_per_epoch
    job = Job(
        module, loss, step_fn, optimizer, sources[0].batch_size, total_steps,
        steps_per_epoch or total_steps, scheduler, clip_norm, accumulate, precision, compile,
        counts.seed, chosen,
    )  # fmt: skip
    training = _Training(context, job, sources, hooks, eval_every)
    return training.run(counts.epochs if counts.steps is None else None)


def _model(context: RunContext, model: Any, optimizer: Any, scheduler: Any) -> Any:
    support = settings.support(context.spec.framework)
    module = support.build_module(model)
    support.check_optimizer(optimizer, module)
    support.check_scheduler(scheduler, optimizer)
    settings.warn_if_trained(context, module)
    return module


def _sources(
    context: RunContext,
    data: Any,
    eval_data: Any,
    counts: settings.Counts,
    *,
    shuffle: bool,
    paired: bool,
) -> tuple[Any, Any]:
    """Return the sources of training and evaluation data (None without), checked."""
    make = settings.data_module(context.spec.framework).make_source
    source = make(data, counts.batch_size, seed=counts.seed, shuffle=shuffle)
    settings.check_batch(source.batch_size, context)
    if source.steps_per_epoch is None and counts.steps is None:
        raise FitError(
            "The data has no length, so an epoch has no end.",
            seen=type(data).__name__,
            next_step="pass steps=1000",
        )
    if source.samples is not None and source.samples % source.batch_size:
        settings.check_supported(context.entry, "fit", ["uneven_batches"])
    evaluation = None
    if eval_data is not None:
        evaluation = make(eval_data, source.batch_size, seed=counts.seed, shuffle=False)
    for each in (source, evaluation):
        sample = each.peek() if each is not None else None
        if (
            paired
            and sample is not None
            and not (isinstance(sample, (tuple, list)) and len(sample) == 2)
        ):
            raise FitError(
                "loss(output, y) needs batches that are pairs (x, y).",
                seen=f"{type(sample).__name__}"
                + (f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""),
                next_step="pass step_fn=lambda model, batch: ... instead of loss",
            )
    return source, evaluation


class _Training:
    """The step loop of one `wb.fit`; what runs in each step is kept short."""

    def __init__(
        self,
        context: RunContext,
        job: Job,
        sources: tuple[Any, Any],
        hooks: settings.Callbacks,
        eval_every: int | None,
    ) -> None:
        self.context, self.job, self.hooks, self.eval_every = context, job, hooks, eval_every
        self.source, self.eval_source = sources
        self.result = FitResult(job.model)
        self.base = context.trained  # steps of an earlier fit in the same cell
        self.logs: dict[str, float] = {}
        self.evaluated = -1

    def run(self, epochs: int | None) -> FitResult:
        """Train to the end, or until Stop."""
        context, spec = self.context, self.context.spec
        strategy: Strategy = settings.load_strategy(context)
        context.strategy = strategy
        strategy.prepare(self.job)
        if spec.rank == 0 or not context.entry.data_parallel:
            context.weights = strategy.weights  # replicas are equal: rank 0's stand for all
        self._announce(epochs)
        began, paused_s, eval_s = clock(), context.gate.paused_s, context.eval_s
        last = self._steps(strategy, self.source.shares(spec.rank, spec.world_size))
        idle_s = context.gate.paused_s - paused_s + context.eval_s - eval_s
        context.train_s += clock() - began - idle_s
        result = self.result
        result.steps = context.trained - self.base
        result.loss = _loss(last)
        if self.eval_source is not None and not result.stopped and self.evaluated != context.step:
            self._evaluate(strategy, self.job.total_steps // self.job.steps_per_epoch)
        strategy.finish()
        for hook in self.hooks.train_end:
            hook({**self.logs, "loss": result.loss})
        return result

    def _steps(self, strategy: Strategy, shares: Iterator[Share]) -> StepResult | None:
        context = self.context
        gate, faults, record = context.gate, context.faults, context.recorder.add
        per_epoch = self.job.steps_per_epoch
        after = self.hooks.step_end or self.eval_source is not None or self.hooks.epoch_end
        result: StepResult | None = None
        start, paused_s = clock(), gate.paused_s
        for step in range(self.base, self.base + self.job.total_steps):
            if not gate.enter(step):
                self.result.stopped = True
                break
            if gate.paused_s != paused_s:  # a pause belongs to no step
                start, paused_s = clock(), gate.paused_s
            faults.before_step(step)
            context.step = step
            asked = clock()
            share = next(shares)
            if faults.active:
                faults.spend("data")
            fed = clock()
            context.fetch_s = fed - asked
            result = strategy.step(share)
            end = clock()
            record(
                step, result.samples, start, end, data_wait_s=fed - asked,
                compute_s=result.compute_s, loss=result.loss, ready_s=result.ready_s,
                exposed_s=result.exposed_s, wait_s=result.wait_s, sent_bytes=result.sent_bytes,
                staleness=result.staleness, bubble_s=result.bubble_s, deferred=result.deferred,
            )  # fmt: skip
            context.trained += 1
            start = end
            done = step - self.base + 1
            if after:
                start = self._after_step(strategy, done, end, result)
            if done % per_epoch == 0:
                self._end_epoch(done // per_epoch - 1)
        return result

    def _after_step(self, strategy: Strategy, done: int, end_s: float, result: StepResult) -> float:
        """Call hooks and evaluate; return when the next step begins."""
        if self.hooks.step_end or self.hooks.epoch_end:
            self.logs["loss"] = _loss(result)
            for hook in self.hooks.step_end:
                hook(self.context.step, self.logs)
        every = self.eval_every or self.job.steps_per_epoch
        if self.eval_source is None or done % every:
            return end_s
        self._evaluate(strategy, (done - 1) // self.job.steps_per_epoch)
        return clock()

    def _end_epoch(self, epoch: int) -> None:
        context = self.context
        context.emit("epoch", rank=context.spec.rank, epoch=epoch, step=context.step)
        for hook in self.hooks.epoch_end:
            hook(epoch, self.logs)

    def _evaluate(self, strategy: Strategy, epoch: int) -> None:
        context, spec = self.context, self.context.spec
        began = clock()
        values = strategy.evaluate(self.eval_source.epoch(0, spec.rank, spec.world_size))
        seconds = clock() - began
        context.eval_s += seconds
        self.evaluated = context.step
        self.result.evals.append({"step": context.step, "epoch": epoch, **values})
        self.logs.update({f"eval_{name}": value for name, value in values.items()})
        if spec.rank == 0:  # equal on all ranks
            context.emit("eval", step=context.step, epoch=epoch, values=values, seconds=seconds)

    def _announce(self, epochs: int | None) -> None:
        context, spec, job = self.context, self.context.spec, self.job
        support = settings.support(spec.framework)
        workers = spec.world_size if context.entry.data_parallel else 1
        context.emit(
            "run_started",
            rank=spec.rank,
            t_s=clock(),
            total_steps=self.base + job.total_steps,
            epochs=epochs,
            batch_size=job.batch_size,
            local_batch=-(-job.batch_size // workers),
            parameters=support.parameter_count(job.model),
            device=support.device_label(spec.device),
            threads=spec.threads,
        )


def _loss(result: StepResult | None) -> float:
    """Return the worker's loss of a step, waiting for the device where it is still there."""
    if result is None:
        return float("nan")
    if result.deferred is None:
        return result.loss
    return result.deferred.values().get("local_loss", float("nan"))
