"""Model parallelism without a pipeline: the layers of one model lie on several devices.

Each device holds the parameters and the optimizer state of its own layers only, so the model may be
larger than the memory of one device. The whole batch goes through the chain at once, therefore the
stages are sequential: while one computes, all others stand idle. This saves memory, never time.

    device 0:  x -> stage 0 --activations-->                    <--gradients-- stage 0  -> update
    device 1:       . . . . stage 1 --activations--> <--gradients-- stage 1   . . . . . -> update
    device 2:       . . . . . . . . . stage 2 -> loss -> stage 2 . . . . . .  . . . . . -> update

With p equal stages each is busy 1/p of the time; the rest is its bubble. A pipeline (PyTorch's
`model_split`) fills it with microbatches.

Nothing is summed in another order than on one device, so the result is that of one device.

Where to cut: `split_at` names the layers that begin a stage, else parameters are balanced
(`parts/layers.py`). How layers get to their device, and when they are busy: `parts/stages.py`.

Sources: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 3 (model
parallelism); tf.device, https://www.tensorflow.org/guide/gpu#manual_device_placement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from ...catalog import schedules
from ...engine.contract import NAN, Share
from ...engine.telemetry.recorder import StepResult
from ...errors import FitError
from ...shared import events
from .parts.layers import Chain, Placement, SplitStrategy, cut, table_text
from .parts.replicated import Replicated
from .parts.stages import StageMarks, Stages


class ModelSplit(Replicated):
    """One model on several devices; the stages are the ranks."""

    placement: Placement | None = None

    @property
    def portion(self) -> tuple[int, int]:
        """The whole batch goes through all stages."""
        return 0, 1

    def build(self) -> tf.distribute.Strategy:
        """Return a strategy with one replica, whose loss is computed where the last layer is."""
        return SplitStrategy(self.devices[-1])

    @contextlib.contextmanager
    def around_cell(self) -> Iterator[dict[str, Any]]:
        """As the others, and the layers of the model that is trained are placed."""
        self.stages = Stages(self.devices, self.context.faults.replicas)
        self.placement = Placement(self.devices, self._cut, self.stages)
        with super().around_cell() as names, self.placement:
            columns = {"sent_bytes": "what crosses the devices is not counted"}
            self.context.emit(events.Unmeasured(columns=columns))
            yield names

    def marks(self) -> StageMarks:
        """Return what measures each stage."""
        return StageMarks(self.distribution, self.stages)

    def _cut(self, model: Any) -> Chain:
        """Decide where to cut, and say so."""
        if self._model is None:
            self._model = model
        chain = cut(model, len(self.devices), self.options["split_at"] or "")
        rows, ideal = chain.table(), schedules.ideal_bubble("naive", len(self.devices), 1, 1)
        self.context.emit(
            events.WasCut(rank=0, stages=rows, schedule="naive", microbatches=1, ideal_bubble=ideal)
        )
        self.context.emit(
            events.Noted(
                rank=0,
                text=f"{len(rows)} stages, one after the other: each stands idle {ideal:.0%} of "
                f"the time if they are equal. This saves memory, not time.\n{table_text(rows)}",
            )
        )
        return chain

    def _trains(self, model: Any) -> None:
        super()._trains(model)
        if self.placement is not None:
            self.placement.model = model
        if getattr(model, "jit_compile", False):
            raise FitError(
                "XLA compiles a model for one device, so it cannot be split over several.",
                seen="jit_compile=True",
                next_step="model.compile(..., jit_compile=False)",
                code="WB-FIT-093",
            )

    def step(self, share: Share) -> StepResult:
        """Send the batch through all stages; the last one has the loss."""
        result = super().step(share)
        return replace(result, loss=result.replicas[-1].loss)

    def results(
        self,
        measured: Sequence[StepResult],
        samples: list[int],
        losses: list[float],
        spent_s: float,
    ) -> tuple[StepResult, ...]:
        """Return a result per stage: all see the whole batch, the last one its loss."""
        stages = len(self.devices)
        measured = measured or [StepResult(0, NAN, NAN)] * stages
        every = zip(measured, [NAN] * (stages - 1) + losses, strict=True)
        return tuple(
            replace(one, samples=samples[0], loss=loss, has_loss=stage == stages - 1)
            for stage, (one, loss) in enumerate(every)
        )

    def close(self) -> None:
        """Let go of the user's model; its layers stay where they are."""
        super().close()
        self.placement = None
