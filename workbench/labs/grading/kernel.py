"""The kernel that runs students' cells: ipykernel's, with a way in for the grader.

Code that begins with the secret of this run is not a cell but a request to `inside`. It is answered
without using any name of the notebook, and its result is part of the kernel's reply.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from . import processes
from .inside import Inside, cut
from .processes import Limits, bound_this_process

_given: dict[str, Any] = {}


class GradingKernel(IPythonKernel):
    """Answers the grader's requests, and cuts the message of a cell's error."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._nonce = _given.pop("nonce")
        self._inside: Inside | None = None

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, Any] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: dict[str, Any] | None = None,
        cell_id: str | None = None,
    ) -> dict[str, Any]:
        """Run a cell, or answer the grader."""
        if code.startswith(self._nonce):
            return self._answer(json.loads(code[len(self._nonce) :]))
        reply: dict[str, Any] = await super().do_execute(  # type: ignore[no-untyped-call]
            code, silent, store_history, user_expressions, allow_stdin
        )
        if reply.get("status") == "error":
            reply["ename"], reply["evalue"] = cut(reply.get("ename")), cut(reply.get("evalue"))
            reply["traceback"] = []
        return {**reply, "payload": [], "user_expressions": {}}

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        try:
            if self._inside is None:
                assert self.shell is not None
                self._inside = Inside(self.shell.user_ns)
                answer = {"ready": True}
            else:
                answer = self._inside.answer(asked)
        except BaseException as error:  # without a reply the grader would wait for one
            answer = {"failed": cut(f"{type(error).__name__}: {error}")}
        return {
            "status": "ok", "execution_count": 0, "payload": [], "user_expressions": {},
            self._nonce: answer,
        }  # fmt: skip


def main() -> None:
    """Read the grader's settings from standard input, close it, and become the kernel."""
    processes.die_with_parent()
    _given.update(json.loads(sys.stdin.readline()))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    bound_this_process(Limits(**_given.pop("limits")))
    IPKernelApp.launch_instance(
        argv=["-f", _given.pop("connection"), "--HistoryManager.enabled=False"],
        kernel_class=GradingKernel,
    )


if __name__ == "__main__":
    main()  # not this `__main__`: a student's cells are the notebook's
