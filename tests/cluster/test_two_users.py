"""Two users on one machine at once: no clash, and neither gets at the other's cluster.

Where the tests run as root the second user is `nobody`; elsewhere it is another home folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

ROOT = Path(__file__).parents[2]
NOBODY = 65534
USER = """
    import json, os, sys
    sys.path[:0] = [{tests!r}, {root!r}]
    import listening, workbench as wb
    from workbench.cluster import folders

    CELL = '''
    import torch
    from torch import nn
    wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
           loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS)
    '''
    def say(**what):
        print(json.dumps(what), flush=True)

    with wb.Cluster(2) as cluster:
        run = cluster.run(CELL.replace("STEPS", "10**7"), strategy="central_storage")
        while run.history.totals.steps < 3 and not run.is_over:
            pass
        say(uid=os.getuid(), folder=str(cluster.engine_set.folder()), run=str(run.folder),
            ports=sorted({{port for _, _, port in listening.open_ports()}}),
            sockets=sorted(s for s in listening.unix_sockets() if s.startswith("/")),
            engines=len(folders.engines()), error=str(run.error or ""))
        other = json.loads(sys.stdin.readline())
        reached = []
        for path in (other["folder"], other["run"]):
            try:
                reached += os.listdir(path)
            except OSError:
                pass
        swept = [str(path) for path in folders.sweep()]
        say(reached=reached, swept=swept, ours=folders.is_ours(other["folder"]))
        sys.stdin.readline()
        run.stop()
        say(state=run.wait(60).state, rejected=cluster.rejected)
"""


class Person:
    """A user with a notebook's kernel."""

    def __init__(self, home: Path, uid: int | None) -> None:
        home.mkdir()
        words = [sys.executable, "-c", _code()]
        if uid is not None:
            os.chown(home, uid, uid)
            words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *words]
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "LANG")}
        self.kernel = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            env={**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        assert self.kernel.stdout is not None
        return json.loads(self.kernel.stdout.readline())  # type: ignore[no-any-return]

    def tell(self, **what: Any) -> None:
        assert self.kernel.stdin is not None
        self.kernel.stdin.write(json.dumps(what) + "\n")
        self.kernel.stdin.flush()


def _code() -> str:
    return textwrap.dedent(USER).format(tests=str(ROOT / "tests"), root=str(ROOT))


def _can_be_nobody() -> bool:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        return False
    # A virtual environment in root's home, or a container's /dev, may be out of nobody's reach.
    code = "import os, subprocess, sys, torch; open(os.devnull, 'r+b'); "
    code += "subprocess.run([sys.executable, '-c', ''], check=True)"
    words = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", sys.executable, "-c", code]
    return subprocess.run(words, cwd="/", capture_output=True, check=False).returncode == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody can pass through; pytest's own are this user's alone."""
    with tempfile.TemporaryDirectory(prefix="two-users-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def test_two_users_at_once_share_nothing(place: Path) -> None:
    switched = _can_be_nobody()
    people = [Person(place / "one", None), Person(place / "two", NOBODY if switched else None)]
    try:
        first, second = (person.hear() for person in people)
        assert (first["error"], second["error"]) == ("", "")
        assert (first["uid"] != second["uid"]) == switched
        assert first["folder"] != second["folder"]
        assert first["run"] != second["run"]
        assert not set(first["ports"]) & set(second["ports"])
        assert not set(first["sockets"]) & set(second["sockets"])
        # Each counts its own; without another user they are the same person's.
        assert second["engines"] == 3 or not switched  # two workers and a server
        people[0].tell(**second)
        people[1].tell(**first)
        looked, tried = (person.hear() for person in people)
        assert (looked["swept"], tried["swept"]) == ([], [])
        if switched:
            assert tried == {"reached": [], "swept": [], "ours": False}
            assert not looked["ours"]
        for person in people:
            person.tell()
        ends = [person.hear() for person in people]
        assert ends == [{"state": "stopped", "rejected": 0}] * 2
        assert [person.kernel.wait(60) for person in people] == [0, 0]
    finally:
        for person in people:
            person.kernel.kill()
            person.kernel.wait()
