"""A little of what VS Code does when it attaches to debugpy."""

from __future__ import annotations

import json
import socket
from typing import Any


class DapClient:
    """Speaks the Debug Adapter Protocol over one connection."""

    def __init__(self, port: int, timeout_s: float = 20.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._file = self.socket.makefile("rb")
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command}
        data = json.dumps({**message, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return self._number

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the body of its answer."""
        return self.answer(self.send(command, **arguments))

    def answer(self, number: int) -> dict[str, Any]:
        while number not in self._answers:
            self._read()
        answer = self._answers.pop(number)
        assert answer["success"], answer
        return answer.get("body") or {}

    def event(self, name: str) -> dict[str, Any]:
        """Return the next event with this name."""
        while True:
            for event in self.events:
                if event["event"] == name:
                    self.events.remove(event)
                    return event.get("body") or {}
            self._read()

    def _read(self) -> None:
        size = 0
        while (line := self._file.readline().strip()) or not size:
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        message = json.loads(self._file.read(size))
        if message["type"] == "response":
            self._answers[message["request_seq"]] = message
        elif message["type"] == "event":
            self.events.append(message)

    def attach(self) -> None:
        """Attach as `launch.json` says, with no breakpoints set."""
        self.ask("initialize", adapterID="debugpy", clientID="test")
        attached = self.send("attach", justMyCode=False)
        self.event("initialized")
        self.ask("configurationDone")
        self.answer(attached)
