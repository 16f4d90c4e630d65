"""The server as Binder starts it, and kernels behind it, spoken to as a browser does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from memory import MARK, marked
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

ROOT = Path(__file__).resolve().parents[1]
MESSAGE_LIMIT_BYTES = 100_000_000
KERNEL_LIMIT_S = 60
END_LIMIT_S = 15
LOG_LINES = 30


class CheckError(Exception):
    """What was promised of the image does not hold; the message says what."""


class Server:
    """JupyterLab on this machine alone.

    Attributes:
        mark: What everything that is started from here has in its environment.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        command = [
            "jupyter-lab", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
            "--no-browser", "--allow-root",
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=ROOT,
            # Not among the arguments: everybody on the machine can read those.
            env={**os.environ, MARK: self.mark, "JUPYTER_TOKEN": self.token},
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the server and, whatever went wrong, everything else that carries the mark."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT_S)
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        if kind is not None:
            self._log.seek(0)
            sys.stderr.writelines(self._log.readlines()[-LOG_LINES:])
        self._log.close()

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request of Jupyter's REST API; return what it answers."""
        request = HTTPRequest(
            f"http://{self.address}/api/{path}", method=method, request_timeout=KERNEL_LIMIT_S,
            headers={"Authorization": f"token {self.token}"},
            body=None if body is None else json.dumps(body),
        )  # fmt: skip
        answer = await AsyncHTTPClient().fetch(request)
        return json.loads(answer.body) if answer.body else None

    async def wait(self, limit_s: float) -> float:
        """Wait until it answers; return how long that took.

        Raises:
            CheckError: It ended, or did not answer in time.
        """
        while (took_s := time.monotonic() - self.began) < limit_s:
            if self.process.poll() is not None:
                raise CheckError(f"jupyter-lab ended with status {self.process.returncode}")
            with contextlib.suppress(OSError):
                await self.ask("GET", "status")
                return took_s
            await asyncio.sleep(0.05)
        raise CheckError(f"jupyter-lab did not answer within {limit_s:.0f} s")


class Kernel:
    """A notebook's kernel behind the server, spoken to over its websocket as a browser does."""

    def __init__(self, server: Server, session: dict[str, Any]) -> None:
        self.server = server
        self.session = session
        self.id = session["kernel"]["id"]
        self._socket: WebSocketClientConnection | None = None

    @classmethod
    async def start(cls, server: Server, path: str) -> Kernel:
        """Open a notebook's session, which starts its kernel in the notebook's folder."""
        asked = {"path": path, "name": Path(path).name, "type": "notebook",
                 "kernel": {"name": "python3"}}  # fmt: skip
        kernel = cls(server, await server.ask("POST", "sessions", asked))
        kernel._socket = await websocket_connect(
            f"ws://{server.address}/api/kernels/{kernel.id}/channels?token={server.token}",
            max_message_size=MESSAGE_LIMIT_BYTES,
        )
        await asyncio.wait_for(kernel.execute("pass"), KERNEL_LIMIT_S)
        return kernel

    async def execute(self, code: str) -> str:
        """Run one cell to its end; return its error, or "" where there was none."""
        assert self._socket is not None
        number = uuid.uuid4().hex
        header = {"msg_id": number, "msg_type": "execute_request", "version": "5.3",
                  "username": "", "session": "check", "date": ""}  # fmt: skip
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False,
                   "user_expressions": {}, "stop_on_error": True}  # fmt: skip
        await self._socket.write_message(json.dumps({
            "header": header, "parent_header": {}, "metadata": {}, "content": content,
            "channel": "shell", "buffers": [],
        }))  # fmt: skip
        error, awaited = "", {"reply", "idle"}
        while awaited:
            text = await self._socket.read_message()
            if text is None:
                return "the connection to the kernel was closed: it died, for want of memory?"
            message = {} if isinstance(text, bytes) else json.loads(text)
            if message.get("parent_header", {}).get("msg_id") != number:
                continue
            kind, said = message["msg_type"], message["content"]
            if kind == "error" or said.get("status") == "error":
                error = f"{said['ename']}: {said['evalue']}"
            if kind == "status" and said["execution_state"] == "idle":
                awaited.discard("idle")
            elif kind == "execute_reply":
                awaited.discard("reply")
        return error

    async def close(self) -> None:
        """Shut the kernel down, as "Shut Down Kernel" does."""
        if self._socket:
            self._socket.close()
        await self.server.ask("DELETE", f"sessions/{self.session['id']}")
