"""The doctor's checks that use devices: each runs in its own process (`children.run`).

They report lines, and facts (`facts.*`) that `gpus.py` judges.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .children import Child, main
from .stages import compute, end, free_port

PINNED_BYTES = 256 << 20
DRIFT_S = 12.0
MUCH_DRIFT_PPM = 50.0
ABORT_S = 2.0


# -- NVML ------------------------------------------------------------------------------------------


def nvml(child: Child, library: Any = None, dev: Path = Path("/dev")) -> None:
    """Report the driver's data GPU by GPU, so that a lost GPU does not hide the others."""
    files = sorted(str(path) for path in dev.glob("nvidia[0-9]*")) or [
        str(path) for path in dev.glob("nvidiactl")
    ]
    facts: dict[str, Any] = {"device_files": files, "xid": _xid() if files else []}
    try:
        if library is None:
            import pynvml

            library = pynvml
        library.nvmlInit()
    except Exception as error:  # it is not installed, there is no driver, or the two do not match
        child.say("ok", "facts.nvml", "", "", **facts, error=f"{type(error).__name__}: {error}")
        return
    child.imported()
    facts["driver"] = _text(library.nvmlSystemGetDriverVersion())
    version = int(_try(library, "nvmlSystemGetCudaDriverVersion", default=0) or 0)
    facts["cuda_driver"] = [version // 1000, version % 1000 // 10]
    facts["gpus"] = [_gpu(library, i) for i in range(int(library.nvmlDeviceGetCount()))]
    child.say("ok", "facts.nvml", "", "", **facts)


def _gpu(library: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "name": "", "uuid": "", "error": ""}
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        found["name"] = _text(library.nvmlDeviceGetName(handle))
        found["uuid"] = _text(library.nvmlDeviceGetUUID(handle))
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        found["memory_bytes"], found["used_bytes"] = int(memory.total), int(memory.used)
    except Exception as error:
        found["error"] = str(error)
        return found
    # Not every GPU reports the following values, so a missing value is not an error.
    cut = _try(library, "nvmlDeviceGetMigMode", handle, default=(0, 0))
    found["mig"] = int(cut[0])
    found["mode"] = int(_try(library, "nvmlDeviceGetComputeMode", handle, default=0))
    found["ecc"] = int(_try(library, "nvmlDeviceGetTotalEccErrors", handle, 1, 0, default=0))
    capability = _try(library, "nvmlDeviceGetCudaComputeCapability", handle, default=None)
    found["capability"] = None if capability is None else [int(part) for part in capability]
    processes = _try(library, "nvmlDeviceGetComputeRunningProcesses", handle, default=[])
    found["pids"] = [int(process.pid) for process in processes]
    return found


def _try(library: Any, name: str, *args: Any, default: Any) -> Any:
    """Call a function that older bindings, drivers and some GPUs do not have."""
    try:
        return getattr(library, name)(*args)
    except Exception:
        return default


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _xid() -> list[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["dmesg"], capture_output=True, text=True, timeout=2, errors="replace", check=False
        )
        return [line for line in done.stdout.splitlines() if "NVRM: Xid" in line][-5:]
    return []


# -- torch -----------------------------------------------------------------------------------------


def cuda(child: Child) -> None:
    """Report the GPUs that torch sees, and check its computation, copies and measurements."""
    import torch

    child.imported()
    build: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda,
             "archs": torch.cuda.get_arch_list()}  # fmt: skip
    child.say("ok", "facts.build", "", "", "", **build)
    seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    child.say("ok", "facts.cuda", "", "", gpus=[
        {"name": one.name, "uuid": str(getattr(one, "uuid", ""))} for one in seen
    ])  # fmt: skip
    if not seen:
        child.say("fail", "gpu.matmul", "matrix products and convolutions on each GPU",
                  "torch sees no GPU",
                  "see the check 'driver and torch are compatible'")  # fmt: skip
        return
    _matmul(child, torch, len(seen))
    _own_pid(child)
    _pinned(child, torch)
    _copies(child, torch, len(seen))
    _events(child, torch)


def _own_pid(child: Child) -> None:
    """Report whether NVML lists this process, which has used every GPU, with its pid."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pids = [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        child.say("ok", "facts.pids", "", "", sees_own_pid=os.getpid() in pids)


def _matmul(child: Child, torch: Any, gpus: int) -> None:
    what = "matrix products and convolutions on each GPU"
    with child.trying(
        "gpu.matmul",
        what,
        "run `CUDA_LAUNCH_BLOCKING=1 workbench doctor` to see the operation that fails; look for "
        "the driver's Xid errors in `dmesg`",
    ):
        worst = {i: compute(torch, f"cuda:{i}")[0] for i in range(gpus)}
        wrong = [
            f"results of GPU {i} differ by {off:.1e} from those of the CPU"
            for i, off in worst.items()
            if not off < 1e-9
        ]
        if wrong:
            child.say("fail", "gpu.matmul", what, "; ".join(wrong),
                      "set CUDA_VISIBLE_DEVICES to GPUs with correct results")  # fmt: skip
        else:
            child.say("ok", "gpu.matmul", what,
                      f"{gpus} of {gpus} GPUs give the same results as the CPU",
                      difference=max(worst.values()))  # fmt: skip


def _pinned(child: Child, torch: Any) -> None:
    what = "256 MB of pinned memory"
    with child.trying("gpu.pinned", what, "raise `ulimit -l` and the container's memory limit"):
        host = torch.empty(PINNED_BYTES, dtype=torch.uint8).pin_memory()
        host.fill_(7)
        there = torch.empty_like(host, device="cuda:0")
        torch.cuda.synchronize()
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rate = PINNED_BYTES / (time.perf_counter() - began) / 1e9
        right = bool((there == 7).all())
        child.say("ok" if right else "fail", "gpu.pinned", what,
                  f"{rate:.1f} GB/s to the GPU" if right else "the copy has changed the data",
                  bandwidth_gb_s=round(rate, 2))  # fmt: skip


def _copies(child: Child, torch: Any, gpus: int) -> None:
    what = "copies between GPUs"
    if gpus < 2:
        child.say("unknown", "gpu.p2p", what, "needs 2 GPUs, but Workbench can use 1")
        return
    with child.trying("gpu.p2p", what, "export NCCL_P2P_DISABLE=1"):
        wrong, direct, rates = [], 0, []
        data = torch.arange(1 << 24, dtype=torch.int32)
        for a in range(gpus):
            for b in (b for b in range(gpus) if b != a):
                direct += torch.cuda.can_device_access_peer(a, b)
                there = data.to(f"cuda:{a}")
                torch.cuda.synchronize(a)
                began = time.perf_counter()
                copy = there.to(f"cuda:{b}")
                torch.cuda.synchronize(b)
                rates.append(data.nbytes / (time.perf_counter() - began) / 1e9)
                if not torch.equal(copy.cpu(), data):
                    wrong.append(f"{a} to {b}")
        pairs = gpus * (gpus - 1)
        if wrong:
            child.say("fail", "gpu.p2p", what,
                      f"copies between these GPUs are wrong: {', '.join(wrong)}",
                      "turn off ACS or the IOMMU, or export NCCL_P2P_DISABLE=1")  # fmt: skip
        else:
            child.say("ok", "gpu.p2p", what, f"all copies are correct; {direct} of {pairs} pairs "
                      "of GPUs can copy directly from GPU to GPU; "
                      f"{min(rates):.1f} to {max(rates):.1f} GB/s",
                      direct=direct, pairs=pairs)  # fmt: skip


def _events(child: Child, torch: Any) -> None:
    what = "time resolution of GPU events"
    with child.trying("gpu.events", what):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(200)]
        for event in events:
            event.record()
        torch.cuda.synchronize()
        steps = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
        least = min(step for step in steps if step > 0)
        child.say("ok" if least < 50 else "warn", "gpu.events", what,
                  f"{least:.1f} µs between two events",
                  resolution_us=round(least, 2))  # fmt: skip


def drift(child: Child) -> None:
    """Measure the speed of each GPU's clock relative to this machine's clock."""
    import torch

    child.imported()
    what = "drift of the GPU's timer against this machine's clock"
    devices = range(torch.cuda.device_count())

    def mark(device: int) -> tuple[Any, float, float]:
        best: tuple[Any, float, float] | None = None
        with torch.cuda.device(device):
            for _ in range(50):
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                before = time.perf_counter()
                event.record()
                event.synchronize()
                after = time.perf_counter()
                if best is None or after - before < best[2]:
                    best = event, (before + after) / 2, after - before
        assert best is not None
        return best

    first = [mark(device) for device in devices]
    time.sleep(DRIFT_S)
    second = [mark(device) for device in devices]
    found = {}
    for device, (a, at, off), (b, then, more) in zip(devices, first, second, strict=True):
        host_s, gpu_s = then - at, a.elapsed_time(b) / 1e3
        found[device] = ((gpu_s / host_s - 1) * 1e6, (off + more) / 2 / host_s * 1e6)
    words = ", ".join(f"GPU {d} {ppm:+.1f} ± {sure:.1f} ppm" for d, (ppm, sure) in found.items())
    far = any(abs(ppm) > MUCH_DRIFT_PPM + sure for ppm, sure in found.values())
    child.say("warn" if far else "ok", "gpu.drift", what, words,
              "no action needed: Workbench compares both clocks about once per second"
              if far else "",
              ppm={str(d): round(ppm, 2) for d, (ppm, _) in found.items()})  # fmt: skip


# -- groups ----------------------------------------------------------------------------------------

PAIR = """
import faulthandler, signal; faulthandler.register(signal.SIGUSR1)
import os, sys, threading, time, torch, torch.distributed as dist
print("IMPORTED", flush=True)
rank, port, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
if device == "cuda":
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    sync = torch.cuda.synchronize
else:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sync = lambda: None
dist.init_process_group("nccl" if device != "cpu" else "gloo")
x = torch.full((1 << 24 if device != "cpu" else 1 << 18,), float(rank + 1), device=device)
dist.all_reduce(x); sync()
right = bool((x == 3).all())
times = []
for _ in range(5):
    sync(); began = time.perf_counter(); dist.all_reduce(x); sync()
    times.append(time.perf_counter() - began)
rate = x.nbytes / min(times) / 1e9
print(f"RIGHT {right} RATE {rate:.3f} PID {os.getpid()}", flush=True)
if device != "cpu":
    sys.stdin.readline()
    print("TOLD", flush=True)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        def give_up():
            time.sleep(1); print("ABORTS", flush=True)
            dist.distributed_c10d._abort_process_group()
        began = time.perf_counter()
        threading.Thread(target=give_up, daemon=True).start()
        try: sync()
        except Exception as error: print("SAID", error)
        print(f"BACK {time.perf_counter() - began - 1:.3f}", flush=True)
    else:
        sys.stdin.readline()
    os._exit(0)
dist.destroy_process_group()
"""
_RESULT = re.compile(r"RIGHT (\w+) RATE ([\d.]+) PID (\d+)")


class Pair:
    """Two processes with a process group."""

    def __init__(self, device: str) -> None:
        port = str(free_port())
        self.processes = [
            subprocess.Popen([sys.executable, "-c", PAIR, str(rank), port, device],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
            for rank in range(2)
        ]  # fmt: skip
        self.device, self.said = device, ["", ""]

    def until(self, rank: int, word: str) -> str:
        """Read a rank's output until a line with the word; return this line.

        Raises:
            RuntimeError: The rank ended without this line.
        """
        stream = self.processes[rank].stdout
        assert stream is not None
        for line in stream:
            print(f"[{rank}] {line}", end="")
            self.said[rank] += line
            if word in line:
                return line
        raise RuntimeError(self.said[rank][-300:] or f"rank {rank} ended without a message")

    def tell(self, rank: int) -> None:
        """Let a rank continue."""
        stream = self.processes[rank].stdin
        assert stream is not None
        stream.write("\n")
        stream.flush()

    def stacks(self) -> None:
        """Let both write where they are; `until` prints it for the rank for which it waits."""
        for process in self.processes:
            process.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """End both."""
        for process in self.processes:
            process.kill()
            process.wait()


def _pair_result(pair: Pair) -> tuple[bool, float, list[int]]:
    found = [_RESULT.search(pair.until(rank, "RIGHT ")) for rank in range(2)]
    parts = [one.groups() for one in found if one is not None]
    return all(p[0] == "True" for p in parts), float(parts[0][1]), [int(p[2]) for p in parts]


def _say_sums(child: Child, check: str, what: str, pair: Pair) -> list[int]:
    """Report whether both sums are correct, their speed and transport; return the process ids."""
    for rank in range(2):
        pair.until(rank, "IMPORTED")
    child.imported()
    right, rate, pids = _pair_result(pair)
    figures: dict[str, Any] = {"bandwidth_gb_s": rate}
    said = f"correct, {rate:.2f} GB/s"
    if pair.device == "cuda":
        ways = sorted(set(re.findall(r" via (\S+)", pair.said[0])))
        said += f" over {', '.join(ways) or 'unknown'}"
        figures["ways"] = ways
    said = said if right else "wrong sums"
    child.say("ok" if right else "fail", check, what, said, "", **figures)
    return pids


def gloo(child: Child) -> None:
    """Check a sum of two processes over gloo."""
    what = "gloo all-reduce of two processes"
    pair = Pair("cpu")
    child.on_late = pair.stacks
    try:
        with child.trying("machine.gloo", what, "check for a firewall on the loopback interface"):
            _say_sums(child, "machine.gloo", what, pair)
    finally:
        pair.close()


def nccl(child: Child) -> None:
    """Check that two ranks can sum over NCCL, abort, and leave no context on GPU 0."""
    what = "NCCL all-reduce of two ranks"
    pair = Pair("cuda")
    child.on_late = pair.stacks
    try:
        with child.trying(
            "gpu.nccl", what, "set NCCL_DEBUG=INFO to see the cause; try NCCL_P2P_DISABLE=1"
        ):
            _contexts(child, _say_sums(child, "gpu.nccl", what, pair))
        with child.trying("gpu.abort", "aborting an NCCL collective"):
            pair.tell(0)
            pair.until(0, "ABORTS")
            took_s = max(0.0, float(pair.until(0, "BACK").split()[1]))
            child.say("ok" if took_s < ABORT_S else "fail", "gpu.abort",
                      "aborting an NCCL collective", f"the abort took {took_s:.2f} s",
                      "" if took_s < ABORT_S
                      else "no action needed: if an engine does not end an interrupted cell in "
                      "time, Workbench replaces the engine",
                      took_s=took_s)  # fmt: skip
    finally:
        pair.close()


def _contexts(child: Child, pids: list[int]) -> None:
    what = "each of two ranks uses only its own GPU"
    with child.trying("gpu.contexts", what):
        import pynvml

        pynvml.nvmlInit()
        on_gpu = {
            i: [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByIndex(i))]
            for i in range(pynvml.nvmlDeviceGetCount())
        }  # fmt: skip
        known = [pid for pid in pids if any(pid in here for here in on_gpu.values())]
        if not known:
            child.say("unknown", "gpu.contexts", what, "NVML does not list the pids of the ranks")
            return
        many = [i for i, here in on_gpu.items() if len(set(pids) & set(here)) > 1]
        child.say("fail" if many else "ok", "gpu.contexts", what,
                  f"both ranks are on GPU {', '.join(map(str, many))}" if many
                  else "one process per GPU")  # fmt: skip


# -- frameworks and engines ------------------------------------------------------------------------


def tensorflow(child: Child) -> None:
    """Check that TensorFlow sees the GPUs, takes only needed memory, and computes correctly."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    child.imported()
    what = "TensorFlow on the GPUs"
    step = "run pip install 'tensorflow[and-cuda]' to get matching CUDA libraries"
    with child.trying("gpu.tensorflow", what, step):
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            child.say("warn", "gpu.tensorflow", what,
                      "TensorFlow sees no GPU, so it computes on the CPU", step)  # fmt: skip
            return
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        with tf.device("GPU:0"):
            a = tf.random.normal((512, 512), seed=1)
            product = tf.linalg.matmul(a, a)
        with tf.device("CPU:0"):
            off = float(tf.reduce_max(tf.abs(product - tf.linalg.matmul(a, a))))
        used = int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
        good = off < 1.0 and used < 1 << 30  # TF32 can round products of 512 terms
        child.say("ok" if good else "warn", "gpu.tensorflow", what,
                  f"number of GPUs: {len(gpus)}; {used / 1e6:.0f} MB used; results differ by "
                  f"{off:.1e} from those of the CPU",
                  used_bytes=used)  # fmt: skip


def warm(child: Child) -> None:
    """Check whether the warm parent can be forked after its imports."""
    import torch

    child.imported()
    what = "a process with PyTorch can be forked"
    maps = Path("/proc/self/maps")
    mapped = maps.exists() and "libcuda.so" in maps.read_text()
    opened = []
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            opened += [target] if target.startswith("/dev/nvidia") else []
    ready, ask = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if int(child.asked["gpus"]):
                torch.cuda.init()  # type: ignore[no-untyped-call]
                float(torch.ones(2, device="cuda").sum())
            else:
                float(torch.ones(64, 64).mm(torch.ones(64, 64)).sum())
            os.write(ask, b"ok")
        except Exception as error:
            os.write(ask, str(error).encode()[:500])
        os._exit(0)
    os.close(ask)
    answer = os.read(ready, 1000).decode()
    os.waitpid(pid, 0)
    figures: dict[str, Any] = {"libcuda_mapped": mapped, "device_files": opened}
    if answer != "ok":
        child.say("fail", "machine.warm", what, f"a forked process cannot compute: {answer}",
                  "a module that is imported together with torch uses the GPU or starts threads. "
                  "`python -X importtime -c 'import torch'` lists all modules that are imported "
                  "together with torch. Look for a module that is not part of Python or PyTorch, "
                  "and uninstall its package",
                  **figures)  # fmt: skip
    elif opened:
        child.say("warn", "machine.warm", what,
                  f"importing torch opens the device file {opened[0]}, but a forked process can "
                  "still compute",
                  "no action needed", **figures)  # fmt: skip
    else:
        child.say("ok", "machine.warm", what,
                  "importing torch uses no GPU, and a forked process can compute",
                  **figures)  # fmt: skip


def cluster(child: Child) -> None:
    """Measure the time until two engines have done an all-reduce in a cell."""
    what = "two engines start and do an all-reduce"
    with child.trying(
        "machine.cluster", what, "run `workbench ps`, and read the log that the error names"
    ):
        from ..session.cluster import Cluster

        began = time.perf_counter()
        engines = Cluster(2, devices="cpu", framework="torch")
        try:
            ready_s = time.perf_counter() - began
            child.imported()  # the engines import torch while the cluster starts
            child.on_late = lambda: print(engines.stacks(), flush=True)
            task = engines.execute("import torch, torch.distributed as dist\n"
                                   "x = torch.ones(1)\ndist.all_reduce(x)\n")  # fmt: skip
            task.over.wait()
            error = task.failure()
            if error is not None:
                raise error
            sums = [values["x"] for values in engines.pull(["x"]).values()]
            total_s = time.perf_counter() - began
            right = all(float(x[0]) == 2.0 for x in sums)
            child.say("ok" if right else "fail", "machine.cluster", what,
                      f"{ready_s:.1f} s until the engines are ready, {total_s:.1f} s until the "
                      "first cell has ended"
                      if right else f"wrong sums: {sums}",
                      start_s=round(ready_s, 2), first_cell_s=round(total_s, 2))  # fmt: skip
        finally:
            child.on_late = lambda: None
            end(engines)


PROBES = {one.__name__: one for one in (nvml, cuda, drift, gloo, nccl, tensorflow, warm, cluster)}

if __name__ == "__main__":
    main(PROBES)
