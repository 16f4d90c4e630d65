"""JupyterHub's own idle culler leaves a server alone whose kernel trains in the background.

It needs `pip install jupyterhub jupyterhub-idle-culler` and the proxy of Debian's package
`node-configurable-http-proxy`; otherwise it is skipped.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
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

need("jupyterhub", "jupyterhub_idle_culler", "jupyter_server", "torch")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.skipif(
        shutil.which("configurable-http-proxy") is None, reason="configurable-http-proxy is missing"
    ),
]

REPOSITORY = Path(__file__).resolve().parents[2]
IDLE_S = 20
"""Longer than the 5 s between two messages of a background run, and between two reports."""
START = "%load_ext workbench\nimport workbench as wb\n%cluster start 2 --devices cpu"
BACKGROUND = """%%distributed mirrored --steps 1000000 --background --plot off
import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(2048, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01))"""
STOPPED = "wb.runs.latest.stop(); wb.runs.latest.wait()"
CONFIG = """
import sys
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{ports[1]}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = {root!r} + "/{{username}}"
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--allow-root", "--KernelManager.shutdown_wait_time=2"]
c.Spawner.environment = dict({environment!r})
c.Spawner.http_timeout = c.Spawner.start_timeout = 120
culler = [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout={idle_s}", "--cull-every=2"]
c.JupyterHub.services = [
    dict(name="culler", command=culler), dict(name="test", api_token={token!r}),
]
scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers", "admin:servers",
          "admin:users", "access:servers"]
c.JupyterHub.load_roles = [dict(name="culling", scopes=scopes, services=["culler", "test"])]
"""


class Hub:
    """A JupyterHub with its idle culler, for the one user `ada`."""

    def __init__(self, root: Path) -> None:
        self.ports = _free_ports(3)
        self.root, self._token = root, secrets.token_hex(16)
        self.runtime = root / "runtime"
        path = os.pathsep.join([str(REPOSITORY), *sys.path[1:]])
        environment = {
            "PYTHONPATH": path, "JUPYTERHUB_ACTIVITY_INTERVAL": "4",
            "JUPYTER_RUNTIME_DIR": str(self.runtime), "JUPYTER_CONFIG_DIR": str(root / "config"),
        }  # fmt: skip
        config = root / "hub.py"
        config.write_text(
            CONFIG.format(
                ports=self.ports, root=str(root), environment=environment, idle_s=IDLE_S,
                token=self._token,
            )
        )  # fmt: skip
        node = os.environ.get("NODE_PATH", "/usr/share/nodejs")
        self._log = (root / "hub.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterhub", "-f", str(config)], cwd=root,
            env=os.environ | {"NODE_PATH": node, "PYTHONPATH": path},
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def ask(self, path: str, method: str = "GET", server: bool = False) -> Any:
        base = f"http://127.0.0.1:{self.ports[0]}" + ("/user/ada/" if server else "/hub/")
        request = urllib.request.Request(
            f"{base}api/{path}", method=method, headers={"Authorization": f"token {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def ready(self) -> bool:
        try:
            self.ask("")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def running(self) -> bool:
        return bool((self.ask("users/ada").get("servers") or {}).get("", {}).get("ready"))

    def client(self, kernel: str) -> BlockingKernelClient:
        client = BlockingKernelClient(connection_file=str(self.runtime / f"kernel-{kernel}.json"))
        client.load_connection_file()
        client.start_channels(hb=False)  # on a busy machine its beat is late, which is no death
        client.wait_for_ready(timeout=60)
        return client

    def close(self) -> None:
        if self._process.poll() is None and self.ready() and self.running():
            self.ask("users/ada/server", "DELETE")
            _soon(lambda: not self.running(), 30)
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path)
    try:
        assert _soon(hub.ready, 60), (tmp_path / "hub.log").read_text()[-3000:]
        yield hub
    finally:
        hub.close()


def _soon(condition: Any, limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.3)
    return True


@pytest.mark.timeout(300)
def test_the_hubs_culler_ends_a_server_after_its_run_and_not_before(hub: Hub) -> None:
    hub.ask("users/ada", "POST")
    hub.ask("users/ada/server", "POST")
    assert _soon(hub.running, 120), (hub.root / "hub.log").read_text()[-3000:]
    kernel = hub.ask("kernels", "POST", server=True)["id"]
    client = hub.client(kernel)
    try:
        for cell in (START, BACKGROUND):
            answer = client.execute_interactive(cell, timeout=120, output_hook=lambda _: None)
            assert answer["content"]["status"] == "ok", answer["content"].get("evalue")
        assert not _soon(lambda: not hub.running(), 2.5 * IDLE_S)
        answer = client.execute_interactive(STOPPED, timeout=60, output_hook=lambda _: None)
        assert answer["content"]["status"] == "ok"
        assert _soon(lambda: not hub.running(), 5 * IDLE_S)
    finally:
        client.stop_channels()
