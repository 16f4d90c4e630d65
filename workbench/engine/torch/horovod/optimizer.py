"""`DistributedOptimizer`: an optimizer that averages its gradients before it steps."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ....errors import FitError, RunError
from ...context import RunContext, current
from .gradients import Gradients
from .messages import Average, Compression, Sum, begin, op_of


class Distributed:
    """The additional methods of an optimizer's class: it averages before it steps."""

    param_groups: list[dict[str, Any]]
    gradients: Gradients

    def synchronize(self) -> None:
        """Wait until all gradients are averaged over all ranks; then they may be changed."""
        self.gradients.synchronize(self.param_groups)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step without averaging: `synchronize` has done it."""
        self.gradients.together = False
        try:
            yield
        finally:
            self.gradients.together = True

    def step(self, closure: Any = None) -> Any:
        """Average, then step; a closure's gradients are averaged each time it is called."""
        above: Any = super()
        gradients = self.gradients
        if not gradients.together:
            gradients.is_done = False
            return above.step() if closure is None else above.step(closure)
        if closure is not None:

            def averaged() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            result = above.step(averaged)
        else:
            if not gradients.is_done or gradients.is_under_way:
                self.synchronize()
            result = above.step()
        gradients.is_done = False
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks see the step inside alone

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients.

        Raises:
            FitError: They are being sent to other ranks.
        """
        self.gradients.forget_failed()
        if self.gradients.is_under_way:
            raise FitError(
                "zero_grad() between backward() and step() would delete gradients while they are "
                "averaged.",
                next_step="call optimizer.zero_grad() before backward(), or after step()",
                code="WB-FIT-175",
            )
        above: Any = super()
        above.zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set again how many backward passes a step has."""
        self.gradients.passes = passes


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """Return an optimizer like this one, over the same parameters, that averages gradients first.

    `num_groups` and `groups` change nothing: buckets always have one size.

    Raises:
        FitError: An argument is not supported, or something else averages already.
    """
    begin(process_set)
    if isinstance(optimizer, Distributed):
        raise FitError(
            "This optimizer is already a DistributedOptimizer.",
            next_step="build the optimizer in this cell, and call hvd.DistributedOptimizer once",
            code="WB-FIT-176",
        )
    kind = op_of(op)
    if kind not in (Average, Sum) or backward_passes_per_step < 1 or (
        gradient_predivide_factor != 1.0 and kind is not Average
    ):  # fmt: skip
        raise FitError(
            "hvd.DistributedOptimizer does not support these arguments.",
            seen=f"op={kind.name}, backward_passes_per_step={backward_passes_per_step}, "
            f"gradient_predivide_factor={gradient_predivide_factor:g}",
            allowed="op=hvd.Average or op=hvd.Sum; backward_passes_per_step of at least 1; "
            "gradient_predivide_factor only with hvd.Average",
            code="WB-FIT-177",
        )
    _check_names(optimizer, named_parameters)
    context = current()
    if context is not None:
        _check_run(context)
    whole: Any = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    made: Any = whole.__new__(whole)
    # The same state and groups: schedulers that hold the one that was given steer both.
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    made.gradients = Gradients(
        optimizer.param_groups, compression, backward_passes_per_step, kind,
        gradient_predivide_factor, sparse_as_dense,
    )  # fmt: skip
    if context is not None:
        _record(context, made)
    return made


def _check_names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> None:
    if named is None:
        return
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise FitError(
            "named_parameters must be pairs of a name and a parameter.",
            allowed="[(name, parameter), ...]",
            next_step="pass named_parameters=model.named_parameters()",
            code="WB-FIT-178",
        )
    names, known = [name for name, _ in pairs], {id(p) for _, p in pairs}
    twice = sorted({name for name in names if names.count(name) > 1})
    unnamed = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if twice or unnamed:
        raise FitError(
            "named_parameters must give each parameter of the optimizer its own name.",
            seen=f"names given twice: {', '.join(twice)}"
            if twice
            else f"parameters without a name: {unnamed}",
            next_step="pass named_parameters=model.named_parameters(), or remove the argument",
            code="WB-FIT-179",
        )


def _check_run(context: RunContext) -> None:
    if context.strategy is not None:
        raise FitError(
            "Workbench already averages this cell's gradients, so hvd.DistributedOptimizer cannot "
            "average them too.",
            seen=f"hvd.DistributedOptimizer after {context.taken_over or 'wb.fit'}",
            allowed="hvd.DistributedOptimizer, or wb.prepare, or wb.fit: only one of them",
            next_step="remove hvd.DistributedOptimizer, or remove wb.prepare and wb.fit",
            code="WB-FIT-180",
        )
    if context.entry.name not in ("mirrored", "one_device"):
        raise FitError(
            "Code written for Horovod trains one copy of the model per worker, so it cannot use "
            "this strategy.",
            seen=f"strategy {context.entry.name}",
            allowed="mirrored; or one_device, with one worker",
            next_step="use %%distributed mirrored",
            code="WB-FIT-181",
        )


def _record(context: RunContext, made: torch.optim.Optimizer) -> None:
    """Have the run record the loop as it is, unless `wb.watch` does."""
    if context.taken_over:
        return
    scripts = importlib.import_module("workbench.strategies.torch.parts.scripts")
    try:
        end = scripts.watch_scripts(context, made)
    except RunError:  # this process is a script, which is recorded already
        return

    def close() -> None:
        """End it where it stands: what came later has been closed by now."""
        others = context.closers[:]
        context.closers.clear()
        end()
        context.closers[:] = others

    context.closers.append(close)
