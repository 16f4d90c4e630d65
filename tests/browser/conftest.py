"""A real JupyterLab and a real browser, for tests that look at what the user sees."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("WORKBENCH_CHROMIUM", "/usr/bin/chromium")
CHROMIUM_ARGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
THEMES = "themes.jupyterlab-settings"  # the theme a test chose; the next begins with the default
KERNEL_IDLE = """() => {
  const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
  return context?.isReady && context.session?.kernel?.status === "idle";
}"""
TESTS = Path(__file__).parents[1]


@dataclass
class Lab:
    """A running JupyterLab server and the folder it serves."""

    url: str
    token: str
    folder: Path

    def write(self, name: str, cells: list[str]) -> Path:
        """Put a notebook with these code cells into the folder."""
        notebook = {
            "cells": [
                {
                    "cell_type": "code", "id": f"cell-{i}", "execution_count": None,
                    "metadata": {}, "outputs": [], "source": source,
                }
                for i, source in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }  # fmt: skip
        path = self.folder / name
        path.write_text(json.dumps(notebook))
        return path

    def saved(self, name: str) -> dict[str, Any]:
        """Read a notebook as it is on disk."""
        return json.loads((self.folder / name).read_text())

    def ask(self, path: str, method: str = "GET") -> Any:
        """Call the server's REST interface."""
        request = urllib.request.Request(
            f"{self.url}/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            body = reply.read()
        return json.loads(body) if body else None


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on loopback, in a folder of its own, gone at the end."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    root = tmp_path_factory.mktemp("lab")
    folder = root / "work"
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    _be_quiet(root / "settings")
    env = {
        **os.environ,
        **{f"JUPYTER_{k}_DIR": str(root / k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")},
        "JUPYTERLAB_SETTINGS_DIR": str(root / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces"),
        "IPYTHONDIR": str(root / "ipython"),
        "JUPYTER_TOKEN": token,
        "WORKBENCH_PREWARM": os.environ.get("WORKBENCH_PREWARM", "off"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).strip(":"),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}",
        "--ServerApp.disable_check_xsrf=True", "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True", "--KernelManager.shutdown_wait_time=2",
    ]  # fmt: skip
    log = (root / "lab.log").open("wb")
    process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
    server = Lab(f"http://127.0.0.1:{port}", token, folder)
    try:
        _wait_for_server(server, process, root / "lab.log")
        yield server
    finally:
        _shut_down(server, process)
        log.close()


def _be_quiet(settings: Path) -> None:
    """Ask for no news, so that no notification covers the page."""
    place = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    place.parent.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
    place.write_text(json.dumps(quiet))


def _wait_for_server(server: Lab, process: subprocess.Popen[bytes], log: Path) -> None:
    limit_s = time.monotonic() + 60
    while time.monotonic() < limit_s:
        if process.poll() is not None:
            pytest.fail(f"JupyterLab ended: {log.read_text()[-2000:]}")
        try:
            server.ask("api/status")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    pytest.fail(f"JupyterLab did not answer within 60 s: {log.read_text()[-2000:]}")


def _shut_down(server: Lab, process: subprocess.Popen[bytes]) -> None:
    """End kernels, then the server; kill it only when it does not go by itself."""
    try:
        for kernel in server.ask("api/kernels"):
            server.ask(f"api/kernels/{kernel['id']}", "DELETE")
        server.ask("api/shutdown", "POST")
        process.wait(10)
    except (urllib.error.URLError, OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(5)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not shutil.which(CHROMIUM):
        pytest.skip(f"Chromium is not at {CHROMIUM} (WORKBENCH_CHROMIUM names another place)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


class Notebook:
    """One notebook in a tab of JupyterLab, or of Notebook 7."""

    def __init__(self, lab: Lab, page: Any, name: str, front: str = "lab") -> None:
        self.lab, self.page, self.name, self.front = lab, page, name, front

    def open(self) -> None:
        """Load the page alone with this notebook and wait for its kernel."""
        # `doc` mode shows one document; `reset` forgets the layout of earlier tests.
        place = {"lab": "doc/tree", "notebook": "notebooks"}[self.front]
        self.page.goto(f"{self.lab.url}/{place}/{self.name}?token={self.lab.token}&reset")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
        self.wait_idle()

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Wait until the kernel is idle."""
        self.page.wait_for_function(KERNEL_IDLE, timeout=timeout_s * 1e3)

    def run_all(self) -> None:
        """Press Run > Run All Cells; returns at once."""
        self.command("notebook:run-all-cells")

    def command(self, name: str, **args: Any) -> None:
        """Run one of JupyterLab's commands and wait for it to be accepted."""
        self.page.evaluate(
            "([name, args]) => { void window.jupyterapp.commands.execute(name, args); }",
            [name, args],
        )

    def save(self) -> None:
        """Save the notebook and wait until it is on disk."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def dark(self, on: bool = True) -> None:
        """Switch JupyterLab's theme."""
        theme = "JupyterLab Dark" if on else "JupyterLab Light"
        self.command("apputils:change-theme", theme=theme)
        self.page.wait_for_selector(
            f"body[data-jp-theme-name='{theme}']", state="attached", timeout=10_000
        )

    def wait_text(self, text: str | re.Pattern[str], timeout_s: float = 60) -> None:
        """Wait until an output shows `text`."""
        place = self.page.locator(".jp-OutputArea-output").filter(has_text=text).first
        place.wait_for(timeout=timeout_s * 1e3)

    def outputs(self) -> list[dict[str, Any]]:
        """Save, and return all outputs in the file."""
        self.save()
        cells = self.lab.saved(self.name)["cells"]
        return [output for cell in cells for output in cell.get("outputs", [])]

    def screenshot(self, path: Path | str, selector: str | None = None) -> None:
        """Write a PNG of the page, or of the first element that matches."""
        target = self.page.locator(selector).first if selector else self.page
        target.screenshot(path=str(path))


@pytest.fixture
def notebook(lab: Lab, browser: Any) -> Iterator[Callable[..., Notebook]]:
    """A function that opens a notebook of these cells.

    It takes `(name, cells, width=..., height=..., front=...)`. `front="notebook"` opens Notebook 7,
    which the same server serves when it is installed.
    """
    contexts: list[Any] = []

    def opened(
        name: str, cells: list[str], *, width: int = 1100, height: int = 1000, scale: float = 1.0,
        front: str = "lab",
    ) -> Notebook:  # fmt: skip
        if front == "notebook":
            pytest.importorskip("notebook", reason="Notebook 7 is not installed")
        lab.write(name, cells)
        context = browser.new_context(
            viewport={"width": width, "height": height}, device_scale_factor=scale
        )
        contexts.append(context)
        found = Notebook(lab, context.new_page(), name, front)
        found.open()
        return found

    yield opened
    (lab.folder.parent / "settings" / "@jupyterlab" / "apputils-extension" / THEMES).unlink(True)
    for context in contexts:
        context.close()
    for session in lab.ask("api/sessions"):
        lab.ask(f"api/sessions/{session['id']}", "DELETE")
