"""What every strategy must do, in any framework.

A strategy is one file that reads like the textbook's page on it: the algorithm, its source, a small
message diagram in the module's docstring, and a class that derives from `Strategy`. It is handed
everything it needs (`context`); it opens nothing it does not close in `close`.
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
    """What `wb.fit` was asked to train, checked; the same on every rank.

    Attributes:
        model: A module, or what the function that returns one gave.
        loss: `loss(output, y)`, a mean over the batch; None where `step_fn` is given.
        step_fn: `step_fn(model, batch) -> loss`, a mean over the batch.
        optimizer: A function of the parameters, or a built optimizer.
        batch_size: Global batch: what one optimizer step consumes over all workers.
        accumulate: Micro-batches per worker and step; the global batch includes them.
        precision: None, `bf16` or `fp16`.
        build: Builds the model for real where `model` has its form but no memory (device `meta`):
            for strategies whose workers hold a share of it.
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
        data: The worker's samples, already collated (framework tensors on the CPU), ready for
            the model; never empty: a worker without a sample holds one with `samples` 0.
        samples: How many of them count.
        global_samples: Samples of the whole batch over all workers (smaller at the end of an
            epoch). Gradients are weighted by `samples / global_samples`.
    """

    data: Any
    samples: int
    global_samples: int
    step: int
    epoch: int


class WeightsTooLargeError(Exception):
    """Weights are not brought to the host: they are more than was asked for.

    Attributes:
        size_bytes: What they would take there.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes")
        self.size_bytes = size_bytes


_most_bytes: ContextVar[int | None] = ContextVar("most_bytes", default=None)


@contextlib.contextmanager
def weights_up_to(most_bytes: int) -> Iterator[None]:
    """Have `Strategy.weights` raise `WeightsTooLargeError` for more, before anything is copied."""
    token = _most_bytes.set(most_bytes)
    try:
        yield
    finally:
        _most_bytes.reset(token)


def check_weights(size_bytes: int) -> None:
    """Raise WeightsTooLargeError where so many bytes of weights are not wanted."""
    most = _most_bytes.get()
    if most is not None and size_bytes > most:
        raise WeightsTooLargeError(size_bytes)


class Strategy(ABC):
    """Base of all strategies; one instance lives for one run on one engine.

    Attributes:
        per_cell: Whether one object serves the whole cell, made before the cell runs; else each
            `wb.fit` and `wb.prepare` of a cell gets one of its own.
        injects_data_delay: Whether it spends the delays that are injected into `data` by itself.
        state_is_collective: Whether `state` is a collective call.
        regroups: Whether its workers can go on with others (`leave_group`, `enter_group`).
        split: Whether several workers hold a replica together, each a part of it (`part`).
        copies: Whether all replicas are equal between steps, so that any worker's stands for all.
        met: How many meetings are complete after which all have agreed, where they are no copies.
        owns_loop: Whether it takes all steps of a `wb.fit` by itself (`run_loop`), as its workers
            take them from one engine, each at its own pace.
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
        """Whether workers meet nobody to go on with others: each keeps its own pace."""
        return False

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.options = context.spec.options
        self.rank = context.spec.rank
        self.world_size = context.spec.world_size
        self.seed = int(context.spec.overrides.get("seed", 0))  # wb.fit puts its own here

    @property
    def shard(self) -> tuple[int, int]:
        """Which share of each batch this worker takes: (index, number of shares)."""
        if self.context.entry.data_parallel:
            return self.rank, self.world_size
        return 0, 1

    @property
    def eval_shard(self) -> tuple[int, int]:
        """As `shard`, for evaluation sets."""
        return self.shard

    def shard_source(self, source: Any) -> Any:
        """Return the data as this strategy deals it out; most leave it as it is.

        Called before `prepare` on all ranks.
        """
        return source

    @abstractmethod
    def prepare(self, job: Job) -> None:
        """Lay model, optimizer and data out over the workers; the first collective call."""

    @abstractmethod
    def step(self, share: Share) -> StepResult:
        """Do one optimizer step on this worker's share and say what was measured."""

    @abstractmethod
    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics over an evaluation set, by samples, equal on all ranks.

        Asynchronous workers meet nowhere: rank 0 scores the whole set, the others return nothing.
        """

    @abstractmethod
    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return this rank's parameters and buffers by name, as NumPy (bfloat16 widened)."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later, independent of the world size."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, possibly under another world size."""

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the whole: copies of what `state` gives.

        Called on all ranks of a synchronous run, on rank 0 alone of another; rank 0's answer is
        written, so the others need give none where nothing has to be gathered.
        """
        return self.state() if self.state_is_collective or self.rank == 0 else {}

    def own_state(self) -> dict[str, Any]:
        """Return copies of what this worker alone has; the same rank of as many gets it back."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have none
        """Go on from what `own_state` gave; called after `load_state`."""

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Take over a user's own loop (`wb.prepare`): return what the loop uses instead.

        Strategies whose catalog entry lacks the way `prepare` are never asked.
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - the catalog forbids it

    def wrap_another_loop(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Take over a further pair of a loop that `wrap_loop` took over: a GAN has two.

        Raises:
            FitError: This strategy takes one pair.
        """
        raise FitError(
            f"Strategy {self.context.spec.strategy} trains one model and one optimizer per cell.",
            seen="wb.prepare, called again",
            allowed="one wb.fit or wb.prepare; several pairs under one_device and mirrored",
            next_step="use mirrored, or one module that holds both models, with one optimizer; put "
            "a second training into its own cell",
            code="WB-FIT-070",
        )

    def run_loop(self, training: Any) -> StepResult | None:
        """Take all steps of an `engine.training` loop, recorded; return the last one's result.

        Only for strategies that say so (`owns_loop`).
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `owns_loop` forbids it

    # -- with others (`training/regrouping.py`), only for strategies that say so (`regroups`) ------

    def leave_group(self) -> None:
        """Let go of all that hangs on the process group; what was trained stays.

        A step that has failed leaves no trace but in gradients: it may be taken anew.
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `regroups` forbids it

    def enter_group(self, agreed: dict[str, Any]) -> None:
        """Go on in the group that is there now, under the context's new rank and world size.

        Args:
            agreed: What one worker that was there before said (`agreed`); the same for all.
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `regroups` forbids it

    def heal_loop(  # noqa: B027 - most can only be restarted
        self, kept: tuple[Any, ...], regrouping: Callable[[Any], Any]
    ) -> None:
        """Let the user's own loop go on with other workers.

        Args:
            kept: What its `keep=` names.
            regrouping: Makes the `Regrouping` of a training.
        """

    def settle_steps(self, generation: int) -> int:
        """Settle with those who hold what is trained, besides the workers, which steps stand.

        Called before workers compare how far they are; who is let in and meets nobody has taken
        over before.

        Returns:
            How many steps further training is than this worker knew.
        """
        return 0

    def member_state(self) -> dict[str, Any]:
        """Return what a worker that is let in takes over from this one."""
        return self.state()

    def load_member_state(self, state: dict[str, Any]) -> None:
        """Go on from what another worker's `member_state` gave."""
        self.load_state(state)

    def agreed(self) -> dict[str, Any]:
        """Return what the workers have agreed on so far, plain data for those who come."""
        return {}

    def bound(self) -> str:
        """Return why its workers must stay the same under these options; empty where they need not.

        Asked only where it `regroups`.
        """
        return ""

    @property
    def part(self) -> int:
        """Which part of a replica is this worker's, in the group that there is now."""
        return 0

    @property
    def ready(self) -> bool:
        """Whether a step that failed lacks nothing here but the word that another has taken it."""
        return False

    def complete_step(self, agreed: dict[str, Any]) -> None:
        """Take a step that is `ready`, as another worker has.

        Args:
            agreed: What that worker said (`agreed`).
        """
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `ready` forbids it

    # Replicas that are not copies stay what they are. Who is behind takes its steps alone (`shares`
    # says on what), and takes over what all have agreed on, where it was broken out of that.

    def completes_alone(self) -> bool:
        """Whether a step that failed counts all the same; asked once, after `leave_group`."""
        return False

    def undo(self) -> None:  # noqa: B027 - most steps change nothing before they can fail
        """Leave no trace of a step that failed and that nobody has completed."""

    def handed_over(self) -> dict[str, Any]:
        """Return what others take over from this worker."""
        return self.member_state()

    def take_over(self, state: dict[str, Any], *, comes: bool) -> bool:
        """Go on from what another worker handed over.

        Args:
            comes: Whether this worker has just come, and has nothing of its own.

        Returns:
            Whether a step that had failed here is complete with that.
        """
        self.load_member_state(state)
        return False

    def shares(self, first: int) -> list[tuple[tuple[int, int], int | None]]:
        """Return which shares of batches this worker takes from a step on, as `shard` gives them.

        Each with the number of steps; the last one's is None: for good.
        """
        return [(self.shard, None)]

    def break_off(self) -> None:  # noqa: B027 - most have no connections of their own
        """End what blocks the training thread on connections of its own; from another thread."""

    def contributed(self, share: Share) -> StepResult:
        """Return what is known of a step that others completed with this worker's gradients."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - `regroups` forbids it

    def finish(self) -> None:  # noqa: B027 - most strategies have nothing to settle
        """Settle what is left after the last step; called on all ranks, also after a Stop."""

    def serve(self) -> None:
        """Hold parameters until the workers are done; only for strategies with servers."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - the catalog forbids it

    def keep_copy(self) -> None:
        """Hold a copy of another server's part; only where the catalog's entry has copies."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - the catalog forbids it

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients and optimizer; NaN where unknown."""
        return NAN

    @abstractmethod
    def close(self) -> None:
        """Leave the engine as it was: unwrap the user's model, drop hooks, then nothing is left."""
