"""Helpers of the debugging tests: simulated typing, and the state of the cluster."""

import builtins

from notebook_shell import soon

from workbench.execution import paused as prompt
from workbench.notebook.session import session
from workbench.session import debug
from workbench.shared.messages import AskWhere

TRAINS = """import torch
from torch import nn
def look(step, logs):
    if step == 3 and rank == 0:
        breakpoint()
        seen = step
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS,
       callbacks=look)
"""


class Typist:
    """Simulates typing: each line answers one prompt; a function returns its line."""

    def __init__(self, monkeypatch, *lines):
        self.lines, self.prompts = list(lines), []
        for module in (prompt, debug):
            monkeypatch.setattr(module, "can_prompt", lambda: True)
        monkeypatch.setattr(builtins, "input", self.type)
        monkeypatch.setattr(prompt.getpass, "getpass", self.type)

    def type(self, text=""):
        self.prompts.append(text)
        assert self.lines, f"one prompt more than expected: {text}"
        line = self.lines.pop(0)
        return line() if callable(line) else line


def paused():
    return session.cluster.paused.stops


def idle():
    return soon(lambda: not session.cluster.is_busy)


def where(*engines):
    return session.cluster.engine_set.router.questions.ask(AskWhere, engines, 5)
