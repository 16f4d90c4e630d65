"""The process next to rank 0 that controls a job, as a notebook's kernel controls its engines.

It sends each rank its part and writes all records to the run's folder. It obeys signed orders in
this folder, agrees with the ranks on a Stop, names the rank that caused an error, and ends with the
job. Followers of the run read the folder or the marked lines.

    rank 0 ── job, processes ──> main ── parts ──> rank 0       (a socket pair, lines of JSON)
    ranks ── records, outcomes ──> ControlRouter ──> JobRun ──> DIR/runs/N
    DIR/runs/N/control ── signed orders ──> Inbox ──> JobRun.stop, pause, ...
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil

from ..cluster.calls import Call
from ..cluster.engines import EngineInfo
from ..cluster.hosts.gpus import HostDevices
from ..cluster.hosts.wire import HostFacts
from ..cluster.router import ControlRouter
from ..cookbook.recipe import Recipe
from ..devices import leases as device_pool
from ..devices.discovery import Device, Survey
from ..errors import RunError, WorkbenchError
from ..execution.logging_to import await_all
from ..execution.outcome import outcome_error, outcome_notes
from ..execution.requests import make_specs, members_of, run_requests
from ..execution.run import Run
from ..execution.task import Task
from ..execution.workers import hangs, replacing
from ..history import disk
from ..session import checkpoints
from ..shared import cluster_env, events
from ..shared.messages import (
    AskedToEnd,
    CellEnded,
    CellOutcome,
    Happened,
    Hello,
    Interrupt,
    Position,
    Records,
    Up,
)
from ..shared.plan import Plan, make_plan
from ..shared.protocol import control_key
from .control import Inbox, Order, make_key
from .earlier import ALIVE, ALIVE_S, GONE_S, goes_on, runs_in
from .frames import LineWriter
from .progress import KubeflowProgress

log = logging.getLogger("workbench.jobs")
RUNS = "runs"
TOKEN = "token"
EVENTS = "events-rankjob.jsonl"
"""Stream name of the conductor; it is read like those of the ranks."""
TURN_S = 0.1
DIED = (
    "look for the reason in the platform's log (out of memory, time limit, failed host); with "
    "--checkpoint, a restarted job continues from its checkpoint"
)
WORDS_S = 1.0
"""Time after a process's end during which its last message can still arrive."""
LINES = "WORKBENCH_LOG_LINES"
"""If it is 1, records are also printed to standard output as marked lines."""
RESUME = "WORKBENCH_RESUME"
"""`0`: begin from the start, even if an interrupted earlier run of the job has checkpoints."""
LISTEN = "WORKBENCH_JOB_LISTEN"
"""The address that ranks on other hosts use; by default the address of the route to the store."""


class JobRun(Run):
    """The run of a job, recorded in its folder.

    Attributes:
        job: Further data about the job in `run.json`: the place and the writer of its records.
    """

    def __init__(self, plan: Plan, *, job: dict[str, Any], **about: Any) -> None:
        self.job = job
        super().__init__(plan, **about)

    def meta(self) -> dict[str, Any]:
        """The content of `run.json` about the run."""
        return {**super().meta(), "job": self.job}

    def note(self, text: str, deaths: Sequence[int] = ()) -> None:
        """Add a note for the user, also for followers of the run."""
        super().note(text, deaths)
        self._write(events.Noted(text=text, deaths=list(deaths)))

    def inject(self, *faults: str) -> None:
        """Replace the run's faults while it trains."""
        super().inject(*faults)
        self._write(events.Injected(faults=list(faults)))

    def tell(self, event: events.Event) -> None:
        """Add an event, also for followers of the run."""
        self.history.event(event)
        self._write(event)

    def _write(self, event: events.Event) -> None:
        disk.add_event(self.folder, event, EVENTS)


class JobEngines:
    """A job's processes with the methods of engines that a `Task` needs.

    Args:
        processes: The report of each process about itself, by rank.
    """

    def __init__(self, processes: Sequence[Mapping[str, Any]], router: ControlRouter) -> None:
        self.router = router
        self.engines = {
            int(one["rank"]): EngineInfo(
                int(one["rank"]), "", int(one["pid"]), str(one["host"]), str(one["place"]),
                str(one["address"]), str(one["python"]), began=float(one["began"]),
            )
            for one in processes
        }  # fmt: skip
        self.calls: dict[int, Call] = {}

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Requests are sent together with the parts."""
        return contextlib.nullcontext()

    def submit(self, engine: int, what: str, args: Any, output: Any) -> Call:
        """Return the call that ends with the process's outcome."""
        self.calls[engine] = Call(engine)
        return self.calls[engine]

    def interrupt(self, engines: Iterable[int]) -> None:
        """Let the processes interrupt themselves; their control threads always run."""
        for engine in engines:
            self.router.send(engine, Interrupt())

    def signal(self, engine: int, number: int) -> None:
        """Signal a process of this host if its pid still belongs to the same process."""
        if (process := self._process(engine)) is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def give_up(self, engine: int) -> None:
        """Mark a process as dead."""
        self.died(engine, "no longer answers")

    def died(self, engine: int, what: str) -> None:
        """Settle the call of a process that has ended."""
        one = self.engines[engine]
        where = f" on {one.host}" if one.elsewhere else ""
        words = f"Its process (pid {one.pid}{where}) {what}."
        self.calls[engine].finish(
            CellOutcome(status="died", ename="ClusterError", evalue=words, how=what)
        )

    def host_of(self, engine: int) -> None:
        """A job has no agents."""

    def gone(self) -> list[int]:
        """Return the processes of this host that have ended without a message."""
        mine = [i for i, one in self.engines.items() if one.is_here]
        return [i for i in mine if not self.calls[i].done.is_set() and self._process(i) is None]

    def _process(self, engine: int) -> psutil.Process | None:
        info = self.engines[engine]
        if not info.is_here:
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(info.pid)
            same = abs(process.create_time() - info.began) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        return None


class Conductor:
    """One job from its start to its end.

    Args:
        asked: The message of rank 0: `job`, `store`, `key`, `processes`.

    Raises:
        WorkbenchError: The job cannot begin.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._job, self._processes = asked["job"], list(asked["processes"])
        # A host that joined later counts from 0.
        self._attempt = max(int(one["attempt"]) for one in self._processes)
        self.plan = _plan_of(self._job, len(self._processes))
        self._beside = ""
        self.folder, resume_from = self._place()
        places = [str(one["place"]) for one in self._processes]
        self._several = len(set(places)) > 1
        self._store = asked["store"]
        if self._several and self._store:
            self._store = self._meeting_place()
        leases = self._leases()
        self.plan.check_devices([one.word for one in leases.leases])
        listen = self._listening()
        self._key = str(asked["key"])  # what all processes know; empty: nothing
        self._left, self._printed = threading.Event(), False
        self._gone_at: dict[int, float] = {}
        key = control_key(self._key) if self._key else None
        self.router = ControlRouter(self._hear, listen, key, secret=self._several)
        try:
            self._begin(leases, resume_from)
        except BaseException:
            self.router.close()
            raise

    def _begin(self, leases: device_pool.Leases, resume: str) -> None:
        plan, folder = self.plan, self.folder
        ids = list(range(plan.engines)) * (plan.workers // plan.engines)
        servers = list(range(plan.engines, len(self._processes)))
        self.engines = JobEngines(self._processes, self.router)
        (folder / TOKEN).write_text(token := secrets.token_hex(16))
        self.inbox = Inbox(folder, make_key(folder))
        about = {
            "attempt": self._attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "preempted": False,
            "checkpoints": Path(plan.checkpoint).name,
            "resumed_from": Path(resume).name if resume else "",
        }
        self.run = JobRun(
            plan, number=1, name=plan.name or str(self._job.get("name") or plan.strategy),
            engines=ids, devices=[lease.label for lease in leases.leases], folder=folder,
            resume_from=resume, init_from=self._initial(), job=about,
        )  # fmt: skip
        run = self.run
        for text in filter(None, (leases.warning, self._beside)):
            run.note(text)
        run.advance("submit")
        checkpoints.describe(run)
        run.begin_logs()
        here = cluster_env.host_token()
        far = {i: {"far": True} for i, one in self.engines.engines.items() if one.place != here}
        run.far.ranks = {i: ids.index(i) for i in far if i in ids}
        specs = self._specs([*dict.fromkeys(ids), *servers], leases)
        requests = run_requests(run, specs, 1, "")
        self._pin(requests)
        run.open_board(self.router.send, [*run.members, *servers])
        self.task = Task(
            cast(Any, self.engines), requests, members_of(specs, hosts=self._names()),
            self._settled, on_loss=run.note,
            listens=replacing.listener(run, self.router.send, tell=run.tell),
            on_leaving=lambda engine, event: self._preempt(event.reason),
        )  # fmt: skip
        run.begin(self.task)
        hangs.watch(self.task, self.router.questions.ask, lambda: run.held)
        self.parts = [
            {
                "request": {**requests[i], "spec": {**requests[i]["spec"], **far.get(i, {})}},
                "url": self.router.url,
                "key": "" if self._key else self.router.key.hex(),
                "curve": self.router.public_key,
                "run_dir": str(folder),
                "token": token,
                "watches": "script" in self._job,
                "about": {"pid": int(one["pid"]), "host": one["host"], "python": one["python"]},
            }
            for i, one in enumerate(self._processes)
        ]
        self._recorded = ""
        self._record()

    # -- what the parts are made of ----------------------------------------------------------------

    def _place(self) -> tuple[Path, str]:
        """Return the run's folder, and the checkpoint that it continues from; empty: none."""
        root = Path(self._job.get("out") or Path(self._job["folder"]) / RUNS)
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = runs_in(root)
        last = before[-1] if before and self.plan.checkpoint else None
        is_twin = last is not None and goes_on(last)
        resume = ""
        if last is not None and not is_twin and os.environ.get(RESUME, "1") != "0":
            resume = self._unfinished(last)
        for number in range(1 + (int(before[-1].name) if before else 0), 1 << 30):
            with contextlib.suppress(FileExistsError):  # another start has taken this number
                (folder := root / str(number)).mkdir(mode=0o700)
                self._keep_apart(resume, number, is_twin=is_twin)
                return folder, resume
        raise AssertionError("there are enough numbers")

    def _unfinished(self, last: Path) -> str:
        """Return the checkpoint to continue from if the job's last run was interrupted."""
        with contextlib.suppress(WorkbenchError):
            meta = disk.read_meta(last)
            about = meta.get("job") or {}
            cut = meta.get("state") not in events.OVER or about.get("preempted")
            if cut or (self._attempt and meta.get("state") == "failed"):
                kept = Path(self.plan.checkpoint)
                kept = kept.with_name(Path(str(about.get("checkpoints") or "")).name or kept.name)
                found = checkpoints.latest(kept)
                return "" if found is None else str(found.path)
        return ""

    def _keep_apart(self, resume: str, number: int, *, is_twin: bool) -> None:
        """Keep the checkpoints of a new run apart from those of earlier runs.

        Otherwise the next start would continue from the highest step of any run.
        """
        kept = self.plan.checkpoint
        if resume:
            kept = str(Path(resume).parent)
        elif kept and (is_twin or checkpoints.latest(kept) is not None):
            of_number = (f"{kept}-{one}" for one in itertools.count(number))
            kept = next(one for one in of_number if checkpoints.latest(one) is None)
            old, new = Path(self.plan.checkpoint).name, Path(kept).name
            why = "has not ended" if is_twin else f"has checkpoints in {old}"
            self._beside = f"An earlier run {why}, so this run's checkpoints are in {new}."
        self.plan = replace(self.plan, checkpoint=kept)

    def _initial(self) -> str:
        folder = Path(self._job.get("folder") or "/nowhere") / "initial"
        return str(folder) if self.plan.init_from and folder.is_dir() else ""

    def _leases(self) -> device_pool.Leases:
        """Return the devices of each worker: the devices that its process sees."""
        plan = self.plan
        workers = self._processes[: plan.engines]
        if plan.entry.remote_workers:
            workers = self._processes[plan.engines : plan.engines + plan.workers]
        asked = os.environ.get("WORKBENCH_DEVICES", device_pool.AUTO)
        if not self._several:
            found = Survey(_devices(workers[0]), tuple(workers[0]["notes"]))
            return device_pool.lease(asked, plan.workers, found)
        hosts = [
            SimpleNamespace(place=i, name=one["host"], facts=_facts(one))
            for i, one in enumerate(self._processes)
        ]
        devices = HostDevices(asked, plan.framework, lambda: cast(Any, hosts))
        rooms = [devices.room_of(cast(Any, hosts[int(one["rank"])])) for one in workers]
        self._rooms = {i: devices.room_of(cast(Any, one)) for i, one in enumerate(hosts)}
        if plan.entry.one_engine:
            rooms *= plan.workers
        return devices.lease(rooms)

    _rooms: Mapping[int, str] = {}

    def _meeting_place(self) -> tuple[str, int]:
        """Return the store's address; on its host this can be only a loopback address.

        Processes of that host are reached at the same address.
        """
        told = [str(one["store"]) for one in self._processes]
        host = next((one for one in told if not one.startswith("127.")), told[0])
        for one in self._processes:
            if host in one["addresses"]:
                one["address"] = host
        return host, int(self._store[1])

    def _listening(self) -> str:
        if not self._several:
            return "127.0.0.1"
        return os.environ.get(LISTEN) or str(self._processes[0]["address"])

    def _specs(self, ids: Sequence[int], leases: device_pool.Leases) -> Any:
        plan, store = self.plan, self._store
        specs = make_specs(
            {i: str(self._processes[i]["place"]) for i in ids},
            plan.workers,
            leases,
            store=(str(store[0]), int(store[1])) if store else None,
            framework=plan.framework,
            prefix=f"job-{self._attempt}-{secrets.token_hex(4)}/",
            one_engine=plan.entry.one_engine,
            helpers=plan.helpers,
            remote_workers=plan.entry.remote_workers,
            addresses={i: str(self._processes[i]["address"]) for i in ids},
            rooms=self._rooms,
            cores={i: int(self._processes[i]["cores"]) for i in ids},
        )
        ports = {i: int(self._processes[i]["port"]) for i in ids}
        return {
            i: replace(spec, ports=(ports[i], ports[i])) if ports[i] else spec
            for i, spec in specs.items()
        }

    def _pin(self, requests: Mapping[int, dict[str, Any]]) -> None:
        """Apply the settings of `run.json`, where the run has a choice."""
        pins = self._job.get("pins") or {}
        for request in requests.values():
            spec = request["spec"]
            if pins.get("threads"):
                spec["threads"] = int(pins["threads"])
            if pins.get("allreduce") and spec["options"].get("allreduce") == "auto":
                spec["options"] = {**spec["options"], "allreduce": str(pins["allreduce"])}

    def _names(self) -> dict[int, str]:
        known = self.engines.engines
        return {i: one.elsewhere for i, one in known.items() if one.elsewhere}

    # -- while it goes on --------------------------------------------------------------------------

    def _hear(self, engine: int, message: Up) -> None:
        """Process a message; called on the router's thread."""
        match message:
            case Records() | Happened() | Position():
                self.run.receive(message, engine)
            case CellEnded():
                self.engines.calls[message.engine].finish(message.outcome)
            case AskedToEnd():
                self._preempt(message.why)
            case Hello():
                pass

    def _preempt(self, why: str) -> None:
        """Stop at a step because the platform ends the job; only the first request counts."""
        if self.run.job["preempted"] or self.task.is_over:
            return
        if self.task.first_failed is not None:
            return  # torchrun ends the others after one has failed
        self.run.job["preempted"] = True
        self.run.note(f"The job was asked to end ({why}). It stops after the current step.")
        self.run.stop()

    def _settled(self, task: Task) -> None:
        """Note that all processes are done; called on the thread that received the last outcome."""
        run = self.run
        run.begin(task)
        error = task.failure()
        if run.state == "stopping" and error is not None and task.cause is None:
            error = None  # an agreed stop that needed an interrupt is still a stop
        if error is not None and any(one.status == "died" for one in task.outcomes.values()):
            # The advice for restarting an engine in a notebook does not apply here.
            error = RunError(error.what, next_step=DIED, code="WB-RUN-106")
        if error is None and "script" not in self._job:
            error = outcome_error(run, task.outcomes)
        elif error is None and not any(one.trained for one in task.outcomes.values()):
            run.note(
                "Nothing was recorded. Workbench saw no training by wb.fit or wb.prepare. It "
                "also saw no step() of a PyTorch optimizer after a backward pass."
            )
        for text in outcome_notes(task.outcomes):
            run.note(text)
        run.finish(error)

    def conduct(self, rank_0: Any) -> None:
        """Serve the job until its run is settled.

        Args:
            rank_0: The connection to rank 0 as a file; it ends when rank 0 ends.
        """
        watcher = threading.Thread(target=self._watch, args=(rank_0,), daemon=True)
        watcher.start()
        progress = KubeflowProgress.from_environment()
        if progress is not None:
            progress.follow(self.run)
        lines = LineWriter(self.folder, self._print) if os.environ.get(LINES) == "1" else None
        alive_at, late_at = 0.0, None
        while not self.run.over.wait(TURN_S):
            now = time.monotonic()
            for order in self.inbox.take():
                self._obey(order)
            for engine in self._gone_for_good(now):
                late_at = late_at or now + GONE_S
                self.engines.died(engine, "ended without a message")
            if self._left.is_set() and not self._go_on_alone():
                late_at = late_at or now + GONE_S
            if late_at is not None and now > late_at:
                for engine in self.task.unfinished():
                    self.engines.died(engine, "was stopped together with the other processes")
            if now - alive_at >= ALIVE_S:
                alive_at = now
                self._say_alive()
            self._record()
            if lines is not None and not self._tell_lines(lines):
                lines = None
        await_all(self.run.logs, self.run.note)
        self._recorded = ""
        self._record()
        if progress is not None:
            progress.close()
        if lines is not None:
            self._printed = True
            while self._printed:  # the remaining files, including weights, in parts
                self._printed = False
                if not self._tell_lines(lines):
                    break
        self.router.close()

    def _go_on_alone(self) -> bool:
        """Whether rank 0 ended well and its process ran on this host."""
        first = self.task.outcomes.get(0)
        left = self.task.unfinished()
        here = all(self.engines.engines[engine].is_here for engine in left)
        return first is not None and first.is_well and here

    def _gone_for_good(self, now: float) -> list[int]:
        """Return the ended processes whose last message would have arrived by now."""
        gone = self.engines.gone()
        self._gone_at = {engine: self._gone_at.get(engine, now) for engine in gone}
        return [engine for engine, at in self._gone_at.items() if now - at > WORDS_S]

    def _tell_lines(self, lines: LineWriter) -> bool:
        """Print new data as marked lines; return whether printing is still possible."""
        try:
            lines.pump()
        except (OSError, ValueError) as error:  # the reader has ended; the run continues
            self.run.note(f"Workbench can no longer print the records to the job's output: {error}")
            return False
        return True

    def _print(self, line: str) -> None:
        self._printed = True
        sys.stdout.write(line)
        sys.stdout.flush()

    def _watch(self, rank_0: Any) -> None:
        with contextlib.suppress(OSError):
            rank_0.read()
        self._left.set()

    def _obey(self, order: Order) -> None:
        run = self.run
        try:
            match order.do:
                case "stop":
                    run.stop()
                case "preempt":
                    self._preempt("order `preempt`")
                case "pause":
                    run.pause()
                case "resume":
                    run.resume()
                case "step":
                    run.step(order.steps)
                case "inject":
                    run.inject(*order.faults)
                case "interrupt":
                    run.interrupt()
        except WorkbenchError as error:
            run.note(f"A command to this run (such as pause or stop) failed: {error}")
        except events.InvalidTransitionError:
            pass  # it came too late

    def _say_alive(self) -> None:
        about = {"t": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        about |= {"banner": self.task.banner}  # the reason for a delay, if there is one
        with contextlib.suppress(OSError):
            cluster_env.replace(self.folder / ALIVE, json.dumps(about))

    def _record(self) -> None:
        """Write `run.json` if the run's state has changed."""
        if self.run.state != self._recorded:
            self._recorded = self.run.state
            self.run.record()


def _plan_of(job: Mapping[str, Any], processes: int) -> Plan:
    if "script" in job:
        recipe = Recipe(f"# {job['script']}", origin=str(job["script"]))
        framework = str(job["framework"])
        several = "mirrored" if framework == "torch" else "multi_worker_mirrored"
        return make_plan(
            recipe,
            several if processes > 1 else "one_device",
            framework=framework,
            workers=processes,
            name=Path(job["script"]).stem,
        )
    plan = Plan.from_wire(job["plan"])
    checkpoint = str(Path(job["folder"]) / plan.checkpoint) if plan.checkpoint else ""
    return replace(plan, checkpoint=checkpoint)


def _devices(process: Mapping[str, Any]) -> tuple[Device, ...]:
    return tuple(Device(**{**one, "pids": tuple(one["pids"])}) for one in process["devices"])


def _facts(process: Mapping[str, Any]) -> HostFacts:
    return HostFacts(
        hostname=str(process["host"]), token=str(process["place"]),
        address=str(process["address"]), cores=int(process["cores"]), memory_bytes=0,
        pid=int(process["pid"]), versions={}, devices=process["devices"],
        notes=tuple(process["notes"]),
    )  # fmt: skip


def main() -> int:
    """Serve one job; the only argument is the descriptor of the connection to rank 0."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the ranks, which the platform ends
    logging.basicConfig(level=logging.WARNING, format="workbench: %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as way, way.makefile("rwb") as rank_0:
        asked = json.loads(rank_0.readline() or b"{}")
        if not asked:
            return 1
        try:
            conductor = Conductor(asked)
        except (WorkbenchError, OSError) as error:
            _answer(rank_0, {"error": str(error)})
            return 1
        try:
            _answer(rank_0, {"parts": conductor.parts})
            conductor.conduct(rank_0)
        finally:
            with contextlib.suppress(OSError):
                way.shutdown(socket.SHUT_RDWR)  # otherwise closing the file waits for its reader
        return 0


def _answer(rank_0: Any, content: Mapping[str, Any]) -> None:
    rank_0.write(json.dumps(content, default=str).encode() + b"\n")
    rank_0.flush()


if __name__ == "__main__":
    sys.exit(main())
