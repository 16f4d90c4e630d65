"""The fault lab: what `--inject` and `run.inject` do, by sliders, on the run that goes on."""

from __future__ import annotations

from ..errors import PlanError, RunError
from ..faults import Fault, parse_fault
from ..session.run import Run
from .live import LivePart
from .part import Part, Wire, action

SLOWEST_MS, SLOWEST_FACTOR, JITTER_MS, LATENCY_MS = 500.0, 10.0, 200.0, 200.0
SLOWEST_LINK, FASTEST_LINK = 1e5, 1e10


class FaultsPart(Part):
    """Sliders per worker and for the links; each change takes the place of what was there."""

    name = "faults"

    def wire(self) -> Wire:
        """What is injected at the moment, and into whom it can be."""
        run = self._live().run()
        if run is None or run.is_over:
            return {"live": False, "faults": [], "inject": ""}
        faults = [parse_fault(text) for text in run.faults]
        return {
            "live": True,
            "run": run.name,
            "links": run.plan.entry.links,
            "workers": [
                {"rank": rank, "engine": engine, **_slowness(faults, rank)}
                for rank, engine in enumerate(run.engines)
            ],
            "jitter_ms": _of(faults, "jitter", "delay_s", 1e3),
            "latency_ms": _of(faults, "latency", "delay_s", 1e3),
            "bytes_per_s": _of(faults, "bandwidth", "bytes_per_s", 1.0) or None,
            "inject": " ".join(f"--inject {text}" for text in run.faults),
            "faults": list(run.faults),
        }

    @action()
    def slow(self, rank: int, ms: float | None = None, factor: float | None = None) -> None:
        """Slow one worker by milliseconds, or by a factor of its own compute; 0 or 1: not."""
        run, worker = self._going_on(), int(rank)
        kept = [one for one in _now(run) if not (one.kind == "slow" and one.rank == worker)]
        if factor is not None:
            by = _number("factor", factor, 1.0, SLOWEST_FACTOR)
            new = [Fault("slow", worker, factor=by)] if by > 1 else []
        else:
            delay = _number("ms", ms, 0.0, SLOWEST_MS)
            new = [Fault("slow", worker, delay_s=delay / 1e3)] if delay else []
        run.inject(*(one.text for one in (*kept, *new)))

    @action()
    def everyone(
        self,
        jitter_ms: float | None = None,
        latency_ms: float | None = None,
        bytes_per_s: float | None = None,
        clear: str = "",
    ) -> None:
        """Set what concerns every worker; `clear` names one of jitter, latency, bandwidth."""
        run, asked = self._going_on(), [Fault("clear")]
        if jitter_ms is not None:
            delay = _number("jitter_ms", jitter_ms, 0.0, JITTER_MS)
            asked.append(Fault("jitter", delay_s=delay / 1e3))
        if latency_ms is not None:
            delay = _number("latency_ms", latency_ms, 0.0, LATENCY_MS)
            asked.append(Fault("latency", delay_s=delay / 1e3))
        if bytes_per_s is not None:
            rate = _number("bytes_per_s", bytes_per_s, SLOWEST_LINK, FASTEST_LINK)
            asked.append(Fault("bandwidth", bytes_per_s=rate))
        replaced = {clear, *(one.kind for one in asked)}
        kept = [one for one in _now(run) if one.kind not in replaced]
        new = [one for one in asked if one.delay_s or one.bytes_per_s]
        run.inject(*(one.text for one in (*kept, *new)))

    @action()
    def kill(self, rank: int) -> None:
        """End a worker's process before its next step (SIGKILL)."""
        run = self._going_on()
        run.inject(*run.faults, f"kill={int(rank)}@0")

    @action()
    def clear(self) -> None:
        """Take all faults back."""
        self._going_on().inject()

    def _live(self) -> LivePart:
        part = self.panel.parts["live"]
        assert isinstance(part, LivePart)
        return part

    def _going_on(self) -> Run:
        run = self._live().run()
        if run is None or run.is_over:
            raise RunError(
                "Faults are for a run that goes on.", next_step="start one: Run", code="WB-RUN-054"
            )
        return run


def _now(run: Run) -> list[Fault]:
    return [parse_fault(text) for text in run.faults]


def _slowness(faults: list[Fault], rank: int) -> dict[str, float]:
    for fault in faults:
        if fault.kind == "slow" and fault.rank == rank:
            return {"ms": fault.delay_s * 1e3, "factor": fault.factor}
    return {"ms": 0.0, "factor": 1.0}


def _of(faults: list[Fault], kind: str, name: str, scale: float) -> float:
    return next((float(getattr(f, name)) * scale for f in faults if f.kind == kind), 0.0)


def _number(name: str, value: object, low: float, high: float) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise PlanError(
            f"{name} is out of range.",
            seen=value,
            allowed=f"a number from {low:g} to {high:g}",
            code="WB-PLAN-072",
        )
    return number
