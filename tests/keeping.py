"""Helpers for tests of kept clusters: kernels that keep a cluster, and the command line."""

import json
import subprocess
import sys

from notebook_shell import WAIT_S

KEPT = """
SLOW = '''
import time, torch
from torch import nn
print("hello from", rank)
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)
seen = rank + 40
wb.fit(Slow(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS)
print("goodbye from", rank)
'''
def kept(steps, **settings):
    cluster = wb.Cluster(2, keep=True, **settings)
    run = cluster.run(SLOW.replace("STEPS", str(steps)), strategy="mirrored", name="kept")
    while run.history.totals.steps < 5:
        time.sleep(0.01)
        assert not run.is_over, run.error
    say(cluster.keeping.id)
    return cluster, run
"""
TAKEN = """
import json, numpy as np
def report(run, **more):
    steps = run.history["step"]
    board = run.task.board
    say(json.dumps(dict(
        state=run.state, error=str(run.error or ""), rows=len(steps),
        each=sorted(set(np.bincount(steps).tolist())), last=int(steps.max(initial=-1)),
        printed=[text for text in ("hello", "goodbye") if text in board_text(board)], **more)))
def board_text(board):
    return board.text()
"""


def start(stage, code, tail="time.sleep(600)"):
    return stage.kernel(KEPT + TAKEN + code, tail=tail)


def line(kernel):
    text = kernel.stdout.readline().strip()
    assert text, "the kernel's stand-in did not come up"
    return text


def end(kernel):
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()


def shell(stage, *words):
    return subprocess.run(
        [sys.executable, "-m", "workbench.cli", *words],
        env=stage.env, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


def listed(stage):
    return json.loads(shell(stage, "ps", "--json").stdout)
