"""One description of resources and a job folder: the files to start a job on each platform.

Each envelope is data (templates/envelopes.json). This module computes the values that its templates
name. All files are checked before they are written: documents against the platform's schema
(schemas/), and the calls and options of scripts against the names that the platform publishes.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import PlanError, unknown
from .packages import packed_files
from .published import (
    ENVELOPES,
    Envelope,
    Exactly,
    Values,
    as_yaml,
    check_document,
    check_options,
    filled_documents,
    filled_python,
    filled_script,
    template_text,
)

MOUNT = "/workbench-job"
MAP_BYTES = 700_000
"""Largest size of a file in one ConfigMap, whose limit is 1 MiB; a wheel is split into parts."""
MOST_MAP_BYTES = 8 << 20
PACKED = "workbench-files.zip"
"""Archive of the cell's further files for pods, because ConfigMaps have no folders."""
LOG_LINES = "WORKBENCH_LOG_LINES"
"""Makes a job print its records as marked lines, for `wb.follow`."""
_DNS = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.@:%\[\]-]*")
_SLURM_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/-]*")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class JobFacts:
    """The data about a job that an envelope needs.

    Attributes:
        name: The user's name for the job.
        framework: `torch` or `tensorflow`.
        workers: Replicas.
        servers: Number of servers among the processes; they are the last ranks.
        processes: Total number, including servers.
        python: Version of Python, such as `3.11.7`.
        packages: Packages to install, as in requirements.txt: version by name.
        plain: Whether its script does not use Workbench's recorder.
    """

    name: str
    framework: str
    workers: int
    servers: int
    processes: int
    python: str
    packages: Mapping[str, str] = field(default_factory=dict)
    plain: bool = False


@dataclass(frozen=True)
class Resources:
    """The resources of a job; each platform uses the ones that it has.

    Values of the environment are never copied, and `secrets` are only names.

    Attributes:
        nodes: Machines, pods or instances.
        workers_per_node: Processes of each; 0: computed from the job.
        gpus_per_node: GPUs of each; 0: none.
        cpus_per_worker: CPUs for each process; 0: the platform's default.
        memory: Of each node: `16G`, `16Gi`, `512M`; empty: the platform's default.
        time_s: Time limit of the job in seconds; None: the platform's limit.
        partition, account, qos: Slurm's.
        image: Container image.
        installed: Whether the image has all packages, so nothing is installed there.
        namespace, service_account: For Kubernetes; Vertex AI also uses the service account.
        region: Where: SkyPilot's `infra`, such as `aws/us-east-1`.
        instance_type: The cloud's name for a kind of machine.
        accelerator: The platform's name for a kind of GPU.
        runtime: Kubeflow's ClusterTrainingRuntime, or Databricks' version of Spark.
        remote_folder: Path of the job folder on the nodes, if it already exists there.
        storage: Place for Ray Train's state: a shared folder or a bucket.
        volume_claim: PersistentVolumeClaim with the job folder in it.
        data: The storage mounted at /data: a PersistentVolumeClaim, or a bucket's address for
            SkyPilot.
        role: Role of SageMaker.
        compute: Azure ML's compute.
        hosts: Hosts for ssh; the first runs rank 0.
        secrets: `SECRET:KEY` of Kubernetes becomes the variable KEY; SkyPilot takes names of
            variables, whose values `sky launch --secret NAME` takes from the shell.
        port: Port at which the processes of several nodes connect.
    """

    nodes: int = 1
    workers_per_node: int = 0
    gpus_per_node: int = 0
    cpus_per_worker: int = 0
    memory: str = ""
    time_s: float | None = None
    partition: str = ""
    account: str = ""
    qos: str = ""
    image: str = ""
    installed: bool = False
    namespace: str = ""
    service_account: str = ""
    region: str = ""
    instance_type: str = ""
    accelerator: str = ""
    runtime: str = ""
    remote_folder: str = ""
    storage: str = ""
    volume_claim: str = ""
    data: str = ""
    role: str = ""
    compute: str = ""
    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    port: int = 29500


def write_envelope(name: str, folder: Path, job: JobFacts, resources: Resources) -> list[Path]:
    """Write a platform's files into a job folder; return them.

    Args:
        name: Of `ENVELOPES`.
        folder: With train.py, run.json, requirements.txt and Workbench's wheel in it.

    Raises:
        PlanError: The platform cannot run the job, or its schema refuses the files.
    """
    if name not in ENVELOPES:
        raise unknown("platform", name, ENVELOPES)
    envelope = ENVELOPES[name]
    checked(envelope, folder, job, resources)
    values = _values(envelope, folder, job, resources)
    made: dict[str, str] = {}
    for file, template in envelope.files.items():
        made[file] = written(envelope, file, template, values, {**_shipped(values), **made})
    if job.framework == "tensorflow":
        made["start_tf.py"] = filled_python(envelope, template_text("start_tf.py.in"), values)
    for file, text in made.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in made]


def legal_name(name: str) -> str:
    """Return a name for Kubernetes objects, with room for the suffixes of pods.

    Services use this name, so by RFC 1035 it begins with a letter.
    """
    made = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    made = (f"job-{made}" if made[:1].isdigit() else made)[:40].strip("-")
    return made if _DNS.fullmatch(made) else "job"


def far_folder(resources: Resources, name: str) -> str:
    """Return a job's folder on hosts of ssh, where a login begins in `~`."""
    given = resources.remote_folder.removeprefix("~/")
    return given or f"workbench-jobs/{legal_name(name)}"


def memory_bytes(text: str) -> int:
    """Return an amount of memory; `16G`, `16Gi`, `16GB` and `16GiB` are all 16 times 2 ** 30.

    Raises:
        PlanError: The text is not an amount of memory.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B?)\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * (1 << _UNITS[found[2].upper()])) if found else 0
    if size < 1 << 20:
        raise PlanError(
            "The value of `memory` must be an amount of memory for one node.",
            seen=text,
            allowed="a number with K, M, G or T: 16G, 512M, 1.5T; at least 1M",
            code="WB-PLAN-221",
        )
    return size


def written(
    envelope: Envelope, file: str, template: str, values: Values, texts: Mapping[str, str]
) -> str:
    """Return a file's text, checked."""
    if not template.endswith(".json"):
        if file.endswith(".py"):
            return filled_python(envelope, template_text(template), values)
        text = filled_script(template_text(template), values, shlex.quote)
        check_options(envelope, text)
        return text
    documents = filled_documents(template, values)
    name, _, definition = envelope.schema.partition(":")
    if definition:
        for one in documents:
            check_document(envelope, one, name, definition)
        if values["shipped"]:
            maps = _config_maps(envelope, values, texts)
            for one in maps:
                check_document(envelope, one, name, "configmap")
            documents = [*maps, *documents]
        check_options(envelope, values["script"])
    elif file != "ray-env.yaml":
        check_document(envelope, documents[0], name)
        for text in ("run", "azure_command", "script"):
            check_options(envelope, values.get(text, ""))
    if file.endswith(".json"):
        return json.dumps(documents[0], indent=2) + "\n"
    return f"{values['header']}\n{as_yaml(documents)}"


# -- whether the platform can ----------------------------------------------------------------------


def checked(envelope: Envelope, folder: Path, job: JobFacts, resources: Resources) -> None:
    """Raise PlanError if the job cannot run there with these resources."""
    if not (folder / "train.py").is_file():
        raise PlanError(
            "This folder is not a job folder, because it has no train.py.",
            seen=str(folder),
            allowed="a folder that was written by wb.job(plan, DIR) or run.to_job(DIR)",
            code="WB-PLAN-222",
        )
    _check_numbers(resources)
    _check_names(resources)
    if job.framework not in envelope.frameworks:
        others = [one.name for one in ENVELOPES.values() if job.framework in one.frameworks]
        raise PlanError(
            f"The platform `{envelope.name}` cannot start a job with {job.framework}.",
            seen=f"a job with {job.framework}, {job.processes} processes",
            allowed=f"platform {envelope.name} with " + ", ".join(envelope.frameworks),
            next_step=f"for {job.framework}, use one of these platforms: " + ", ".join(others),
            code="WB-PLAN-223",
        )
    if envelope.limit and resources.nodes > envelope.limit:
        raise PlanError(
            f"The platform `{envelope.name}` runs a job on only one machine.",
            seen=f"nodes={resources.nodes}",
            next_step="use nodes=1, or another platform, for example slurm, ray or skypilot",
            code="WB-PLAN-224",
        )
    _check_processes(envelope, job, resources)
    needs = [*envelope.needs]
    if resources.gpus_per_node and envelope.name in ("skypilot", "vertex"):
        needs.append("accelerator")
    if missing := [need for need in needs if not getattr(resources, need)]:
        raise PlanError(
            f"The platform `{envelope.name}` needs more arguments: {', '.join(missing)}.",
            seen=", ".join(f"no {need}" for need in missing),
            next_step="add " + ", ".join(f"{need}=..." for need in missing),
            code="WB-PLAN-225",
        )
    if envelope.name == "ssh" and len(resources.hosts) != resources.nodes:
        raise PlanError(
            "`nodes` must equal the number of hosts in `hosts`.",
            seen=f"nodes={resources.nodes}, number of hosts: {len(resources.hosts)}",
            next_step=f"use nodes={len(resources.hosts)}, or change `hosts`",
            code="WB-PLAN-226",
        )


def _check_numbers(resources: Resources) -> None:
    least = {"nodes": 1, "port": 1024, "time_s": 1}
    for one in fields(resources):
        number = getattr(resources, one.name)
        if number is None or not isinstance(one.default, int | None) or one.name == "installed":
            continue
        kind = int | float if one.name == "time_s" else int
        whole = isinstance(number, kind) and number < math.inf
        most = 65535 if one.name == "port" else math.inf
        fits = whole and least.get(one.name, 0) <= number <= most
        if isinstance(number, bool) or not fits:
            raise PlanError(
                f"The value of `{one.name}` is not valid.",
                seen=repr(number),
                allowed=f"{'a whole number, ' * (kind is int)}{least.get(one.name, 0)} "
                + (f"to {most}" if one.name == "port" else "or more"),
                code="WB-PLAN-227",
            )
    if resources.memory:
        memory_bytes(resources.memory)


def _check_names(resources: Resources) -> None:
    """Refuse invalid names for all platforms that would use them."""
    for host in resources.hosts:
        if not _HOST.fullmatch(host):
            raise PlanError(
                "This is not a valid host name for ssh.",
                seen=host,
                allowed="[user@]host",
                code="WB-PLAN-228",
            )
    for name in ("namespace", "service_account", "volume_claim"):
        value = getattr(resources, name)
        if value and "@" not in value and not all(map(_DNS.fullmatch, value.split("."))):
            raise PlanError(
                f"The value of `{name}` is not a valid name in Kubernetes.",
                seen=value,
                allowed="lower-case letters, digits and '-', at most 63 characters (RFC 1123)",
                code="WB-PLAN-229",
            )
    for name in ("partition", "account", "qos"):
        value = getattr(resources, name)
        if value and not _SLURM_WORD.fullmatch(value):
            raise PlanError(
                f"The value of `{name}` is not a valid name in Slurm.",
                seen=value,
                allowed="letters, digits, and the characters _ . , : + @ / -",
                code="WB-PLAN-230",
            )


def _check_processes(envelope: Envelope, job: JobFacts, resources: Resources) -> None:
    each = resources.workers_per_node or job.processes // resources.nodes
    if each * resources.nodes != job.processes:
        fit = [n for n in range(1, job.processes + 1) if job.processes % n == 0]
        total = f"{job.processes}" + (f" (servers included: {job.servers})" if job.servers else "")
        per_node = f", workers_per_node={resources.workers_per_node}"
        raise PlanError(
            f"Each node must run the same number of processes. The total must be {total}.",
            seen=f"nodes={resources.nodes}" + (per_node if resources.workers_per_node else ""),
            allowed="nodes x workers_per_node: "
            + ", ".join(f"{n} x {job.processes // n}" for n in fit[:12]),
            next_step="use one of these pairs, or make the job with another number of workers",
            code="WB-PLAN-231",
        )


# -- values of templates ---------------------------------------------------------------------------


def _values(
    envelope: Envelope, folder: Path, job: JobFacts, resources: Resources
) -> dict[str, Any]:
    """Return the values for the templates; None if the platform must decide."""
    nodes, each = resources.nodes, job.processes // resources.nodes
    size = memory_bytes(resources.memory) if resources.memory else None
    seconds = None if resources.time_s is None else max(1, round(resources.time_s))
    texts = {
        one.name: getattr(resources, one.name) or None
        for one in fields(resources) if isinstance(one.default, str)
    }  # fmt: skip
    torch = job.framework == "torch"
    wheels = [] if resources.installed else sorted(folder.glob("*.whl"))
    version = re.match(r"\d+\.\d+", job.python)
    values: dict[str, Any] = {
        **texts,
        "job": job.name, "dns_name": legal_name(job.name),
        "slurm_name": re.sub(r"[^A-Za-z0-9_.-]+", "-", job.name)[:64].strip("-.") or "job",
        "nodes": nodes, "others": nodes - 1 or None,
        "per_node": each, "per_node_text": str(each), "processes": job.processes,
        "servers": job.servers, "python": f"python{version[0]}" if version else "python3",
        "torch": torch, "tensorflow": not torch, "torch_alone": torch and nodes == 1,
        "torch_nodes": torch and nodes > 1, "recorded": not job.plain,
        "gpus": resources.gpus_per_node or None, "use_gpu": resources.gpus_per_node > 0,
        "cpus": resources.cpus_per_worker * each or None,
        "memory_mib": None if size is None else size >> 20,
        "time_s": seconds, "time_text": None if seconds is None else f"{seconds}s",
        "slurm_time": None if seconds is None else _slurm_time(seconds),
        "port": resources.port, "hosts": resources.hosts,
        "there": far_folder(resources, job.name),
        "copied": not resources.remote_folder, "mount": MOUNT,
        "said": f"By Workbench; {envelope.note}.",
        "wheels": wheels, "wheel": wheels[0].name if wheels else None, "parts": bool(wheels),
        "home": folder, "claimed": bool(resources.volume_claim),
        "shipped": not resources.volume_claim, "installs": not resources.installed,
        "no_storage": not resources.storage,
        "packed": packed_files(folder)
        if envelope.schema.startswith("kubernetes:") and not resources.volume_claim else None,
    }  # fmt: skip
    values["environment"] = filled_script(
        template_text("environment.sh"), values, shlex.quote
    ).rstrip("\n")
    values["header"] = _header(envelope, job, values)
    return {**values, **_of_platform(envelope, folder, job, resources, values)}


def _slurm_time(seconds: int) -> str:
    minutes, rest = divmod(max(60, seconds), 60)
    days, minutes = divmod(minutes, 1440)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


def _header(envelope: Envelope, job: JobFacts, values: Values) -> str:
    name = job.name if envelope.any_name else values["dns_name"]
    name = values["slurm_name"] if envelope.name == "slurm" else name
    lines = [
        f"Made by Workbench: {envelope.summary}.", f"How this file was checked: {envelope.note}.",
        f"Start: {envelope.start}",
        f"Records: {'none (the script does not use Workbench)' if job.plain else envelope.records}",
    ]  # fmt: skip
    if name != job.name:
        lines.append(f"The name {json.dumps(job.name)} is not allowed, so the job is named {name}.")
    return "\n".join(f"# {line}" for line in lines)


def _of_platform(
    envelope: Envelope, folder: Path, job: JobFacts, resources: Resources, values: Values
) -> dict[str, Any]:
    """Return the values for one platform."""
    kind = envelope.name
    if envelope.schema.startswith("kubernetes:"):
        return _of_kubernetes(envelope, folder, job, resources, values)
    ranks = f"--nnodes={values['nodes']} --nproc-per-node={values['per_node']}"
    if kind == "ray":
        return _of_ray(folder, job, resources, "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}")
    if kind == "databricks":
        return {"remote_folder": resources.remote_folder.rstrip("/")}
    if kind == "azureml":
        launch = (
            f"{ranks} --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT"
        )
        named = resources.compute.startswith(("azureml:", "local"))
        return {
            "azure_command": filled_script(
                template_text("azureml.sh"), {**values, "launch": launch}, shlex.quote
            ).strip(),
            "azure_compute": resources.compute if named else f"azureml:{resources.compute}",
        }
    if kind == "vertex":
        launch = (
            f'{ranks} --node-rank="$node" --master-addr="$first" --master-port={resources.port}'
        )
        there = {**values, "launch": launch, "remote_folder": resources.remote_folder.rstrip("/")}
        return {"script": filled_script(template_text("vertex.sh"), there, shlex.quote)}
    if kind == "skypilot":
        return _of_skypilot(job, resources, values)
    return {}


def _of_skypilot(job: JobFacts, resources: Resources, values: Values) -> dict[str, Any]:
    cpus, memory, gpus = values["cpus"], values["memory_mib"], values["gpus"]
    secrets: dict[str, Any] = dict.fromkeys(resources.secrets)
    if job.framework == "tensorflow" and resources.nodes > 1:
        secrets["WORKBENCH_JOB_KEY"] = None
    return {
        "sky_cpus": f"{cpus}+" if cpus else None,
        "sky_memory": f"{-(-memory // 1024)}+" if memory else None,
        "sky_accelerators": {resources.accelerator: gpus} if gpus else None,
        "sky_image": f"docker:{resources.image}" if resources.image else None,
        "sky_mounts": {"/data": resources.data} if resources.data else None,
        "sky_secrets": Exactly(secrets) if secrets else None,
        "setup": filled_script(template_text("sky-setup.sh"), values, shlex.quote),
        "run": filled_script(template_text("sky-run.sh"), values, shlex.quote),
    }


def _of_ray(folder: Path, job: JobFacts, resources: Resources, where: str) -> dict[str, Any]:
    """Return Ray's environment; its pip finds files of the job folder under `where`."""
    lines = [f"{name}=={version}" for name, version in job.packages.items()]
    if (folder / "requirements.txt").is_file():
        text = (folder / "requirements.txt").read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if line.strip()[:1] not in ("", "#")]
    share = {"CPU": resources.cpus_per_worker} if resources.cpus_per_worker else {}
    if share and resources.gpus_per_node:
        share["GPU"] = 1
    return {
        "pip": None
        if resources.installed
        else [re.sub(r"^\./", f"{where}/", line) for line in lines],
        "ray_variables": {LOG_LINES: "1", "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"},
        "excludes": ["/.venv", "/runs"],
        "ray_resources": share or None,
    }


def _of_kubernetes(
    envelope: Envelope, folder: Path, job: JobFacts, resources: Resources, values: Values
) -> dict[str, Any]:
    kind, name = envelope.name, values["dns_name"]
    launch = ""  # TrainJob and PyTorchJob say it in the container's environment (PET_NNODES, ...)
    if kind == "jobset":
        first = f"{name}-node-0-0.{name}"
        launch = (
            f'--nnodes={resources.nodes} --node-rank="$JOB_COMPLETION_INDEX" '
            f"--nproc-per-node={values['per_node']} "
            f"--master-addr={first} --master-port={resources.port}"
        )
    gpus = {"nvidia.com/gpu": values["gpus"]} if values["gpus"] else {}
    mib = {"memory": f"{values['memory_mib']}Mi"} if values["memory_mib"] else {}
    cpus = {"cpu": values["cpus"]} if values["cpus"] else {}
    needs = {"requests": {**cpus, **mib, **gpus} or None, "limits": {**mib, **gpus} or None}
    env: list[dict[str, Any]] = [{"name": LOG_LINES, "value": "1"}]
    env_from = []
    for secret in resources.secrets:
        source, colon, key = secret.partition(":")
        if (
            not _DNS.fullmatch(source)
            or not re.fullmatch(r"[A-Za-z_]\w*|", key)
            or bool(colon) != bool(key)
            or (kind == "trainjob" and not key)
        ):
            raise PlanError(
                f"`{kind}` does not accept a secret that is written in this way.",
                seen=secret,
                allowed="SECRET:KEY, which sets the environment variable KEY"
                + ("" if kind == "trainjob" else "; or SECRET, which sets a variable for each key"),
                next_step="write SECRET:KEY (a Secret's name and one of its keys), never the value",
                code="WB-PLAN-232",
            )
        if key:
            there = {"secretKeyRef": {"name": source, "key": key}}
            env.append({"name": key, "valueFrom": there})
        else:
            env_from.append({"secretRef": {"name": source}})
    script = filled_script(template_text("pod.sh"), {**values, "launch": launch}, shlex.quote)
    volumes, mounts = _volumes(folder, resources, values)
    made = {
        "launch": launch, "env": env, "env_from": env_from or None, "script": script,
        "pod_resources": {k: v for k, v in needs.items() if v} or None,
        "runtime": resources.runtime or "torch-distributed",
        "volumes": volumes, "mounts": mounts, "restart": None, "before": None,
        "container": {"pytorchjob": "pytorch"}.get(kind, "node"),
        "command": ["sh", "-c"], "arguments": [script],
    }  # fmt: skip
    of_pod = {**values, **made}
    (made["pod"],) = filled_documents("pod.json", of_pod)
    (made["never_pod"],) = filled_documents("pod.json", {**of_pod, "restart": "Never"})
    if kind == "rayjob":
        made |= _of_rayjob(folder, job, resources, of_pod)
    return made


def _of_rayjob(folder: Path, job: JobFacts, resources: Resources, of_pod: Values) -> dict[str, Any]:
    """Return Ray's pods, in each of which a first container lays the job's folder out."""
    env = [*of_pod["env"], {"name": "WORKBENCH_JOB", "value": MOUNT}]
    pods = {**of_pod, "command": None, "arguments": None, "env": env}
    if of_pod["shipped"]:
        (first, *rest), files = of_pod["mounts"], "/workbench-files"
        lines = f"set -eu\ncp -L {files}/* {MOUNT}/\n"
        if wheel := of_pod["wheel"]:
            lines += f"cd {MOUNT}\ncat {wheel}.part* > {wheel}\n"
        if of_pod["packed"]:
            lines += (
                f"cd {MOUNT}\ncat {PACKED}.part* > {PACKED}\npython3 -m zipfile -e {PACKED} .\n"
            )
        empty = {"name": "laid-out", "mountPath": MOUNT}
        pods |= {
            "volumes": [*of_pod["volumes"], {"name": "laid-out", "emptyDir": {}}],
            "mounts": [empty, *rest],
            "before": [{
                "name": "lay-out", "image": resources.image, "command": ["sh", "-c"],
                "args": [lines], "volumeMounts": [{**first, "mountPath": files}, empty],
            }],
        }  # fmt: skip
    made: dict[str, Any] = {}
    (made["ray_head"],) = filled_documents(
        "pod.json", {**pods, "container": "ray-head", "pod_resources": None}
    )
    (made["ray_worker"],) = filled_documents("pod.json", {**pods, "container": "ray-worker"})
    environment = _of_ray(folder, job, resources, MOUNT)
    (about,) = filled_documents("ray_environment.json", {**environment, "excludes": None})
    return {**made, **environment, "ray_environment": as_yaml([about])}


def _volumes(folder: Path, resources: Resources, values: Values) -> tuple[list[Any], list[Any]]:
    """Return the volume with the job's folder for pods: a claim, or combined ConfigMaps."""
    source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": resources.volume_claim}}
    if values["shipped"]:
        names = _map_names(values)
        source = {"projected": {"sources": [{"configMap": {"name": name}} for name in names]}}
    volumes = [{"name": "job", **source}]
    mounts = [{"name": "job", "mountPath": MOUNT}]
    if resources.data:
        claim = {"claimName": resources.data}
        volumes.append({"name": "data", "persistentVolumeClaim": claim})
        mounts.append({"name": "data", "mountPath": "/data"})
    return volumes, mounts


def _parts(values: Values) -> Iterator[tuple[str, bytes]]:
    """Yield the wheel and the packed files in parts, by name."""
    whole = {wheel.name: wheel.read_bytes() for wheel in values["wheels"][:1]}
    for name, data in {**whole, PACKED: values["packed"] or b""}.items():
        for number, start in enumerate(range(0, len(data), MAP_BYTES)):
            yield f"{name}.part{number:02}", data[start : start + MAP_BYTES]


def _map_names(values: Values) -> list[str]:
    name = values["dns_name"]
    return [f"{name}-files", *(f"{name}-part-{i}" for i, _ in enumerate(_parts(values)))]


def _shipped(values: Values) -> dict[str, str]:
    """Return the texts of a job folder that are sent with it."""
    paths = [values["home"] / name for name in ("train.py", "run.json", "requirements.txt")]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _config_maps(envelope: Envelope, values: Values, texts: Mapping[str, str]) -> list[Any]:
    """Return the ConfigMaps with the job's folder.

    Raises:
        PlanError: They would be too large.
    """
    parts = list(_parts(values))
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    all_bytes = sum(sizes.values()) + sum(len(data) for _, data in parts)
    if sum(sizes.values()) > MAP_BYTES or all_bytes > MOST_MAP_BYTES:
        largest = {**sizes, **{name: len(data) for name, data in parts}}
        raise PlanError(
            "The job's files are too large for ConfigMaps, which bring the files to the pods.",
            seen=", ".join(f"{name}: {size / 1024:.0f} KiB" for name, size in largest.items()),
            allowed=f"at most {MAP_BYTES // 1000} kB of text, {MOST_MAP_BYTES >> 20} MiB in total",
            next_step="copy the job folder to a PersistentVolumeClaim and use volume_claim='NAME'. "
            "Or, for a large .whl file, use installed=True and an image that contains Workbench",
            code="WB-PLAN-233",
        )
    encoded = [({name: base64.b64encode(data).decode()}) for name, data in parts]
    contents = [{"data": dict(texts)}, *({"binaryData": one} for one in encoded)]
    about = {"namespace": values["namespace"]} if values["namespace"] else {}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **about}, **content}
        for name, content in zip(_map_names(values), contents, strict=True)
    ]
