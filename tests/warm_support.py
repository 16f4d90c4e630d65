"""Engines on a warm parent, without the rest of the workbench."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ipyparallel
import psutil
from traitlets.config import Config

from workbench.cluster import folders
from workbench.cluster.forkserver.client import WarmParent
from workbench.cluster.hub import CLUSTER_SETTINGS

REGISTER_TIMEOUT_S = 30


def quiet_cluster(folder):
    log = logging.getLogger("tests.ipyparallel")
    log.setLevel(logging.CRITICAL)
    return ipyparallel.Cluster(
        profile_dir=str(folder), cluster_file="", config=Config(), log=log,
        shutdown_atexit=False, **CLUSTER_SETTINGS,
    )  # fmt: skip


@contextlib.contextmanager
def engines(n, warm=None, **settings):
    """Yield (cluster, client, warm parent) with `n` registered engines; leaves nothing behind."""
    owned = None if warm else WarmParent().start()
    warm = warm or owned
    folder = folders.create()
    cluster = quiet_cluster(folder)
    try:
        cluster.start_controller_sync()
        warm.wait_ready()
        cluster.start_engines_sync(n, warm=warm, **settings)
        client = cluster.connect_client_sync()
        client.wait_for_engines(n, timeout=REGISTER_TIMEOUT_S)
        try:
            yield cluster, client, warm
        finally:
            client.close()
    finally:
        with contextlib.suppress(Exception):
            cluster.stop_cluster_sync()
        if owned:
            owned.stop()
        folders.remove(folder)


@contextlib.contextmanager
def stopped(pid):
    """Suspend a process, so that it behaves like a process that is busy for a long time."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def gone(pids, timeout_s):
    """Wait until none of these processes lives; return those that still do."""
    end = time.monotonic() + timeout_s
    left = set(pids)
    while left and time.monotonic() < end:
        left = {pid for pid in left if alive(pid)}
        time.sleep(0.02)
    return left


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def kernel(code, **words):
    """Run code that replaces a notebook's kernel; yield (process, its first output).

    Args:
        code: A template; its first output is JSON. `paths` are the folders of these tests' modules.
    """
    code = textwrap.dedent(code).format(paths=[str(Path(__file__).parent)], **words)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        line = process.stdout.readline()
        assert line, "the kernel's stand-in did not come up"
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
