"""Where students' cells run: as another user, without other processes and the checks' files.

Run as a program, it makes that place and becomes the kernel in it. It uses only Python's own
modules, because it begins with the rights of the grader. `isolation` finds out what is possible.

    namespaces  own mounts (an empty root with what Python needs, read-only), own processes, and if
                possible its own network, which leads nowhere; another user id too if the grader is
                root, otherwise a user namespace
    user        only another user id: files that every user may read can be read
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import json
import os
import re
import signal
import socket
import stat
import struct
import sys
from typing import Any, NoReturn

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
_NEWNET = 0x40000000
_SIOCSIFFLAGS, _UP_AND_RUNNING = 0x8914, 0x41
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYSTEM = (
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "usr",
    "etc",
    "nix",
    "sys",
)
_LIBRARIES = ("/opt/rocm*", "/opt/cuda*", "/opt/nvidia*", "/opt/intel*", "/run/opengl-driver*")
"""Nothing else of `/run`, because its sockets (a session's bus, containers) start processes
outside, and nothing else of `/opt`, because courses may be there."""
_FLAGS = {
    "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1 << 10, "nodiratime": 1 << 11,
    "relatime": 1 << 21,
}  # fmt: skip
_TMP_BYTES = 256_000_000
_MADE = ("null", "zero", "full", "random", "urandom")
_COMPUTE = ("nvidia", "dri", "kfd")

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    given = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _checked(_libc.mount(*given), f"mount {target}")


def _bind(source: str, target: str, *, write: bool = False) -> None:
    """Show a folder or a file at another place too."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "ab"):
            pass
    _mount(source, target, "", _BIND | _REC)
    if not write:
        found = _mounts(os.path.realpath(target))
        if not found:
            raise OSError(f"{target} is not a mount point, so it cannot be made read-only")
        for place, flags in found:
            _read_only(place, flags)


def _mounts(below: str) -> list[tuple[str, int]]:
    """Return the mounts at a place and below it, with their flags."""
    found: dict[str, int] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            words = line.split()
            place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])
            if place == below or place.startswith(below + "/"):
                found[place] = sum(_FLAGS.get(word, 0) for word in words[5].split(","))
    return list(found.items())


def _read_only(place: str, flags: int) -> None:
    """Make a mount read-only: a remount changes one mount, but not the mounts inside it."""
    as_it_is = _REMOUNT | _BIND | _RDONLY | flags
    for more in (_NOSUID | _NODEV, _NOSUID, 0):
        if _libc.mount(b"", os.fsencode(place), b"", as_it_is | more, b"") == 0:
            return
    if os.path.isdir(place):  # a mount that cannot be made read-only is covered
        _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV | _RDONLY, "size=4k")
        return
    raise OSError(f"{place} stays writable")


def _devices(root: str) -> None:
    """Make the devices that every program needs, and show the compute devices."""
    os.mkdir(f"{root}/dev")
    _mount("tmpfs", f"{root}/dev", "tmpfs", _NOSUID, "mode=0755,size=1m")
    for name in os.listdir("/dev"):
        place = f"{root}/dev/{name}"
        if name in _MADE and os.getuid() == 0:
            os.mknod(place, stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
            os.chmod(place, 0o666)
        elif name in _MADE or name.startswith(_COMPUTE):
            _bind(f"/dev/{name}", place, write=True)
    for name, to in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{to}", f"{root}/dev/{name}")


def _system(root: str, memory_bytes: int) -> None:
    """Show what every program needs; file systems in memory have a limit."""
    for name in os.listdir("/"):
        place = f"/{name}"
        if name not in _SYSTEM:
            continue
        if os.path.islink(place):
            os.symlink(os.readlink(place), root + place)
        elif os.path.isdir(place):
            _bind(place, root + place)
    _devices(root)
    for found in _LIBRARIES:
        for place in glob.glob(found):
            _bind(place, root + place)
    for place, size_bytes in ((f"{root}/dev/shm", memory_bytes), (f"{root}/tmp", _TMP_BYTES)):
        os.makedirs(place, exist_ok=True)
        _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={size_bytes}")
    os.makedirs(f"{root}/proc", exist_ok=True)


def _enter(given: dict[str, Any]) -> None:
    """Leave everything that is not listed: first mounts, then the old root."""
    root = given["root"]
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "mode=0755,size=16m")
    _system(root, given["memory_bytes"])
    for place in given["readable"]:
        if not os.path.lexists(root + place) or not os.path.samefile(place, root + place):
            _bind(place, root + place)
    for place, stand_in in given["instead"]:
        if os.path.exists(root + place):
            _mount(stand_in, root + place, "", _BIND)
            _read_only(root + place, 0)
    _bind(given["folder"], root + given["folder"], write=True)
    # While the old one is visible: otherwise a user namespace may not mount it.
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    os.chdir(root)
    _checked(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")
    for place in ("/dev", "/"):  # without root they belong to the kernel's user
        _mount("", place, "", _REMOUNT | _BIND | _RDONLY | _NOSUID)  # devices stay devices


def _become(uid: int) -> None:
    """Become another user, without other rights or keys; no program that is run gives them back."""
    _libc.syscall(_KEYCTL.get(os.uname().machine, -1), _JOIN_SESSION_KEYRING, None)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _unshare(uid: int, *, network: bool) -> None:
    mine = (os.getuid(), os.getgid())
    flags = _NEWNS | _NEWPID | _NEWIPC | (0 if uid else _NEWUSER) | (0 if network else _NEWNET)
    _checked(_libc.unshare(flags), "unshare")
    if not uid:
        for name, words in (
            ("setgroups", "deny"), ("uid_map", f"{mine[0]} {mine[0]} 1"),
            ("gid_map", f"{mine[1]} {mine[1]} 1"),
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(words)
    if not network:  # the kernel and its engines talk to each other
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
            up = struct.pack("16sh22x", b"lo", _UP_AND_RUNNING)
            fcntl.ioctl(any_.fileno(), _SIOCSIFFLAGS, up)


def _attend(pid: int) -> NoReturn:
    """Forward interrupts to a child, and end as it does; also reap the children of others."""
    signal.signal(signal.SIGINT, lambda *_: os.kill(pid, signal.SIGINT))
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            os._exit(1)
        if ended != pid:
            continue
        if os.getpid() == 1:  # a first process cannot end by a signal of its own
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if os.WIFSIGNALED(status):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))


def main() -> None:
    """Make the place that the first argument describes, and run the rest of them in it."""
    given, command = json.loads(sys.argv[1]), sys.argv[2:]
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if given["how"] == "user":
        os.chdir(given["cwd"])
        _become(given["uid"])
        os.execv(command[0], command)
    if os.getpid() != os.getsid(0):
        os.setsid()
    _unshare(given["uid"], network=given["network"])
    if first := os.fork():
        _attend_first(first)
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _enter(given)
    if kernel := os.fork():
        _become(given["uid"])
        _attend(kernel)
    os.chdir(given["cwd"])
    _become(given["uid"])
    os.execv(command[0], command)


def _attend_first(first: int) -> NoReturn:
    """Outside: forward interrupts, and end in the same way as the kernel inside."""
    signal.signal(signal.SIGINT, lambda *_: os.kill(first, signal.SIGINT))
    while True:
        _, status = os.waitpid(first, 0)
        code = os.waitstatus_to_exitcode(status)
        number = code - 128 if code > 128 else -code if code < 0 else 0
        if number:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(code if code >= 0 else 1)


if __name__ == "__main__":
    main()
