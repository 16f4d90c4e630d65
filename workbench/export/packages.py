"""The packages of a job: exact versions of the cell's modules, and Workbench as a wheel."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata as metadata
import io
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import PlanError
from .cell import imported

DISTRIBUTION, PACKAGE = "distributed-workbench", "workbench"
_FRAMEWORK = {"torch": ("torch", "numpy"), "tensorflow": ("tensorflow", "keras", "numpy")}


def packages_of(source: str, framework: str, also: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of the cell's modules, the framework and NumPy, without `+cpu`.

    Args:
        also: Further modules that the run imports: those of sent files, and trackers.
    """
    wanted = set(_FRAMEWORK[framework])
    modules = {*imported(source), *also} - sys.stdlib_module_names
    named = {one for one in modules if _is_distribution(one)}
    wanted |= named
    if modules - named:  # modules with another name than their package; finding it takes a second
        owners = _owners()
        wanted |= {owner for one in modules - named for owner in owners.get(one, ())}
    if "wb.data.digits" in source:
        wanted.add("scikit-learn")
    found = {}
    for name in sorted(wanted, key=str.lower):
        with contextlib.suppress(metadata.PackageNotFoundError):
            one = metadata.distribution(name)
            if one.metadata["Name"] != DISTRIBUTION:
                found[str(one.metadata["Name"])] = one.version.partition("+")[0]
    return found


def _owners() -> Mapping[str, list[str]]:
    """Return the distributions of each module.

    Python 3.10 reads only what a distribution declares. Distributions made with newer tools
    (scikit-learn) declare nothing, so their file lists are read.
    """
    if sys.version_info >= (3, 11):
        return metadata.packages_distributions()
    owners: dict[str, list[str]] = {}
    for one in metadata.distributions():
        declared = (one.read_text("top_level.txt") or "").split()
        files = [path for path in one.files or () if path.suffix == ".py"]
        modules = declared or {
            path.parts[0] if len(path.parts) > 1 else path.stem for path in files
        }
        for module in modules:
            owners.setdefault(module, []).append(one.metadata["Name"])
    return owners


def _is_distribution(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        return bool(metadata.distribution(name).version)
    return False


def requirements(packages: Mapping[str, str], wheel: str) -> str:
    lines = ["# These are the package versions of the notebook. If the job runs on another kind of"]
    lines += ["# device (CUDA, CPU), install the builds of the packages for that kind of device."]
    for name, version in packages.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            url = metadata.distribution(name).read_text("direct_url.json") or ""
            if '"file:' in url:
                lines.append(f"# {name} was installed from a folder, not from a package index:")
        lines.append(f"{name}=={version}")
    return "\n".join([*lines, *([f"./{wheel}"] if wheel else [])]) + "\n"


MOST_UNPACKED_BYTES = 64 << 20
"""Size limit of a job's files. ConfigMaps hold much less, and a check of a data set must not fill
the memory."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_NOT_SHIPPED = ("__pycache__", "tests")
_METADATA = """\
Metadata-Version: 2.1
Name: distributed-workbench
Version: {version}
Requires-Python: >=3.10
Requires-Dist: anywidget>=0.9.21
Requires-Dist: cloudpickle>=3
Requires-Dist: ipykernel!=7.0.*,>=6.17.1
Requires-Dist: ipyparallel>=8.8
Requires-Dist: ipywidgets>=7.7.1
Requires-Dist: jsonschema>=4.18
Requires-Dist: matplotlib>=3.8
Requires-Dist: numpy>=1.26
Requires-Dist: nvidia-ml-py>=12.535
Requires-Dist: platformdirs>=4
Requires-Dist: psutil>=5.9
Requires-Dist: pyzmq>=26
Requires-Dist: scikit-learn>=1.4
Requires-Dist: tomli>=2; python_version < "3.11"
Requires-Dist: tqdm>=4.66
"""
_ENTRY_POINTS = """\
[console_scripts]
workbench = workbench.cli:main

[ipyparallel.engine_launchers]
workbench = workbench.cluster.hub:WarmEngineSetLauncher
"""


def workbench_wheel(into: Path) -> str:
    """Write the installed Workbench as a wheel; return its file's name.

    The same package gives the same bytes.

    Raises:
        OSError: It cannot be written.
    """
    version = str(sys.modules[PACKAGE].__version__)
    about = f"distributed_workbench-{version}.dist-info"
    name = f"distributed_workbench-{version}-py3-none-any.whl"
    root = Path(__file__).parents[1]
    files = {
        f"workbench/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
        and not any(p in _NOT_SHIPPED or p.startswith(".") for p in path.relative_to(root).parts)
    }  # fmt: skip
    described, points = _METADATA.format(version=version), _ENTRY_POINTS
    with contextlib.suppress(metadata.PackageNotFoundError):
        known = metadata.distribution(DISTRIBUTION)
        if known.version == version:
            described = known.read_text("METADATA") or described
            points = known.read_text("entry_points.txt") or points
    files[f"{about}/METADATA"] = described.encode()
    files[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: workbench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{about}/entry_points.txt"] = points.encode()
    files[f"{about}/top_level.txt"] = b"workbench\n"
    rows = [f"{path},sha256={_url_digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{about}/RECORD"] = "\n".join([*rows, f"{about}/RECORD,,", ""]).encode()
    (into / name).write_bytes(_zipped(files))
    return name


def packed_files(folder: Path) -> bytes:
    """Return the further files of a job's cell as a zip: its files and the initial weights.

    The same files give the same bytes; empty: there are none.

    Raises:
        PlanError: The files are too large even when compressed; they are not read.
    """
    about, ours = folder / "run.json", {"train.py", "requirements.txt", "README.md"}
    known = json.loads(about.read_text("utf-8")).get("files", {}) if about.is_file() else {}
    names = [name for name in known if name not in ours and not name.endswith(".whl")]
    chosen = [path for name in names for path in (folder / name, *(folder / name).rglob("*"))]
    found = {path.relative_to(folder).as_posix(): path for path in sorted(chosen)}
    files = {place: path for place, path in found.items() if path.is_file()}
    size_bytes = sum(path.stat().st_size for path in files.values())
    if size_bytes > MOST_UNPACKED_BYTES:
        raise PlanError(
            "The files that the cell reads are too large for ConfigMaps, which bring the files to "
            "the pods.",
            seen=f"{', '.join(names)}: {size_bytes >> 20} MiB",
            allowed=f"at most {MOST_UNPACKED_BYTES >> 20} MiB before compression. Workbench then "
            "compresses these files. For the compressed files, there is a second, smaller limit",
            next_step="copy the job folder to a PersistentVolumeClaim and use volume_claim='NAME'",
            code="WB-PLAN-262",
        )
    return _zipped({place: path.read_bytes() for place, path in files.items()}) if files else b""


def _zipped(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as whole:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            entry.create_system = 3
            whole.writestr(entry, data)
    return made.getvalue()


def _url_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
