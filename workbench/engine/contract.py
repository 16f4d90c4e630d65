"""The methods of every strategy, in any framework.

A strategy is one file that reads like a page of a textbook: the algorithm, its source, a small
message diagram in the module's docstring, and a class that derives from `Strategy`. It receives
everything it needs (`context`), and closes in `close` everything it opens.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import FitError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .context import RunContext
    from .telemetry.recorder import StepResult as StepResult

NAN = float("nan")


@dataclass
class Job:
    """The checked arguments of `wb.fit`; the same on every rank.

    Attributes:
        model: A module, or the result of the function that returns one.
        loss: `loss(output, y)`, a mean over the batch; None if `step_fn` is given.
        step_fn: `step_fn(model, batch) -> loss`, a mean over the batch.
        optimizer: A function of the parameters, or a built optimizer.
        batch_size: Global batch: the samples of one optimizer step over all workers.
        accumulate: Microbatches per worker and step; the global batch includes them.
        precision: None, `bf16` or `fp16`.
        build: Builds the real model if `model` has no memory (device `meta`), for strategies whose
            workers hold a part of it.
    """

    model: Any
    loss: Any
    step_fn: Any
    optimizer: Any
    batch_size: int
    total_steps: int
    steps_per_epoch: int
    scheduler: Any = None
    clip_norm: float | None = None
    accumulate: int = 1
    precision: str | None = None
    compile: bool = False
    seed: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    build: Any = None


@dataclass
class Share:
    """This worker's part of one global batch.

    Attributes:
        data: The worker's samples, already collated (framework tensors on the CPU), ready for the
            model; never empty: a worker without a sample holds one sample, with `samples` 0.
        samples: How many of these samples count.
        global_samples: Samples of the whole batch over all workers (smaller at the end of an
            epoch). Gradients are weighted by `samples / global_samples`.
    """

    data: Any
    samples: int
    global_samples: int
    step: int
    epoch: int


class WeightsTooLargeError(Exception):
    """The weights are not copied to the host, because they are larger than allowed.

    Attributes:
        size_bytes: Their size on the host.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes")
        self.size_bytes = size_bytes


_most_bytes: ContextVar[int | None] = ContextVar("most_bytes", default=None)


@contextlib.contextmanager
def weights_up_to(most_bytes: int) -> Iterator[None]:
    """Make `Strategy.weights` raise `WeightsTooLargeError` above this size, before it copies."""
    token = _most_bytes.set(most_bytes)
    try:
        yield
    finally:
        _most_bytes.reset(token)


def check_weights(size_bytes: int) -> None:
    """Raise WeightsTooLargeError if this many bytes of weights are too many."""
    most = _most_bytes.get()
    if most is not None and size_bytes > most:
        raise WeightsTooLargeError(size_bytes)


class Strategy(ABC):
    """Base of all strategies; one instance lives for one run on one engine.

    Attributes:
        per_cell: Whether one object serves the whole cell and is made before the cell runs.
            Otherwise each `wb.fit` and `wb.prepare` of a cell gets its own object.
        injects_data_delay: Whether it handles the delays that are injected into `data` itself.
        state_is_collective: Whether `state` is a collective call.
        regroups: Whether its workers can continue with others (`leave_group`, `enter_group`).
        split: Whether several workers hold a replica together, each a part of it (`part`).
        copies: Whether all replicas are equal between steps, so that any replica represents all.
        met: If they are not copies: the number of completed meetings after which all workers agree.
        owns_loop: Whether it takes all steps of a `wb.fit` itself (`run_loop`), because one engine
            gives its workers the steps, each at its own speed.
    """

    per_cell = False
    injects_data_delay = False
    owns_loop = False
    regroups = False
    split = False
    copies = True
    met = 0
    state_is_collective = False

    @property
    def apart(self) -> bool:
        """Whether each worker has its own speed; workers then do not meet when the set changes."""
        return False

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.options = context.spec.options
        self.rank = context.spec.rank
        self.world_size = context.spec.world_size
        self.seed = int(context.spec.overrides.get("seed", 0))  # wb.fit puts its own here

    @property
    def shard(self) -> tuple[int, int]:
        """The share of each batch that this worker takes: (index, number of shares)."""
        if self.context.entry.data_parallel:
            return self.rank, self.world_size
        return 0, 1

    @property
    def eval_shard(self) -> tuple[int, int]:
        """Like `shard`, for evaluation sets."""
        return self.shard

    def shard_source(self, source: Any) -> Any:
        """Return the data in the form that this strategy distributes.

        Most strategies do not change it.

        Called before `prepare` on all ranks.
        """
        return source

    @abstractmethod
    def prepare(self, job: Job) -> None:
        """Distribute model, optimizer and data over the workers; the first collective call."""

    @abstractmethod
    def step(self, share: Share) -> StepResult:
        """Take one optimizer step on this worker's share and return what was measured."""

    @abstractmethod
    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics over an evaluation set, by samples, equal on all ranks.

        Asynchronous workers never meet: rank 0 scores the whole set, and the others return nothing.
        """

    @abstractmethod
    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return this rank's parameters and buffers by name, as NumPy (bfloat16 widened)."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that is needed to continue later, independent of the world size."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state`, possibly with another world size."""

    def snapshot(self) -> dict[str, Any]:
        """Return a checkpoint's common part: copies of the result of `state`.

        Called on all ranks of a synchronous run, otherwise only on rank 0. Rank 0's result is
        written. The others do not have to return one if nothing must be gathered.
        """
        return self.state() if self.state_is_collective or self.rank == 0 else {}

    def own_state(self) -> dict[str, Any]:
        """Return copies of this worker's own state; the same rank gets it back."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have none
        """Continue from the result of `own_state`; called after `load_state`."""

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Take over a user's own loop (`wb.prepare`): return what the loop uses instead.

        Only called if the strategy's catalog entry has the way `prepare`.
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - the catalog forbids it

    def wrap_another_loop(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Take over another pair of model and optimizer in the same loop, as in a GAN.

        Raises:
            FitError: This strategy takes one pair.
        """
        raise FitError(
            f"Strategy {self.context.spec.strategy} trains one model and one optimizer per cell.",
            seen="a second call of wb.prepare",
            allowed="one call of wb.fit or wb.prepare; one_device and mirrored allow several calls",
            next_step="use mirrored, or put both models into one module with one optimizer, or "
            "train the second model in a cell of its own",
            code="WB-FIT-070",
        )

    def run_loop(self, training: Any) -> StepResult | None:
        """Take all steps of an `engine.training` loop, recorded; return the last one's result.

        Only for strategies that say so (`owns_loop`).
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `owns_loop` forbids it

    # -- with others (`training/regrouping.py`), only for strategies that say so (`regroups`) ------

    def leave_group(self) -> None:
        """Release everything that uses the process group; the trained state stays.

        A failed step must only have changed gradients, so that it can be repeated.
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `regroups` forbids it

    def enter_group(self, agreed: dict[str, Any]) -> None:
        """Continue in the present group, with the context's new rank and world size.

        Args:
            agreed: The return value of `agreed` on an earlier member; the same for all.
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `regroups` forbids it

    def heal_loop(  # noqa: B027 - most can only be restarted
        self, kept: tuple[Any, ...], regrouping: Callable[[Any], Any]
    ) -> None:
        """Let the user's own loop continue with other workers.

        Args:
            kept: What its `keep=` names.
            regrouping: Makes the `Regrouping` of a training.
        """

    def settle_steps(self, generation: int) -> int:
        """Agree with the servers, which hold the parameters, on the steps that are complete.

        Called before workers compare their steps. In a strategy without meetings, a new worker has
        taken over a state before.

        Returns:
            How many more steps are complete than this worker knew.
        """
        return 0

    def member_state(self) -> dict[str, Any]:
        """Return the state that a new worker takes over from this one."""
        return self.state()

    def load_member_state(self, state: dict[str, Any]) -> None:
        """Continue from the result of another worker's `member_state`."""
        self.load_state(state)

    def agreed(self) -> dict[str, Any]:
        """Return the workers' common decisions so far, as plain data for new workers."""
        return {}

    def bound(self) -> str:
        """Return why the set of workers cannot change with these options; empty if it can.

        Only called if it `regroups`.
        """
        return ""

    @property
    def part(self) -> int:
        """The part of a replica that this worker holds in the present group."""
        return 0

    @property
    def ready(self) -> bool:
        """Whether a failed step can be completed if another worker has taken it."""
        return False

    def complete_step(self, agreed: dict[str, Any]) -> None:
        """Take a step that is `ready`, as another worker has done.

        Args:
            agreed: The return value of `agreed` on that worker.
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `ready` forbids it

    # Replicas that are not copies are kept. A worker that is behind takes its missing steps alone,
    # on the samples of `shares`. If it was interrupted in a common average, it takes over the
    # result.

    def completes_alone(self) -> bool:
        """Whether a failed step counts anyway; called once, after `leave_group`."""
        return False

    def undo(self) -> None:  # noqa: B027 - most steps change nothing before they can fail
        """Undo a step that failed and that no worker has completed."""

    def handed_over(self) -> dict[str, Any]:
        """Return the state that others take over from this worker."""
        return self.member_state()

    def take_over(self, state: dict[str, Any], *, comes: bool) -> bool:
        """Continue from the state that another worker handed over.

        Args:
            comes: Whether this worker has just joined, and has no own state.

        Returns:
            Whether this completes a step that had failed here.
        """
        self.load_member_state(state)
        return False

    def shares(self, first: int) -> list[tuple[tuple[int, int], int | None]]:
        """Return the shares of batches that this worker takes from a step on, like `shard`.

        Each with its number of steps; the last one's is None, which means from then on.
        """
        return [(self.shard, None)]

    def break_off(self) -> None:  # noqa: B027 - most have no connections of their own
        """End waits of the training thread on this strategy's connections.

        Called from another thread.
        """

    def contributed(self, share: Share) -> StepResult:
        """Return the known results of a step that others completed with this worker's gradients."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `regroups` forbids it

    def finish(self) -> None:  # noqa: B027 - most strategies have nothing to settle
        """Do the remaining actions after the last step; called on all ranks, also after a Stop."""

    def serve(self) -> None:
        """Hold parameters until the workers are done; only for strategies with servers."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - the catalog forbids it

    def keep_copy(self) -> None:
        """Hold a copy of another server's part; only if the catalog's entry has copies."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - the catalog forbids it

    def memory_bytes(self) -> float:
        """Return this worker's memory of model, gradients and optimizer; NaN if unknown."""
        return NAN

    @abstractmethod
    def close(self) -> None:
        """Restore the engine: unwrap the user's model and remove all hooks."""
