"""The prompt of paused ranks: in the cell that blocks, or below `%cluster debug`."""

from __future__ import annotations

import contextlib
import getpass
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from ..errors import RunError
from ..members import ranges
from ..messages import Stopped
from .paused import GO_ON, NO_PROMPT, Paused, Reply, everyone

HELP = (
    "w u d l p pp a locals n s c q, or any expression; `rank 2` looks at another paused rank, "
    "`all c` speaks to all of them, `leave` closes this prompt"
)


def attend(draw: Callable[[], object] = lambda: None) -> None:
    """See to whatever ranks are paused; for a main thread that waits for a cell's end.

    Args:
        draw: Shows what the cell has printed so far.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for paused in everyone():
        able = can_prompt()
        paused.attended(can_prompt=able)
        stops = paused.stops
        if not stops or paused.prompting:
            continue
        reason = NO_PROMPT
        if able:
            reason = "the prompt was left"
            draw()
            try:
                Prompt(paused, draw).converse(min(stops))
            except Exception as error:  # a front end that cannot ask after all
                reason = f"the prompt failed ({type(error).__name__}: {error})"
        for engine in paused.stops:  # after `leave` too: nobody could come back while this blocks
            paused.go_on(engine, reason)
        paused.attended(can_prompt=able)


@contextlib.contextmanager
def attending(blocks: bool) -> Iterator[None]:
    """Send a cell and wait for it in the block: a rank may pause before the wait has begun.

    It is then told what it would be told later.

    Args:
        blocks: Whether this thread will wait for the cell; else nothing is done.
    """
    blocks = blocks and threading.current_thread() is threading.main_thread()
    promised = everyone() if blocks else []
    for paused in promised:
        paused.promise(can_prompt=can_prompt())
    try:
        yield
    finally:
        for paused in promised:
            paused.promise_over()


def unattended() -> None:
    """Take note that no cell blocks any more: who pauses now waits for `%cluster debug`."""
    if threading.current_thread() is threading.main_thread():
        for paused in everyone():
            paused.unattended()


class Prompt:
    """Reads commands for paused ranks.

    Args:
        draw: Called after each command, to show what the cells print.
    """

    def __init__(self, paused: Paused, draw: Callable[[], object] = lambda: None) -> None:
        self._paused, self._draw = paused, draw
        self._lock = threading.Lock()
        self._reading: int | None = None
        self._poked = False

    def converse(self, engine: int) -> None:
        """Read commands and have them obeyed until nobody is paused, or `leave`."""
        paused = self._paused
        paused.prompting, paused.on_drop = True, self._dropped
        shown: int | None = None
        try:
            while stops := paused.settled():
                stop = stops.get(engine) or stops[min(stops)]
                engine = stop.engine
                if stop.asks == "debugger" and shown != engine:
                    self._introduce(stop, stops)
                shown = engine
                line = self._read(stop)
                if line is None:
                    continue
                if line.strip() == "leave":
                    return
                engine = self._obey(stop, line)
                self._draw()
        except EOFError:
            return
        finally:
            paused.prompting, paused.on_drop = False, lambda engine: None

    @staticmethod
    def _introduce(stop: Stopped, stops: dict[int, Stopped]) -> None:
        others = [engine for engine in stops if engine != stop.engine]
        also = f"; paused too: {ranges(others)}" if others else ""
        say(f"rank {stop.engine} is paused at {stop.where}{also}\n{stop.text}({HELP})\n")
        if not others:
            patience = _spell(stop.patience_s)
            say(f"(ranks that wait for this one in a collective do so for {patience})\n")

    def _dropped(self, engine: int) -> None:
        """Take the prompt away from a rank that was let go; called on the router's thread."""
        with self._lock:
            if self._reading == engine and not self._poked:
                self._poked = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _read(self, stop: Stopped) -> str | None:
        """Return the user's line; None when the rank was let go meanwhile."""
        text = f"rank {stop.engine}: {stop.text}"
        prompt = f"rank {stop.engine}> " if stop.asks == "debugger" else text
        self._poked = False
        try:
            with self._lock:
                self._reading = stop.engine
            try:
                if stop.engine not in self._paused.stops:
                    return None
                return getpass.getpass(prompt) if stop.asks == "password" else input(prompt)
            finally:
                with self._lock:
                    self._reading = None
        except KeyboardInterrupt:
            self._reading = None
            if not self._poked:
                raise
            say(f"rank {stop.engine} is no longer paused\n")
            return None

    def _obey(self, stop: Stopped, line: str) -> int:
        """Do what a line says; return which rank is looked at next."""
        paused, engine, words = self._paused, stop.engine, line.split()
        if stop.asks != "debugger":
            self._tell(engine, line)
        elif words[:1] == ["ranks"]:
            for one in paused.stops.values():
                say(f"rank {one.engine}: {one.where}\n")
        elif words[:1] == ["rank"] and len(words) == 2:
            if words[1].isdecimal() and int(words[1]) in paused.stops:
                return int(words[1])
            say(f"rank {words[1]} is not paused; {paused.names()} are\n")
        elif words[:1] == ["all"] and len(words) > 1:
            self._obey_all(line.split(None, 1)[1])
        else:
            self._obey_one(engine, line)
        return engine

    def _obey_all(self, line: str) -> None:
        engines = list(self._paused.stops)
        replies: dict[int, Reply] = {}

        def tell(engine: int) -> None:
            replies[engine] = self._tell(engine, line)

        # At once: a step over a collective ends only when all ranks take it.
        threads = [threading.Thread(target=tell, args=(e,), daemon=True) for e in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
        for engine in engines:
            if text := replies[engine].text:
                say(f"rank {engine}: {text}")

    def _obey_one(self, engine: int, line: str) -> None:
        reply = self._tell(engine, line)
        say(reply.text)
        words, others = line.split(), [e for e in self._paused.stops if e != engine]
        if not reply.paused and others and words and words[0] not in GO_ON:
            say(
                f"(rank {engine} goes on and has not stopped again: it may be waiting in a "
                f"collective for {ranges(others)}, still paused; `all {line}` takes all along)\n"
            )

    def _tell(self, engine: int, line: str) -> Reply:
        try:
            return self._paused.tell(engine, line)
        except RunError as error:
            return Reply(f"{error.what}\n", paused=False)


def can_prompt() -> bool:
    """Whether `input()` would reach somebody: nbconvert, papermill and tests cannot answer."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return bool(getattr(kernel, "_allow_stdin", False))
    return sys.stdin is not None and sys.stdin.isatty()


def _spell(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"


def say(text: str) -> None:
    """Write below the notebook's cell."""
    sys.stdout.write(text)
    sys.stdout.flush()
