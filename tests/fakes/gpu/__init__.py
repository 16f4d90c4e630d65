"""A GPU for tests, as a package that brings its own kind of device to PyTorch does.

`install()` puts it where torch looks for such packages (its `torch.backends` entry points), so that
every process of a test finds devices `fakegpu:0`, `fakegpu:1` as soon as it imports torch, and no
line of ours knows that they are fakes. README.md beside this file says what is real about it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "fakegpu.cpp"
NAME = "fakegpu_native"
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-DTORCH_API_INCLUDE_EXTENSION_H")


def missing() -> str:
    """Return what this machine lacks to build it; empty: nothing."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "a C++ compiler (g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers (python3-dev)"
    return ""


def build() -> Path:
    """Compile what is written in C++, once for each torch and text; return the library's folder."""
    import torch

    about = f"{SOURCE.read_text()}{torch.__version__}{sys.version}".encode()
    folder = (
        Path(tempfile.gettempdir())
        / f"fakegpu-{os.getuid()}"
        / hashlib.sha1(about).hexdigest()[:16]
    )
    library = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a minute of work, which is done once
        if not library.exists():
            _compile(library)
    return folder


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    where = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in library_paths()]
    made = library.with_name(f"{os.getpid()}.so")
    subprocess.run(
        ["c++", *FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}", *where, str(SOURCE), *libraries,
         "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-o", str(made)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    made.rename(library)


KIND = """
try:
    from workbench.devices import discovery, mask
except ImportError:
    pass
else:
    mask.KINDS["fakegpu"] = mask.Kind(
        "fakegpu", "fakegpu", "FAKEGPU_VISIBLE_DEVICES", collectives="fakenccl"
    )
    found = [
        discovery.Device(i, "Fake", 8 << 30, 0, f"FAKE-{i}", number=i, kind="fakegpu")
        for i in range(DEVICES)
    ]
    discovery.FINDERS = {"fakegpu": lambda framework: (found, [])}
"""


def install(root: Path, devices: int = 2, *, leased: bool = False) -> dict[str, str]:
    """Write the package into a folder; return the environment in which torch finds it.

    Args:
        leased: Whether processes in that environment also lease these GPUs, and no others.
    """
    folder = build()
    about = root / "torch_fakegpu-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-fakegpu\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nfakegpu = torch_fakegpu:start\n")
    shutil.copy(HERE / "torch_fakegpu.py", root)
    if leased:
        (root / "sitecustomize.py").write_text(KIND.replace("DEVICES)", f"{devices})"))
    path = [str(root), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "FAKEGPU_COUNT": str(devices)}
