"""What a front end receives of a run: in any Jupyter, and where Colab and Kaggle are simulated.

No test runs on these services. Their variables are set, Colab's module is a stub, and `/dev/shm`
has 64 MiB where the system lets a process have one of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

pytestmark = [pytest.mark.cluster, pytest.mark.torch]

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
MANAGER = "https://colab.example/manager.js"
SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
COLAB = f"""
enabled = 0
class _widgets:
    _installed_url = None
def enable_custom_widget_manager():
    global enabled
    enabled += 1
    _widgets._installed_url = "{MANAGER}"
"""
START = """import importlib.machinery, os, sys, types
forked = []
os.register_at_fork(before=lambda: forked.append(1))
torch = sys.modules["torch"] = types.ModuleType("torch")  # a kernel that has initialised CUDA
torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
%load_ext workbench
import workbench as wb
%cluster start 2 --devices cpu"""
TRAIN = """%%distributed mirrored --steps 60 --inject slow=1:30ms FLAGS
import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(2048, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01))"""
FORKS = """print("forks", len(forked))
import os
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
shm = os.statvfs("/dev/shm")
print("then", len(forked), "shm MiB", shm.f_blocks * shm.f_frsize >> 20)"""


@dataclass
class Heard:
    """The messages of one cell, in their order, and its error."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [one["content"] for one in self.messages if one["msg_type"] in kinds]

    @property
    def displays(self) -> list[dict[str, Any]]:
        return self.of("display_data", "execute_result", "update_display_data")

    @property
    def text(self) -> str:
        return "".join(one["text"] for one in self.of("stream"))


def run(client: Any, source: str) -> Heard:
    heard = Heard()
    answer = client.execute_interactive(
        source, timeout=LIMIT_S, allow_stdin=False, output_hook=heard.messages.append
    )["content"]
    if answer["status"] != "ok":
        heard.error = f"{answer.get('ename')}: {answer.get('evalue')}"
    return heard


@pytest.fixture(params=["jupyter", "colab", "kaggle"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A kernel with the variables of a service; its name, and a client."""
    name = request.param
    env = {k: v for k, v in os.environ.items() if not k.startswith(("COLAB_", "KAGGLE_"))}
    paths = [str(REPOSITORY), *filter(None, [env.get("PYTHONPATH")])]
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    if name == "colab":
        package = tmp_path / "stubs" / "google" / "colab"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "output.py").write_text(COLAB)
        paths.append(str(tmp_path / "stubs"))
        env |= {"COLAB_RELEASE_TAG": "release-colab_20260819", "COLAB_GPU": ""}
    if name == "kaggle":
        env |= {
            "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
            "KAGGLE_URL_BASE": "https://kaggle.example",
        }
        if _may_mount():
            argv = ["unshare", "-m", "sh", "-c", f'{SHM} && exec "$@"', "sh", *argv]
    spec = tmp_path / "specs" / "here"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": name, "language": "python"})
    )
    env["PYTHONPATH"] = os.pathsep.join(paths)
    specs = KernelSpecManager(kernel_dirs=[str(tmp_path / "specs")], ensure_native_kernel=False)
    manager = KernelManager(kernel_name="here", kernel_spec_manager=specs)
    manager.start_kernel(cwd=str(tmp_path), env=env)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield name, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


def _may_mount() -> bool:
    """Whether a process may have a `/dev/shm` of its own here: as root, outside most containers."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "sh", "-c", SHM], capture_output=True, check=False, timeout=10
    )
    return tried.returncode == 0


def test_a_run_can_be_read_by_any_front_end(place: tuple[str, Any]) -> None:
    name, client = place
    start = run(client, START)
    assert not start.error, start.error
    assert (f"Workbench on {name.title()}" in start.text) == (name != "jupyter"), start.text
    cells = [run(client, TRAIN.replace("FLAGS", flags)) for flags in ("", "--plot svg")]
    assert not [cell.error for cell in cells if cell.error]
    auto, pictures = cells

    widgets = [one for one in auto.displays if WIDGET in one["data"]]
    assert len(widgets) == (0 if name == "kaggle" else 1)
    for one in widgets:  # with a picture and words for front ends without widgets
        assert one["data"]["text/plain"].strip()
        assert one["data"]["image/png"]
        manager = one["metadata"].get(WIDGET, {}).get("colab", {}).get("custom_widget_manager")
        assert manager == ({"url": MANAGER} if name == "colab" else None)
        kept = [
            update
            for update in auto.of("update_display_data")
            if update["transient"] == one["transient"]
        ]
        assert "image/png" in kept[-1]["data"]
        assert WIDGET not in kept[-1]["data"]

    for cell in (pictures, auto) if name == "kaggle" else (pictures,):
        steps = _steps(cell)
        assert len(steps) >= 3  # progress without widgets
        assert steps == sorted(steps)
    for cell in (start, *cells):
        for one in cell.displays:
            assert set(one["data"]) & {"text/plain", "text/html"}
            assert _addresses(one["data"]) <= {"http://www.w3.org"}  # names in SVG, not loaded

    last = run(client, FORKS)
    assert "forks 0\n" in last.text  # engines come from the warm parent, never from this process
    assert "then 1 " in last.text
    if name == "kaggle" and _may_mount():
        assert "shm MiB 64" in last.text
    assert "cluster stopped" in run(client, "%cluster stop").text


def _steps(cell: Heard) -> list[int]:
    """The steps that the updates of a run's picture speak of, each once."""
    told = [one["data"].get("text/plain", "") for one in cell.of("update_display_data")]
    found = [int(match[1]) for text in told if (match := re.search(r"step (\d+) of 60", text))]
    return list(dict.fromkeys(found))


def _addresses(data: dict[str, Any]) -> set[str]:
    words = " ".join(str(value) for kind, value in data.items() if kind != "image/png")
    return set(re.findall(r"https?://[^/\s\"')]+", words))
