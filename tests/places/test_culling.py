"""A server that ends idle kernels leaves one alone whose workers train in the background."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from needs import need

need("jupyter_server", "torch")
pytestmark = [pytest.mark.cluster, pytest.mark.torch]

REPOSITORY = Path(__file__).resolve().parents[2]
IDLE_S = 15
"""Longer than the 5 s between two messages of a background run, with room for slow machines."""
START = "%load_ext workbench\nimport workbench as wb\n%cluster start 2 --devices cpu"
CELL = """
import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(2048, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01))"""
BACKGROUND = "%%distributed mirrored --steps 1000000 --background --plot off" + CELL
STOPPED = "wb.runs.latest.stop(); wb.runs.latest.wait()"


class Server:
    """A jupyter_server that ends kernels after `IDLE_S`, also those that a browser shows."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._token = f"http://127.0.0.1:{port}", secrets.token_hex(16)
        self.runtime = root / "runtime"
        env = os.environ | {
            **{f"JUPYTER_{kind}_DIR": str(root / kind.lower()) for kind in ("CONFIG", "RUNTIME")},
            "JUPYTER_TOKEN": self._token,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        kinds = {
            "cull_idle_timeout": IDLE_S, "cull_interval": 1, "cull_connected": True,
            "cull_busy": False,
        }  # fmt: skip
        self._log = (root / "server.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyter_server", "--allow-root", "--ip=127.0.0.1",
                f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}",
                "--ServerApp.disable_check_xsrf=True", "--KernelManager.shutdown_wait_time=2",
                *(f"--MappingKernelManager.{name}={value}" for name, value in kinds.items()),
            ],
            env=env, stdout=self._log, stderr=self._log, cwd=root,
        )  # fmt: skip

    def ask(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.url}/{path}", method=method, headers={"Authorization": f"token {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def ready(self) -> bool:
        try:
            self.ask("api/status")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def kernels(self) -> list[str]:
        return [one["id"] for one in self.ask("api/kernels")]

    def client(self, kernel: str) -> BlockingKernelClient:
        client = BlockingKernelClient(connection_file=str(self.runtime / f"kernel-{kernel}.json"))
        client.load_connection_file()
        client.start_channels(hb=False)  # on a busy machine its beat is late, which is no death
        client.wait_for_ready(timeout=60)
        return client

    def close(self) -> None:
        for kernel in self.kernels():
            self.ask(f"api/kernels/{kernel}", "DELETE")
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        assert _soon(server.ready, 60)
        yield server
    finally:
        server.close()


def _soon(condition: Any, limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.2)
    return True


def test_a_kernel_is_ended_as_idle_after_its_run_and_not_before(server: Server) -> None:
    kernel = server.ask("api/kernels", "POST")["id"]
    client = server.client(kernel)
    try:
        for cell in (START, BACKGROUND):
            answer = client.execute_interactive(cell, timeout=120, output_hook=lambda _: None)
            assert answer["content"]["status"] == "ok", answer["content"].get("evalue")
        assert not _soon(lambda: kernel not in server.kernels(), 2 * IDLE_S)
        (seen,) = server.ask("api/kernels")
        assert seen["execution_state"] == "idle"  # it is the messages that keep it
        answer = client.execute_interactive(STOPPED, timeout=60, output_hook=lambda _: None)
        assert answer["content"]["status"] == "ok"
        assert _soon(lambda: kernel not in server.kernels(), 4 * IDLE_S)
    finally:
        client.stop_channels()
