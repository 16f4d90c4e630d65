"""Two hosts on this machine, as real as the kernel allows without virtual machines.

Each is a network, a host-name and a mount namespace with an sshd: own addresses, own host name, own
/tmp, /dev/shm, HOME and /etc/hosts. Common to all: the rest of the file system (as software on NFS
is), the clocks, process ids. Where the Python that runs the tests, or their checkout, lies in a
folder that a host has for itself, it is seen there too, read-only.

    this machine 10.77.0.1 --- bridge --+-- 10.77.0.2 xh1
                                        +-- 10.77.0.3 xh2

Needs root, openssh and iproute2. One set of hosts stands at a time; who comes next waits. All of it
goes with the process that made it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
NETWORK = int(os.environ.get("WORKBENCH_TEST_NETWORK", "77"))
"""The second number of all addresses; names, ports, folder and lock follow from it."""
NAME = f"wb{NETWORK:03}"
KERNEL = f"10.{NETWORK}.0.1"
COUNT = int(os.environ.get("WORKBENCH_TEST_HOST_COUNT", "2"))
ADDRESSES = {f"xh{k}": f"10.{NETWORK}.0.{k + 1}" for k in range(1, COUNT + 1)}
SSH_PORT = 2222
FOLDER = Path(f"/var/lib/workbench-test-hosts/{NETWORK}")
LOCK = Path(f"/run/workbench-test-hosts-{NETWORK}.lock")
MARK, MARK_VALUE = "WORKBENCH_TEST_HOSTS", NAME
NEEDS = {
    "ip": "iproute2", "ssh": "openssh-client", "/usr/sbin/sshd": "openssh-server",
    "nsenter": "util-linux", "unshare": "util-linux",
}  # fmt: skip
WAIT_S = 20.0
LOCK_WAIT_S = 600.0
DAY_S = 86400


@dataclass(frozen=True)
class HostSettings:
    """How the hosts are made.

    Attributes:
        same_name: All have this machine's host name, as clones do.
        names: What /etc/hosts says: `all` (every host), `debian` (all, but the own name is
            127.0.1.1, as Debian and Ubuntu install it), `none` (nothing but localhost).
        skewed: The monotonic clock of xh2 is a day ahead.
    """

    same_name: bool = False
    names: str = "all"
    skewed: bool = False


PLAIN = HostSettings()


def missing(needs: Mapping[str, str] = NEEDS) -> str:
    """Return why no hosts can be made here, or "" where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "simulated hosts need Linux and root"
    packages = sorted({package for tool, package in needs.items() if not _where(tool)})
    if packages:
        return f"simulated hosts need the packages {', '.join(packages)}"
    made = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True
    )
    return f"this root may make no namespaces: {made.stderr.strip()}" if made.returncode else ""


def _where(tool: str) -> str | None:
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")


class SimulatedHosts:
    """The hosts xh1 and xh2; a context manager.

    Attributes:
        settings: How they are made; see `again`.
        shared: A folder that is the same on all hosts.
        bin: Holds `ssh` and `scp` that know the hosts; `environment` has it in its PATH.
    """

    def __init__(self, settings: HostSettings = PLAIN) -> None:
        self.settings = settings
        self.shared = FOLDER / "shared"
        self.bin = FOLDER / "bin"
        self._lock: IO[str] | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SimulatedHosts:
        self.up()
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    # -- life --------------------------------------------------------------------------------------

    def up(self) -> None:
        """Make the hosts; wait first while another process has some.

        Raises:
            RuntimeError: A host did not come up; its sshd's log is in the message.
        """
        if self._watch is None:
            self._lock = _locked()
            remove()
            self._watch = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve())],
                stdin=subprocess.PIPE,
                start_new_session=True,  # an interrupt is not for it
                pass_fds=[self._lock.fileno()],
                env={key: value for key, value in os.environ.items() if key != MARK},
            )
        try:
            self._make()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove the hosts and everything that runs on them."""
        watch, self._watch = self._watch, None
        if watch is not None:
            assert watch.stdin is not None
            watch.stdin.close()  # it removes everything
            watch.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def again(self, settings: HostSettings = PLAIN) -> None:
        """Replace the hosts by fresh ones."""
        remove()
        self.settings = settings
        self.up()

    def is_plain(self) -> bool:
        """Whether all hosts are up, and as they are by default."""
        return self.settings == PLAIN and all(map(self.is_up, ADDRESSES))

    def is_up(self, host: str) -> bool:
        """Whether a host's sshd answers."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((ADDRESSES[host], SSH_PORT), timeout=1.0) as sock,
        ):
            return bool(sock.recv(4))
        return False

    def kill(self, host: str) -> None:
        """End every process of a host at once, as a power cut does; `again` brings it back."""
        end_all(lambda: self.processes(host))

    def processes(self, host: str) -> list[psutil.Process]:
        """Return all processes of a host."""
        return _inside(_namespace(host))

    # -- what is done on them ----------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that are to know the hosts by `ssh` and `scp`."""
        path = f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, "PATH": path, MARK: MARK_VALUE}

    def run(
        self, host: str, command: str, *, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell's line on a host by ssh and return how it ended."""
        return subprocess.run(
            [str(self.bin / "ssh"), host, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment,
        )

    def enter(self, host: str, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host without ssh, as what boots with a host."""
        pid = (FOLDER / host / "sshd.pid").read_text().strip()
        return subprocess.Popen(
            ["nsenter", "--target", pid, "--mount", "--uts", "--net", "--", *command],
            start_new_session=True,
            **options,
        )

    def path(self, host: str, path: str) -> Path:
        """Return where a file in a host's own /tmp or HOME is found from here."""
        for own, name in ((_home(), "home"), ("/tmp", "tmp")):
            if path == own or path.startswith(own + "/"):
                return FOLDER / host / name / path[len(own) :].lstrip("/")
        return Path(path)

    def link(self, host: str, up: bool) -> None:
        """Unplug a host's network cable, or plug it in again."""
        _ip("link", "set", _cable(host), "up" if up else "down")

    def shape(self, host: str, mbit: float) -> None:
        """Bound what goes to and from a host by token buckets of the kernel (tc-tbf(8))."""
        bucket = ["tbf", "rate", f"{mbit:g}mbit", "burst", "8kb", "latency", "2s"]
        _call("tc", "qdisc", "replace", "dev", _cable(host), "root", *bucket)
        own = ["ip", "netns", "exec", _namespace(host), "tc", "qdisc", "replace", "dev", "eth0"]
        _call(*own, "root", *bucket)

    @contextlib.contextmanager
    def delayed(self, host: str, delay_ms: float, mbit: float = 1000.0) -> Iterator[None]:
        """Hold what goes to and from a host for a time, and bound how much of it there is."""
        script = Path(__file__).with_name("delayed_link.py")
        arguments = [_cable(host), _bridge(), str(delay_ms), str(mbit)]
        with subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            env=self.environment,
            start_new_session=True,
        ) as link:
            try:
                assert link.stdout is not None
                if link.stdout.readline() != b"ready\n":
                    raise RuntimeError("The slow link did not come up.")
                yield
            finally:
                link.terminate()

    # -- how they are made -------------------------------------------------------------------------

    def _make(self) -> None:
        self.bin.mkdir(parents=True, exist_ok=True)
        self.shared.mkdir(exist_ok=True)
        key = FOLDER / "id"
        if not key.exists():
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        for tool in ("ssh", "scp"):
            wrapper = self.bin / tool
            real = shutil.which(tool, path=os.defpath + ":/usr/bin")
            wrapper.write_text(f'#!/bin/sh\nexec {real} -F {FOLDER}/ssh_config "$@"\n')
            wrapper.chmod(0o755)
        (FOLDER / "ssh_config").write_text(_ssh_config())
        _ip("link", "add", _bridge(), "type", "bridge")
        _ip("addr", "add", f"{KERNEL}/24", "dev", _bridge())
        _ip("link", "set", _bridge(), "up")
        for host in ADDRESSES:
            self._boot(host)
        for host in ADDRESSES:
            end = time.monotonic() + WAIT_S
            while not self.is_up(host):
                if time.monotonic() > end:
                    log = (FOLDER / host / "sshd.log").read_text()
                    raise RuntimeError(f"The simulated host {host} did not come up.\n{log}")
                time.sleep(0.02)

    def _boot(self, host: str) -> None:
        folder, namespace = FOLDER / host, _namespace(host)
        for name, mode in (("home/.ssh", 0o700), ("home", 0o700), ("tmp", 0o1777)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name).chmod(mode)
        keys = folder / "home/.ssh/authorized_keys"
        shutil.copy(FOLDER / "id.pub", keys)
        keys.chmod(0o600)
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "hostkey"))
        name = socket.gethostname() if self.settings.same_name else host
        (folder / "hosts").write_text(self._names(host, name))
        (folder / "sshd_config").write_text(_sshd_config(folder, ADDRESSES[host]))
        _ip("netns", "add", namespace)
        _ip("link", "add", _cable(host), "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", _cable(host), "master", _bridge(), "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        ahead = ["--monotonic", str(DAY_S), "--boottime", str(DAY_S), "--time", "--fork"]
        # `ip netns exec` would mount another /sys, without the cgroups that slurmd looks for.
        command = [
            "setsid", "--fork", "nsenter", f"--net=/run/netns/{namespace}",
            "unshare", "--uts", "--mount", "--propagation", "private",
            *(ahead if self.settings.skewed and host == "xh2" else []),
            "sh", "-ec", _boot_script(folder, name),
        ]  # fmt: skip
        with open(folder / "sshd.log", "w") as log:
            # As a daemon: not a child of the process of the tests.
            subprocess.run(
                command,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": f"{os.defpath}:/usr/sbin:/sbin:/usr/bin", MARK: MARK_VALUE},
            )

    def _names(self, host: str, name: str) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        if self.settings.names == "debian":
            lines.append(f"127.0.1.1 {name}")
        if self.settings.names != "none":
            known = {socket.gethostname(): KERNEL, **ADDRESSES}
            if self.settings.names == "debian":
                known.pop(name, None)
            elif self.settings.same_name:
                known[name] = ADDRESSES[host]
            lines += [f"{address} {one}" for one, address in known.items()]
        return "\n".join(lines) + "\n"


# -- names -----------------------------------------------------------------------------------------


def _bridge() -> str:
    return f"{NAME}br"


def _cable(host: str) -> str:
    return f"{NAME}{host}"


def _namespace(host: str) -> str:
    return f"{NAME}-{host}"


def _home() -> str:
    return pwd.getpwuid(os.geteuid()).pw_dir


def _ssh_config() -> str:
    names = "".join(f"Host {name}\n  HostName {at}\n" for name, at in ADDRESSES.items())
    return f"""Host *
  Port {SSH_PORT}
  User {pwd.getpwuid(os.geteuid()).pw_name}
  IdentityFile {FOLDER}/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
{names}"""


def _sshd_config(folder: Path, address: str) -> str:
    return f"""Port {SSH_PORT}
ListenAddress {address}
HostKey {folder}/hostkey
PidFile none
AuthorizedKeysFile {_home()}/.ssh/authorized_keys
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
MaxStartups 200
SetEnv PYTHONPATH={ROOT}
Subsystem sftp /usr/lib/openssh/sftp-server
"""


def _boot_script(folder: Path, name: str) -> str:
    """Return what a host does when it starts: its name, its own folders, sshd."""
    own = {_home(): folder / "home", "/tmp": folder / "tmp"}
    lines = [f"hostname {shlex.quote(name)}"]
    for seen in sorted({str(ROOT), sys.prefix, sys.base_prefix}):
        for covered, replaced in own.items():
            if seen.startswith(covered + "/"):
                at = shlex.quote(str(replaced) + seen[len(covered) :])
                lines += [
                    f"mkdir -p {at}",
                    f"mount --bind {shlex.quote(seen)} {at}",
                    f"mount -o remount,bind,ro {at}",
                ]
    lines += [f"mount --rbind {replaced} {covered}" for covered, replaced in own.items()]
    lines += [
        "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        f"mount --bind {folder}/hosts /etc/hosts",
        "mkdir -p /run/sshd",
        "cd /",
        f"echo $$ > {folder}/sshd.pid",
        f"exec /usr/sbin/sshd -D -e -f {folder}/sshd_config",
    ]
    return "\n".join(lines)


# -- making and removing ---------------------------------------------------------------------------


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _locked() -> IO[str]:
    lock = open(LOCK, "a")  # noqa: SIM115  (closed by `down`)
    end = time.monotonic() + LOCK_WAIT_S
    while not _takes(lock):
        if time.monotonic() > end:
            lock.close()
            raise RuntimeError(
                f"Simulated hosts are in use by another process for {LOCK_WAIT_S:.0f} s; "
                f"`fuser {LOCK}` names it."
            )
        time.sleep(0.2)
    return lock


def _takes(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _inside(namespace: str) -> list[psutil.Process]:
    """Return the processes in a network namespace."""
    try:
        inode = os.stat(f"/run/netns/{namespace}").st_ino
    except OSError:
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            with_it = os.stat(f"/proc/{process.pid}/ns/net").st_ino == inode
            if with_it and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def marked() -> list[psutil.Process]:
    """Return the processes of all hosts, and what was started beside them to serve them."""
    found = [process for host in ADDRESSES for process in _inside(_namespace(host))]
    mark = f"{MARK}={MARK_VALUE}\0".encode()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if (
                process.pid != os.getpid()
                and mark in Path(f"/proc/{process.pid}/environ").read_bytes()
            ):
                found.append(process)
    return found


def end_all(which: Callable[[], list[psutil.Process]]) -> None:
    """Kill what is found until nothing is found."""
    end = time.monotonic() + WAIT_S
    while found := which():
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        gone, _ = psutil.wait_procs(found, timeout=0.5)
        if len(gone) < len(found) and time.monotonic() > end:
            raise RuntimeError(f"Processes of simulated hosts do not end: {found}")


def leftovers() -> list[str]:
    """Name everything of simulated hosts that there is: processes, interfaces, folders."""
    found = [str(process) for process in marked()]
    found += [path.name for path in Path("/sys/class/net").glob(f"{NAME}*")]
    found += [str(path) for path in Path("/run/netns").glob(f"{NAME}-*")]
    return found + ([str(FOLDER)] if FOLDER.exists() else [])


def remove() -> None:
    """Remove everything that carries our names."""
    end_all(marked)
    for path in Path("/run/netns").glob(f"{NAME}-*"):
        _ip("netns", "del", path.name)
    for path in Path("/sys/class/net").glob(f"{NAME}*"):
        with contextlib.suppress(RuntimeError):  # one end of a pair takes the other along
            _ip("link", "del", path.name)
    end = time.monotonic() + WAIT_S
    while any(Path("/sys/class/net").glob(f"{NAME}*")) and time.monotonic() < end:
        time.sleep(0.02)  # a namespace takes its interfaces along when its last process is gone
    shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":  # beside the tests: removes everything when their process is gone
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    remove()
