"""A slow link: frames between a host's cable and the bridge are held, and sent at a bounded rate.

    delayed_link.py CABLE BRIDGE DELAY_MS MBIT

Two TAP devices of this process stand between the cable and the bridge: netem, which would do it in
the kernel, is not part of every kernel. Ends with SIGTERM, and puts the cable back.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import signal
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 1 << 16
SPUN_S = 0.0003  # select may oversleep: the last of a wait is spun


def ip(*arguments: str) -> None:
    """Call `ip`."""
    subprocess.run(["ip", *arguments], check=True)


def tap(name: str) -> int:
    """Return the file of a new TAP device."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def carry(one: int, other: int, delay_s: float, mbit: float) -> None:
    """Carry frames both ways, for good."""
    queue: list[tuple[float, int, int, bytes]] = []
    order, free = 0, {one: 0.0, other: 0.0}
    while True:
        wait_s = queue[0][0] - time.perf_counter() if queue else 1.0
        ready, _, _ = select.select([one, other], [], [], max(0.0, wait_s - SPUN_S))
        for file in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    frame = os.read(file, FRAME_BYTES)
                    out = other if file == one else one
                    sent = max(time.perf_counter(), free[out]) + len(frame) * 8 / (mbit * 1e6)
                    free[out], order = sent, order + 1
                    heapq.heappush(queue, (sent + delay_s, order, out, frame))
        while queue and queue[0][0] <= time.perf_counter():
            _, _, out, frame = heapq.heappop(queue)
            with contextlib.suppress(OSError):  # a link that is down loses frames
                os.write(out, frame)


def main(cable: str, bridge: str, delay_ms: float, mbit: float) -> None:
    """Stand between a cable and a bridge until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    near, far, own = f"{cable}t", f"{cable}n", f"{cable}w"
    one, other = tap(near), tap(far)
    ip("link", "add", own, "type", "bridge")
    try:
        ip("link", "set", cable, "master", own)
        ip("link", "set", far, "master", own, "up")
        ip("link", "set", own, "up")
        ip("link", "set", near, "master", bridge, "up")
        print("ready", flush=True)
        carry(one, other, delay_ms / 1e3, mbit)
    finally:
        ip("link", "set", cable, "master", bridge)
        ip("link", "del", own)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(float, sys.argv[3:5]))
