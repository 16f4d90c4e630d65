"""A server that ends idle kernels leaves one alone whose workers train in the background."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from culled import STOPPED, Service, execute, free_ports
from needs import need
from notebook_shell import soon

need("jupyter_server", "torch")
pytestmark = [pytest.mark.cluster, pytest.mark.torch]

REPOSITORY = Path(__file__).resolve().parents[2]
IDLE_S = 15
"""Longer than the 5 s between two messages of a background run, with room for slow machines."""


class Server:
    """A jupyter_server that ends kernels after `IDLE_S`, also those that a browser shows."""

    def __init__(self, root: Path) -> None:
        (port,), token = free_ports(1), secrets.token_hex(16)
        self._url = f"http://127.0.0.1:{port}/api"
        kinds = {
            "cull_idle_timeout": IDLE_S, "cull_interval": 1, "cull_connected": True,
            "cull_busy": False,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "jupyter_server", "--allow-root", "--ip=127.0.0.1",
            f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}",
            "--ServerApp.disable_check_xsrf=True", "--KernelManager.shutdown_wait_time=2",
            *(f"--MappingKernelManager.{name}={value}" for name, value in kinds.items()),
        ]  # fmt: skip
        env = os.environ | {
            **{f"JUPYTER_{kind}_DIR": str(root / kind.lower()) for kind in ("CONFIG", "RUNTIME")},
            "JUPYTER_TOKEN": token,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        self.service = Service("server", root, root / "runtime", token, command, env)

    def ready(self) -> bool:
        return self.service.answers(f"{self._url}/status")

    def kernels(self) -> list[dict[str, Any]]:
        return list(self.service.ask(f"{self._url}/kernels"))

    def start(self) -> str:
        """Start a kernel; return its id."""
        return str(self.service.ask(f"{self._url}/kernels", "POST")["id"])

    def has(self, kernel: str) -> bool:
        return kernel in [one["id"] for one in self.kernels()]

    def close(self) -> None:
        for kernel in self.kernels() if self.ready() else ():
            self.service.ask(f"{self._url}/kernels/{kernel['id']}", "DELETE")
        self.service.end()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        assert soon(server.ready, 60), server.service.log.read_text()[-3000:]
        yield server
    finally:
        server.close()


def test_a_kernel_is_ended_as_idle_after_its_run_and_not_before(server: Server) -> None:
    kernel = server.start()
    with server.service.training(kernel) as client:
        assert not soon(lambda: not server.has(kernel), 2 * IDLE_S)
        (seen,) = server.kernels()
        assert seen["execution_state"] == "idle"  # it is the messages that keep it
        execute(client, STOPPED)
        assert soon(lambda: not server.has(kernel), 4 * IDLE_S)
