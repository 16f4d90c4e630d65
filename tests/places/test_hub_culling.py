"""JupyterHub's own idle culler leaves a server alone whose kernel trains in the background.

It needs `pip install jupyterhub jupyterhub-idle-culler` and the proxy of Debian's package
`node-configurable-http-proxy`; otherwise it is skipped.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from culled import STOPPED, Service, execute, free_ports
from needs import need
from notebook_shell import soon

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
        ports, token, runtime = free_ports(3), secrets.token_hex(16), root / "runtime"
        self._url = f"http://127.0.0.1:{ports[0]}"
        path = os.pathsep.join([str(REPOSITORY), *sys.path[1:]])
        environment = {
            "PYTHONPATH": path, "JUPYTERHUB_ACTIVITY_INTERVAL": "4",
            "JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(root / "config"),
        }  # fmt: skip
        config = root / "hub.py"
        config.write_text(
            CONFIG.format(
                ports=ports, root=str(root), environment=environment, idle_s=IDLE_S, token=token
            )
        )
        node = os.environ.get("NODE_PATH", "/usr/share/nodejs")
        command = [sys.executable, "-m", "jupyterhub", "-f", str(config)]
        env = os.environ | {"NODE_PATH": node, "PYTHONPATH": path}
        self.service = Service("hub", root, runtime, token, command, env)

    def ask(self, path: str, method: str = "GET") -> Any:
        return self.service.ask(f"{self._url}/hub/api/{path}", method)

    def ready(self) -> bool:
        return self.service.answers(f"{self._url}/hub/api/")

    def running(self) -> bool:
        return bool((self.ask("users/ada").get("servers") or {}).get("", {}).get("ready"))

    def start(self) -> str:
        """Start the user's server and a kernel in it; return the kernel's id."""
        self.ask("users/ada", "POST")
        self.ask("users/ada/server", "POST")
        assert soon(self.running, 120), self.service.log.read_text()[-3000:]
        return str(self.service.ask(f"{self._url}/user/ada/api/kernels", "POST")["id"])

    def close(self) -> None:
        if self.service.runs and self.ready() and self.running():
            self.ask("users/ada/server", "DELETE")
            soon(lambda: not self.running(), 30)
        self.service.end()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path)
    try:
        assert soon(hub.ready, 60), hub.service.log.read_text()[-3000:]
        yield hub
    finally:
        hub.close()


@pytest.mark.timeout(300)
def test_the_hubs_culler_ends_a_server_after_its_run_and_not_before(hub: Hub) -> None:
    kernel = hub.start()
    with hub.service.training(kernel) as client:
        assert not soon(lambda: not hub.running(), 2.5 * IDLE_S)
        execute(client, STOPPED)
        assert soon(lambda: not hub.running(), 5 * IDLE_S)
