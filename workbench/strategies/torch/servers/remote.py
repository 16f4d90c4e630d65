"""The parameters of one session on the servers, as a worker's optimizer step uses them."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....engine.transport import LinkClosedError, sessions_before
from ....errors import FitError
from .links import ShardLinks
from .rows import check_row_wise
from .shards import Shard, hyper_of, importable, plain

if TYPE_CHECKING:
    from ....engine.context import RunContext


@dataclass
class Answer:
    """The servers' answer to a push.

    Attributes:
        staleness: Updates between this worker's pull and its push, mean over servers.
        blocked_s: How long the slowest server delayed the answer because of other workers (bounded
            staleness, or the last push of a round).
        sent_bytes: The bytes pushed.
        blamed: The worker whose push released the delayed answer; -1 if no answer was delayed.
    """

    staleness: float = 0.0
    blocked_s: float = 0.0
    sent_bytes: float = 0.0
    blamed: int = -1


class Remote:
    """The parameters of one session on the servers, seen from a worker.

    Args:
        clip_norm: The norm to which the servers clip the sum of all workers' gradients.
        whole: Whether gradients must reach the servers unchanged after backward. A worker's
            gradients are its share of a sum, so their norm on the worker would be wrong.
        snapshot: Whether the parameters of all servers must be of one version.
        tables: Parameters whose gradients are sparse: they are sent as rows.
        waits: Whether the servers are joined later (`go_on`, `join`).
        exchanged: Called with a function that does the exchange, and times it.

    Raises:
        FitError: The optimizer or the model cannot be put on servers.
    """

    def __init__(
        self,
        context: RunContext,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        whole: bool = False,
        snapshot: bool = False,
        pull_every: int = 1,
        tables: Collection[torch.Tensor] = (),
        waits: bool = False,
        exchanged: Callable[[Callable[[], Answer]], None],
    ) -> None:
        self._context, self._optimizer = context, optimizer
        self._whole, self._pull_every = whole, pull_every
        self._exchanged = exchanged
        self._pushes = 0
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self._slots = [i for i, p in enumerate(every) if p.requires_grad]
        self.parameters = [every[i] for i in self._slots]
        self._known = set(self.parameters)
        self._tables = frozenset(i for i, p in enumerate(self.parameters) if p in tables)
        check_row_wise(optimizer, tables)
        self._servers = ShardLinks(
            context,
            self.parameters,
            clips=clip_norm is not None,
            snapshot=snapshot,
            tables=self._tables,
        )
        self._hyper: list[dict[str, Any]] | None = None
        self._hidden: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._pins: list[Any] = []
        self._clip_norm = clip_norm
        if not waits:
            self._servers.open(self._about)
            self._servers.begin()
        self._pins = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def _about(self) -> dict[str, Any]:
        """The description of a session that servers receive."""
        optimizer = self._optimizer
        index = {id(p): i for i, p in enumerate(self.parameters)}
        return {
            "optimizer": importable(type(optimizer)),
            "defaults": plain(optimizer.defaults),
            "hyper": hyper_of(optimizer),
            "groups": [
                [index[id(p)] for p in group["params"] if id(p) in index]
                for group in optimizer.param_groups
            ],
            "clip_norm": self._clip_norm,
        }

    # -- with others -------------------------------------------------------------------------------

    def go_on(self, generation: int) -> int:
        """Continue with the present workers; return how many steps the servers have taken.

        Raises:
            LinkError: A server has died, or the set of workers has changed again.
        """
        context = self._context
        self._forget_step()
        while True:
            context.connect(context.spec.rank, generation)
            session = sessions_before(generation) + 1
            about = {"generation": generation, "workers": context.spec.world_size}
            try:
                return self._servers.go_on({**self._about, **about, "session": session})
            # its copy may have taken over: all values are requested from it
            except LinkClosedError:
                if context.membership.stale or context.spec.options.get("replicas", 1) == 1:
                    raise

    def join(self, place: int, generation: int) -> int:
        """Replace another worker; return how many of its pushes count."""
        self._forget_step()
        self._context.connect(place, generation)
        opened = self._servers.open({**self._about, "generation": generation, "joins": True})
        return max(int(one.meta["pushes"]) for one in opened)

    def _forget_step(self) -> None:
        self._hyper, self._versions = None, []
        if self._hidden:
            self._after_step()

    # -- a step ------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(a is not None for a in args[1:]) or kwargs.get("closure") is not None:
            raise FitError(
                "optimizer.step() was called with a closure that computes the loss. But the "
                "servers take the step, and a server cannot compute the loss.",
                seen=type(optimizer).__name__,
                next_step="call optimizer.step() without a closure; if this optimizer needs a "
                "closure, use another optimizer, or the strategy `mirrored`",
                code="WB-FIT-123",
            )
        self._check_known()
        self._check_untouched()
        self._exchanged(self.exchange)
        self._hidden = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def _after_step(self, *unused: Any) -> None:
        for parameter, gradient in zip(self.parameters, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = []

    def _check_known(self) -> None:
        """Raise FitError if the step would change parameters that are not on a server."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._known:
                    raise FitError(
                        "The optimizer has a parameter that is not on the servers. When the "
                        "servers received the model, this parameter was frozen or not in the "
                        "optimizer.",
                        seen=f"a parameter of shape {tuple(parameter.shape)}",
                        allowed="only parameters that were in the optimizer and were not frozen "
                        "when the servers received the model",
                        next_step="before wb.prepare, unfreeze all layers, and give all their "
                        "parameters to the optimizer. After wb.prepare, freeze the layers that "
                        "must not train yet. Or use the strategy `mirrored`",
                        code="WB-FIT-124",
                    )

    def backward_ended(self) -> None:
        """Note the gradients after backward."""
        if self._whole:
            self._versions = [-1 if p.grad is None else p.grad._version for p in self.parameters]

    def _check_untouched(self) -> None:
        if not self._whole or not self._versions or self._context.spec.world_size == 1:
            return
        now = [-1 if p.grad is None else p.grad._version for p in self.parameters]
        if now != self._versions:
            raise FitError(
                "The gradients were changed between backward() and optimizer.step(). The gradient "
                "of a step is the sum of all workers' gradients. Only the servers know this sum, "
                "so a worker cannot clip it.",
                seen="clip_grad_norm_, or another in-place change of the gradients",
                next_step="use wb.fit(..., clip_norm=...), which clips this sum, or use the "
                "strategy `mirrored`",
                code="WB-FIT-125",
            )
        self._versions = []

    def exchange(self) -> Answer:
        """Push the gradients, get the parameters."""
        self._pushes += 1
        wanted = self._pushes % self._pull_every == 0
        self._check_dense()
        gradients = [p.grad for p in self.parameters]
        absent = [i for i, gradient in enumerate(gradients) if gradient is None]
        meta: dict[str, Any] = {"pull": wanted}
        if absent:
            meta["absent"] = absent
        hyper = hyper_of(self._optimizer)
        if hyper != self._hyper:
            check_row_wise(self._optimizer, {self.parameters[i] for i in self._tables})
            meta["hyper"] = self._hyper = hyper
        answers = self._servers.exchange(gradients, meta, wanted=wanted)
        size_bytes = self._servers.sent_bytes
        told = [answer.meta for answer in answers if "staleness" in answer.meta]
        if not told:
            return Answer(sent_bytes=size_bytes)
        longest = max(told, key=lambda m: m["blocked_s"])
        return Answer(
            sum(m["staleness"] for m in told) / len(told),
            longest["blocked_s"],
            size_bytes,
            longest["blamed"],
        )

    def pull(self) -> None:
        """Get the present parameters."""
        self._servers.pull()

    def end(self) -> None:
        """Push no more; wait until no worker pushes, and get the final parameters."""
        self._servers.end()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this worker's parameters, also while they are hidden."""
        held = self._hidden or [p.grad for p in self.parameters]
        return [gradient for gradient in held if gradient is not None]

    def _check_dense(self) -> None:
        for i, parameter in enumerate(self.parameters):
            if i not in self._tables and parameter.grad is not None and parameter.grad.is_sparse:
                raise FitError(
                    "The servers can receive a sparse gradient only for a layer that was made with "
                    "sparse=True. For other layers, the servers have reserved memory for dense "
                    "gradients.",
                    seen=f"parameter {i} with shape {tuple(parameter.shape)}",
                    allowed="sparse gradients only for layers made with sparse=True",
                    next_step="make the layer with nn.Embedding(..., sparse=True), or call "
                    "F.embedding with sparse=False",
                    code="WB-FIT-126",
                )

    # -- saving ------------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state_dict, with its state from the servers."""
        state: dict[int, Any] = {}
        for written in self._servers.states():
            for index, values in torch.load(io.BytesIO(written), weights_only=True).items():
                state[self._slots[index]] = values
        return {**self._optimizer.state_dict(), "state": state}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Put a saved state, and this worker's parameters, on the servers."""
        for group, values in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})

        def written(shard: Shard) -> bytes:
            part = {p.index: saved["state"].get(self._slots[p.index]) for p in shard.pieces}
            whole = io.BytesIO()
            torch.save({k: v for k, v in part.items() if v is not None}, whole)
            return whole.getvalue()

        self._servers.load(written)
        self._servers.begin()

    def close(self) -> None:
        """End the session and remove the hooks."""
        for pin in self._pins:
            pin.remove()
        self._pins.clear()
        self._servers.close()
