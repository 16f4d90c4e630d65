"""Checks between this machine and others, over ssh: `workbench doctor --on HOST[,HOST]`.

On each host a small program of the standard library answers questions, a line of JSON each; It
installs nothing and leaves no file; during one check there is a file in the shared folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .report import Line, Status

CONNECT_S = 5.0
ANSWER_S = 10.0
MESSAGE_BYTES = 4 << 20
"""Larger than any frame, so a path with a wrong MTU blocks it."""
PINGS = 8
MUCH_OFFSET_S = 1.0
SEE = "docs/security.md"
SHARED_VARIABLE = "WORKBENCH_SHARED"
PACKAGES = ("distributed-workbench", "torch", "tensorflow", "ipyparallel", "numpy")

AGENT = r"""
import fcntl, hashlib, json, os, platform, shutil, socket, struct, sys, tempfile, threading, time
from importlib import metadata

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def text(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""

def facts(asked):
    try:
        net = os.readlink("/proc/self/ns/net")
    except OSError:
        net = ""
    return {
        "python": platform.python_version(), "hostname": socket.gethostname(),
        "boot_id": text("/proc/sys/kernel/random/boot_id"), "net": net, "uid": os.getuid(),
        "free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "executable": sys.executable,
        "versions": {name: version(name) for name in asked["packages"]},
        "workbench": bool(__import__("importlib.util").util.find_spec("workbench")),
    }

def clock(asked):
    return {"wall_s": time.time()}

def resolve(asked):
    try:
        return {"addresses": sorted({i[4][0] for i in socket.getaddrinfo(asked["name"], None)})}
    except OSError as error:
        return {"error": str(error)}

def towards(asked):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((asked["address"], 9))
        found = sock.getsockname()[0]
        return {"address": found, "interface": interface(sock, found)}

def interface(sock, address):
    for _, name in socket.if_nameindex():
        try:
            about = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))
        except OSError:
            continue
        if socket.inet_ntoa(about[20:24]) == address:
            return name
    return ""

def bound(address, ports):
    for port in ports:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # it is free again at once
        try:
            server.bind((address, port))
            return server
        except OSError:
            server.close()
            if port == ports[-1]:
                raise

def listen(asked):
    server = bound(asked["address"], asked.get("ports") or [0])
    server.listen(4)
    server.settimeout(30)
    def serve():
        try:
            for _ in range(4):
                taken, _ = server.accept()
                with taken:
                    taken.settimeout(10)
                    left, seen = asked["bytes"], hashlib.sha256()
                    while left:
                        part = taken.recv(min(left, 1 << 16))
                        if not part:
                            break
                        seen.update(part)
                        left -= len(part)
                    taken.sendall(seen.hexdigest().encode())
        except OSError:
            pass
        server.close()
    threading.Thread(target=serve, daemon=True).start()
    return {"port": server.getsockname()[1]}

def connect(asked):
    data = b"workbench" * (asked["bytes"] // 9 + 1)
    data = data[:asked["bytes"]]
    began = time.perf_counter()
    with socket.create_connection((asked["address"], asked["port"]), 5) as sock:
        connect_s = time.perf_counter() - began
        sock.settimeout(8)
        sock.sendall(data)
        answer = b""
        while len(answer) < 64:
            part = sock.recv(64)
            if not part:
                break
            answer += part
    whole = answer.decode() == hashlib.sha256(data).hexdigest()
    return {"connect_s": connect_s, "total_s": time.perf_counter() - began, "whole": whole}

def token(asked):
    return {"text": text(os.path.join(os.path.expanduser(asked["folder"]), asked["name"]))}

def serve():
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = globals()[asked["do"]](asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
"""
BOOT = "import sys, json; exec(json.loads(sys.stdin.readline())); serve()"


class HostError(Exception):
    """A host did not answer, or answered with an error."""


@dataclass
class Host:
    """A program that answers questions, here or on another host.

    Attributes:
        name: The user's name for the host; empty for this machine.
        address: Address at which engines on it, or the notebook, would listen; empty: unknown.
        interface: The interface with this address.
        ports: First and last allowed port for listening; None: any.
    """

    name: str
    process: subprocess.Popen[bytes]
    facts: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""
    interface: str = ""
    ports: tuple[int, int] | None = None
    _rest: bytes = b""

    @property
    def called(self) -> str:
        """Its name in sentences."""
        return self.name or "this machine"

    def ask(self, do: str, limit_s: float = ANSWER_S, **more: Any) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            HostError: There was no answer in time, or the answer is an error.
        """
        self._write({"do": do, **more})
        answer: dict[str, Any] = json.loads(self._line(limit_s))
        if "error" in answer:
            raise HostError(answer["error"])
        return answer

    def boot(self) -> None:
        """Send the program that answers."""
        self._write(AGENT)

    def _write(self, value: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise HostError(self._why()) from None

    def _line(self, limit_s: float) -> bytes:
        out = self.process.stdout
        assert out is not None
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise HostError(f"no answer within {limit_s:g} s")
                part = os.read(out.fileno(), 1 << 16)
                if not part:
                    raise HostError(self._why())
                self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _why(self) -> str:
        """Return the last words of ssh."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        errors = self.process.stderr
        said = b"" if errors is None or self.process.poll() is None else errors.read()
        lines = said.decode("utf-8", "replace").strip().splitlines()
        program = "ssh" if self.name else "Python"
        return lines[-1] if lines else f"{program} ended with status {self.process.returncode}"

    def close(self) -> None:
        """End the program."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def command_for(name: str, python: str = sys.executable) -> list[str]:
    """Return the command that starts the program on a host: with this machine's Python path if it
    exists there, otherwise python3.
    """
    there = (
        f'p={shlex.quote(python)}; [ -x "$p" ] || p=python3; exec "$p" -u -c {shlex.quote(BOOT)}'
    )
    return [
        "ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S:.0f}", "-T", "--", name,
        f"sh -c {shlex.quote(there)}",
    ]  # fmt: skip


Start = Callable[[str], Host]


def start(name: str) -> Host:
    """Start the program on a host; an empty name is this machine.

    Raises:
        HostError: ssh is not installed, or the name is not valid for a host.
    """
    if name and (name.startswith("-") or any(c.isspace() for c in name)):
        raise HostError("this is not the name of a host; write HOST or USER@HOST")
    command = command_for(name) if name else [sys.executable, "-u", "-c", BOOT]
    pipe = subprocess.PIPE
    try:
        return Host(name, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe))
    except FileNotFoundError:
        raise HostError("ssh is not installed on this machine; install openssh-client") from None


def look(
    names: Sequence[str], starting: Start = start, *, ports: str = "", listen: str = ""
) -> list[Line]:
    """Return the results of checks between this machine and each host, and between the hosts.

    Args:
        ports: First and last allowed port for listening, as `--ports` of `%cluster start`.
        listen: Where the notebook will listen, as `--listen`.
    """
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        here = _begin("", starting, stack, lines)
        there = [_begin(name, starting, stack, lines) for name in names]
        reached = [host for host in there if host is not None]
        if here is None:
            return lines
        lines += _notebook(here, reached, ports, listen)
        for host in reached:
            lines += _of_one(here, host)
        lines += _engines(here, reached)
        ends = [here, *reached]
        for i, a in enumerate(ends):
            for b in ends[i + 1:]:  # fmt: skip
                lines += [_reach(a, b), _reach(b, a)]
        lines += _twins(ends)
    return lines


def _begin(
    name: str, starting: Start, stack: contextlib.ExitStack, lines: list[Line]
) -> Host | None:
    what = f"{name or 'this machine'} answers"
    began, step = time.perf_counter(), ""
    try:
        host = starting(name)
        step = f"run `ssh -o BatchMode=yes {name} python3 --version`" if name else ""
        stack.callback(host.close)
        host.boot()
        host.facts = host.ask("facts", CONNECT_S + ANSWER_S, packages=PACKAGES)
    except (HostError, ValueError) as error:
        lines.append(Line(f"host.{name}.ssh", "fail", what, str(error), step))
        return None
    if name:
        took = time.perf_counter() - began
        found = f"{host.facts['hostname']}, Python {host.facts['python']}, after {took:.1f} s"
        lines.append(Line(f"host.{name}.ssh", "ok", what, found, "", round(took, 2)))
    return host


def _notebook(here: Host, hosts: Sequence[Host], ports: str, listen: str) -> list[Line]:
    """Find the notebook's listening address for these hosts, as at a cluster's start."""
    from ..cluster.hosts.configuration import LEAST_PORTS, launch_settings
    from ..cluster.hosts.places import way_to_hosts
    from ..cluster.hub import free_ports
    from ..devices.limits import listening
    from ..errors import WorkbenchError

    id, what = "hosts.listen", "where the notebook would listen"
    if not hosts:
        return []
    try:
        settings = launch_settings(
            len(hosts), launcher="ssh", on=",".join(host.name for host in hosts),
            ports=ports, listen=listen,
        )  # fmt: skip
        here.address = listening(settings.listen) or way_to_hosts(settings)
        here.interface = here.ask("towards", address=here.address)["interface"]
    except (WorkbenchError, HostError) as error:
        said = str(error).splitlines()
        step = getattr(error, "next_step", None) or "use --listen with an address of this machine"
        return [Line(id, "fail", what, " ".join(map(str.strip, said[:2])), step)]
    here.ports = settings.ports
    for host in hosts:
        host.ports = settings.ports
    status: Status = "ok"
    step, which = SEE, "any free ports"
    figures: dict[str, Any] = {"address": here.address, "sockets": LEAST_PORTS - 1}
    if settings.ports is not None:
        free = len(free_ports(here.address, settings.ports))
        which = f"{settings.ports[0]}-{settings.ports[1]}, {free} of these ports are free"
        figures["free_ports"] = free
        if free < LEAST_PORTS:
            status, step = (
                "fail",
                f"use a wider range for --ports: {LEAST_PORTS} ports must be free, "
                f"{LEAST_PORTS - 1} for the notebook and one for workers on this machine",
            )
    if here.address.startswith("127.") and not _same(here, hosts):
        status, step = "fail", "use --listen with the address at which the hosts reach this machine"
    where = f"{here.address} ({here.interface or 'no interface'})"
    found = f"the notebook needs {LEAST_PORTS - 1} ports, all of them on {where}"
    return [Line(id, status, what, f"{found}: {which}", step, figures=figures)]


def _same(here: Host, hosts: Sequence[Host]) -> bool:
    """Whether all hosts are this machine."""
    return all(one.facts["net"] == here.facts["net"] for one in hosts)


def _engines(here: Host, hosts: Sequence[Host]) -> list[Line]:
    """Report where engines would listen, and which connections are encrypted."""
    if not hosts or not here.address:
        return []
    store, ports = hosts[0], here.ports
    where = ", ".join(f"{h.address or '?'} ({h.interface or '?'}) on {h.name}" for h in hosts)
    range_of = f"within {ports[0]}-{ports[1]}" if ports else "any port"
    return [
        Line("hosts.engines", "ok", "where engines would listen",
             f"{where}, on any ports. The rendezvous store, through which workers find each "
             f"other, listens on one port of {store.name} ({range_of}). TensorFlow's servers "
             "listen on all interfaces of their hosts", SEE),
        Line("hosts.encrypted", "ok", "encrypted",
             "all traffic between the notebook and the hosts (ssh, and ZeroMQ with CURVE)", SEE),
        Line("hosts.open", "ok" if _same(here, hosts) else "warn", "not encrypted",
             "all traffic between the hosts. For Workbench's own connections, a process needs the "
             "run's secret key. For connections to the rendezvous store, gloo, NCCL and "
             "TensorFlow's gRPC, a process needs no key",
             f"use a private network, or a firewall around the hosts; see {SEE}"),
    ]  # fmt: skip


def _of_one(here: Host, host: Host) -> list[Line]:
    tries: list[tuple[str, str, Callable[[Host, Host], tuple[Any, ...]]]] = [
        ("versions", "the same versions", _versions),
        ("name", "host names resolve", _names),
        ("user", "the same user", _user),
        ("disk", "free disk space", _disk),
        ("shared", "shared folder", _shared),
        ("clock", "clock", _clock),
    ]
    lines = []
    for id, what, check in tries:
        status: Status
        try:
            status, found, *rest = check(here, host)
        except (HostError, OSError) as error:
            status, found, rest = "fail", str(error), []
        figures = rest[1] if len(rest) > 1 else {}
        lines.append(Line(f"host.{host.name}.{id}", status, f"{host.name}: {what}", found,
                          rest[0] if rest else "", 0.0, figures))  # fmt: skip
    return lines


def _versions(here: Host, host: Host) -> tuple[Any, ...]:
    ours, theirs = dict(here.facts["versions"]), dict(host.facts["versions"])
    ours["python"] = ".".join(here.facts["python"].split(".")[:2])
    theirs["python"] = ".".join(host.facts["python"].split(".")[:2])
    other = [f"{n} {theirs[n] or 'missing'} (this machine: {ours[n]})" for n in ours
             if ours[n] and ours[n] != theirs.get(n)]  # fmt: skip
    if other:
        return (
            "fail",
            ", ".join(other),
            f"on {host.name}, install the same versions as on this machine. Workbench uses this "
            f"Python on {host.name}: {host.facts['executable']}",
            {"versions": theirs},
        )
    shown = ", ".join(f"{n} {v}" for n, v in theirs.items() if v)
    return "ok", shown, "", {"versions": theirs}


def _names(here: Host, host: Host) -> tuple[Any, ...]:
    """Find the addresses at which the two reach each other; names do not have to be resolvable."""
    name = host.name.rpartition("@")[2]
    mine, theirs = here.facts["hostname"], host.facts["hostname"]
    found = {}
    for asker, wanted in ((here, theirs), (here, name), (host, mine)):
        with contextlib.suppress(HostError):
            found[asker.called, wanted] = asker.ask("resolve", name=wanted)["addresses"]
    known = found.get((here.called, name)) or found.get((here.called, theirs)) or []
    usable = [one for one in known if ":" not in one]
    host.address = usable[0] if usable else _ssh_address(host.name)
    if not here.address and host.address:
        here.address = here.ask("towards", address=host.address)["address"]
    if here.address:  # engines listen on the interface of their route to the notebook
        way = host.ask("towards", address=here.address)
        host.address, host.interface = way["address"], way["interface"]
    back = found.get((host.called, mine), [])
    words = f"on this machine, the address of {name} is {', '.join(known) or 'not known'}; "
    words += f"on the host, the address of {mine} is {', '.join(back) or 'not known'}"
    if back and all(one.startswith("127.") for one in back):
        return "fail", words, f"in /etc/hosts of {name}, give {mine} the address {here.address}"
    if any(one.startswith("127.") for one in known) and name not in ("localhost", "127.0.0.1"):
        fix = f"give {name} the address that {name} has in the network"
        return "fail", words, f"in /etc/hosts of this machine, {fix}"
    if not back or not known:
        return (
            "warn",
            words,
            f"no action needed: Workbench uses the addresses {here.address} and {host.address} "
            "instead of names",
        )
    return "ok", words


def _ssh_address(name: str) -> str:
    """Return a host's address from ssh's configuration; empty: unknown."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=5,
                              check=False)  # fmt: skip
        for line in done.stdout.splitlines():
            if line.startswith("hostname "):
                with contextlib.suppress(OSError):
                    return socket.gethostbyname(line.split()[1])
    return ""


def _user(here: Host, host: Host) -> tuple[Any, ...]:
    mine, theirs = here.facts["uid"], host.facts["uid"]
    if mine != theirs:
        return "warn", f"uid (user number) {theirs} on the host, {mine} on this machine", (
            "give your account the same uid on both machines: in a shared folder, a file belongs "
            "to a uid, not to a name")  # fmt: skip
    return "ok", f"uid {mine}"


def _disk(here: Host, host: Host) -> tuple[Any, ...]:
    free = host.facts["free_bytes"]
    figures = {"free_bytes": free}
    if free < 1 << 30:
        return (
            "warn",
            f"{free / (1 << 30):.1f} GB are free in the temporary folder",
            "delete files in the host's temporary folder to free disk space",
            figures,
        )
    return "ok", f"{free / (1 << 30):.1f} GB are free in the temporary folder", "", figures


def shared_folder() -> Path:
    """Return the shared folder of the hosts: WORKBENCH_SHARED, or a folder in the user's home."""
    named = os.environ.get(SHARED_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".local/share/workbench"


def _shared(here: Host, host: Host) -> tuple[Any, ...]:
    folder, name = shared_folder(), f".doctor-{secrets.token_hex(8)}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = secrets.token_hex(16)
    (folder / name).write_text(token)
    try:
        seen = host.ask("token", folder=str(folder), name=name)["text"]
    finally:
        (folder / name).unlink(missing_ok=True)
    if seen == token:
        return "ok", f"the host sees this machine's files in {folder}"
    return "warn", f"the host does not see this machine's files in {folder}", (
        f"checkpoints need one folder for all hosts: export {SHARED_VARIABLE}=/a/shared/folder"
    )  # fmt: skip


def _clock(here: Host, host: Host) -> tuple[Any, ...]:
    best: tuple[float, float] | None = None
    for _ in range(PINGS):
        before = time.time()
        wall = float(host.ask("clock")["wall_s"])
        after = time.time()
        bound, offset = (after - before) / 2, wall - (before + after) / 2
        if best is None or bound < best[0]:
            best = bound, offset
    assert best is not None
    bound, offset = best
    words = f"{1e3 * offset:+.2f} ± {1e3 * bound:.2f} ms"
    figures = {"offset_s": offset, "bound_s": bound}
    if abs(offset) > MUCH_OFFSET_S + bound:
        return (
            "warn",
            f"difference from this machine's clock: {words}",
            "synchronize both clocks with chrony or ntp",
            figures,
        )
    return "ok", f"difference from this machine's clock: {words}", "", figures


def _reach(a: Host, b: Host) -> Line:
    """Check whether `a` reaches a port of `b`, and whether a large message arrives completely."""
    id, what = f"host.{a.called}.to.{b.called}".replace(" ", "_"), f"{a.called} reaches {b.called}"
    where = b.address
    if not where:
        return Line(id, "unknown", what, f"the address of {b.called} is not known")
    try:
        # The notebook uses only the given ports; engines use any port.
        ports = list(range(b.ports[0], b.ports[1] + 1)) if b.ports and not b.name else [0]
        port = b.ask("listen", address=where, bytes=MESSAGE_BYTES, ports=ports)["port"]
        came = a.ask("connect", 16, address=where, port=port, bytes=MESSAGE_BYTES)
    except HostError as error:
        said = str(error)
        if "refused" in said or "route" in said:
            step = f"check the firewall and the route to {where}; open all ports between the hosts"
            if not b.name:
                step = (
                    f"set --listen to an address that {a.called} can reach. Set --ports to ports "
                    "that the firewall allows. Do both in this command and in %cluster start"
                )
        elif "timed out" in said or "no answer" in said:
            step = (
                f"check the firewall (it may drop packets to {where}) and the MTU (the largest "
                "packet size)"
            )
        else:
            step = (
                f"on {a.called}, run ping -M do -s 1472 {where}; if ping fails, check the MTU (the "
                "largest packet size)"
            )
        return Line(id, "fail", what, f"{where}: {said}", step)
    rate = MESSAGE_BYTES / max(1e-9, came["total_s"]) / 1e6
    figures = {"connect_ms": round(1e3 * came["connect_s"], 2), "mb_s": round(rate, 1)}
    on = f"{where}:{port}" if not b.name else where
    found = f"{on}, {figures['connect_ms']:.1f} ms to connect, {rate:.0f} MB/s"
    if not came["whole"]:
        return Line(
            id,
            "fail",
            what,
            f"{where}: a message of 4 MB arrived changed or incomplete",
            "check for a proxy between the two hosts",
        )
    return Line(id, "ok", what, found, "", round(came["total_s"], 3), figures)


def _twins(ends: Sequence[Host]) -> list[Line]:
    """Report which hosts are the same machine or network, and which have equal names."""
    lines = []
    for i, a in enumerate(ends):
        for b in ends[i + 1:]:  # fmt: skip
            id = f"host.{a.called}.and.{b.called}".replace(" ", "_")
            what = f"{a.called} and {b.called} are two machines"
            same_boot = bool(a.facts["boot_id"]) and a.facts["boot_id"] == b.facts["boot_id"]
            same_net = a.facts["net"] == b.facts["net"]
            same_name = a.facts["hostname"] == b.facts["hostname"]
            if same_boot and same_net:
                lines.append(Line(id, "warn", what, "no, they are the same machine",
                                  "name each machine only once; do not name the notebook's "
                                  "own machine, because its engines need no ssh"))  # fmt: skip
            elif same_name:
                lines.append(Line(id, "warn", what, f"both have the name {a.facts['hostname']}",
                                  "give each host its own name: some programs cannot "
                                  "distinguish hosts with the same name"))  # fmt: skip
            else:
                alike = (
                    "no, they are two containers on one machine; this is no problem, because each "
                    "has its own network"
                )
                lines.append(Line(id, "ok", what, alike if same_boot else "yes"))
    return lines
