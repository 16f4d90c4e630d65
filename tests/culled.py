"""Servers that end idle kernels or users' servers, asked over HTTP, and a kernel that trains."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient

START = "%load_ext workbench\nimport workbench as wb\n%cluster start 2 --devices cpu"
BACKGROUND = """%%distributed mirrored --steps 1000000 --background --plot off
import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(2048, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01))"""
STOPPED = "wb.runs.latest.stop(); wb.runs.latest.wait()"


class Service:
    """A process with an HTTP API and a token; its output is in a file.

    Args:
        name: Of the file: `name.log` in `root`.
        runtime: The folder of the kernels' connection files.
    """

    def __init__(
        self, name: str, root: Path, runtime: Path, token: str, command: list[str],
        env: dict[str, str],
    ) -> None:  # fmt: skip
        self.runtime, self._token = runtime, token
        self.log = root / f"{name}.log"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(command, cwd=root, env=env, stdout=out, stderr=out)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def ask(self, url: str, method: str = "GET") -> Any:
        headers = {"Authorization": f"token {self._token}"}
        request = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def answers(self, url: str) -> bool:
        try:
            self.ask(url)
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    @contextlib.contextmanager
    def training(self, kernel: str) -> Iterator[BlockingKernelClient]:
        """A client of a kernel in which a run trains in the background."""
        client = BlockingKernelClient(connection_file=str(self.runtime / f"kernel-{kernel}.json"))
        client.load_connection_file()
        client.start_channels(hb=False)  # on a busy machine its beat is late, which is no death
        try:
            client.wait_for_ready(timeout=60)
            execute(client, START)
            execute(client, BACKGROUND)
            yield client
        finally:
            client.stop_channels()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def execute(client: BlockingKernelClient, cell: str) -> None:
    answer = client.execute_interactive(cell, timeout=120, output_hook=lambda _: None)
    assert answer["content"]["status"] == "ok", answer["content"].get("evalue")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
