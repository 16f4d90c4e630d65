"""Stand-ins for the clients of platforms, on PATH before the real ones; and a small job folder.

Each is a shell script that answers what it was told to, and notes the words it was called with.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.export.envelopes import Resources
from workbench.shared.plan import make_plan

ONE = Resources()


class Clients:
    """Programs in a folder of their own, which is the beginning of PATH."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder / "bin", patch
        self.folder.mkdir()
        self._calls = folder / "calls.txt"
        self._rules: dict[str, list[str]] = {}
        patch.setenv("PATH", f"{self.folder}{os.pathsep}{os.environ['PATH']}")

    def only(self) -> None:
        """Leave no other programs on PATH."""
        self._patch.setenv("PATH", str(self.folder))

    def says(self, program: str, words: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Have a program answer, where its words are these (a pattern of the shell's)."""
        answer = f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(err)} >&2; exit {code}"
        self.does(program, words, answer)

    def does(self, program: str, words: str, script: str) -> None:
        """Have a program do something; what was said last counts."""
        rules = self._rules.setdefault(program, [])
        pattern = "*".join(shlex.quote(part) if part else "" for part in words.split("*"))
        rules.insert(0, f"  {pattern})\n{script}\nexit;;")
        self.script(program, "\n".join([
            "#!/bin/sh",
            f'printf "%s\\n" "{program} $*" >> {shlex.quote(str(self._calls))}',
            'case "$*" in', *rules, "esac",
            f'echo "{program}: unexpected: $*" >&2; exit 99', "",
        ]))  # fmt: skip

    def script(self, program: str, text: str) -> None:
        """Make a program."""
        path = self.folder / program
        path.write_text(text)
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """How the programs were called, in order."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []


def small_job(folder: Path, train: str = "print('hello')\n", *, name: str = "digits") -> Path:
    """Write what `read_job` asks of a job folder."""
    plan = make_plan(Recipe("pass"), "one_device", workers=1)
    launch = {"workers": 1, "servers": 0, "processes": 1, "framework": "torch"}
    about = {"format": "workbench-job/1", "name": name, "framework": "torch",
             "plan": plan.to_wire(), "seed": 0, "pins": {}, "launch": launch}  # fmt: skip
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "train.py").write_text(train)
    return folder


def handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    """Hand out stand-ins for clients; a fixture where a test file makes it one."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return Clients(tmp_path, monkeypatch)


def folder_with(where: Path, *files: str) -> Path:
    """A job folder with files of an envelope."""
    folder = small_job(where / "job")
    for name in files:
        (folder / name).write_text("#\n")
    return folder
