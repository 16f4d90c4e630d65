"""An optimizer that ends its server's process in the middle of a step, and steps of SGD."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch

from workbench.engine.transport.ring import COPY_THREAD


class Dying(torch.optim.SGD):
    """SGD that dies where it is told to.

    Args:
        where: `own`: on the server that answers, which has sent the step on to its copy and has
            answered nobody; `copy`: on the other one, while the first waits for it.
        at: The step, counted from 1.
        tensors: How many tensors the part has that it dies with; 0: any part.
    """

    def __init__(self, params: Any, lr: float, where: str, at: int, tensors: int = 0) -> None:
        super().__init__(params, lr, momentum=0.9)
        for group in self.param_groups:
            group.update(where=where, at=at, tensors=tensors)
        self.defaults.update(where=where, at=at, tensors=tensors)

    def step(self, closure: Any = None) -> Any:
        """Take a step, or die."""
        (group,) = self.param_groups
        if any(p.grad is not None for p in group["params"]):  # on a worker there are none
            taken = vars(self)["taken"] = vars(self).get("taken", 0) + 1
            role = "copy" if threading.current_thread().name == COPY_THREAD else "own"
            mine = group["tensors"] in (0, len(group["params"]))
            if mine and role == group["where"] and taken == group["at"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)
