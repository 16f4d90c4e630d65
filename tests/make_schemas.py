"""Makes workbench/export/schemas/*.json from the packages that the platforms publish.

    python tests/make_schemas.py PACKAGES [NAME ...]

PACKAGES is a folder with the wheels that schemas/README.md names, unpacked over each other. Only
`skypilot`, `azureml` and `databricks` import theirs (so install these three where this runs);
all others are read as text. What a schema does not reach is left out, and so are descriptions, and
no object has keys that its schema does not name.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "workbench" / "export" / "schemas"
Schema = dict[str, Any]
LEFT_OUT = {"managedFields", "status"}
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
YES_NO: Schema = {"type": "boolean"}


def record(properties: Mapping[str, Any], required: Iterable[str] = ()) -> Schema:
    """Return the schema of an object that has these keys and no others."""
    made: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    if required := sorted(required):
        made["required"] = required
    return made


def mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def listing(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def reached(defs: Mapping[str, Schema], roots: Iterable[str]) -> dict[str, Schema]:
    """Return the definitions that the roots lead to."""
    found: dict[str, Schema] = {}
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = defs[name]
            todo += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(defs[name]))
    return dict(sorted(found.items()))


# -- Kubernetes ------------------------------------------------------------------------------------


class Models:
    """The classes of a client that OpenAPI's generator wrote, as definitions."""

    def __init__(self, packages: Path) -> None:
        self.defs: dict[str, Schema] = {
            "Quantity": {"type": ["string", "number"]},
            "IntOrString": {"type": ["string", "integer"]},
            "Time": TEXT,
            "FieldsV1": {"type": "object"},
            "K8sIoApiAutoscalingV2MetricSpec": {"type": "object"},  # of elastic jobs: never written
        }
        for path in sorted((packages / "kubeflow_trainer_api" / "models").glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and self._short(node.name) not in self.defs:
                    self.defs[self._short(node.name)] = self._of_pydantic(node)
        for path in sorted((packages / "kubeflow" / "training" / "models").glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name.startswith("KubeflowOrgV1"):
                    self.defs[node.name] = self._of_swagger(node)
        self._of_kuberay()

    @staticmethod
    def _short(name: str) -> str:
        """Return a kind's name without its group; those of Kubernetes itself have no version."""
        name = re.sub(r"^IoK8sApimachineryPkg(ApisMetaV1|ApiResource|UtilIntstr)", "", name)
        return re.sub(r"^IoK8sApi(Core|Batch)V1", "", name)

    def _of_pydantic(self, node: ast.ClassDef) -> Schema:
        properties: dict[str, Any] = {}
        required = []
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            if line.target.id.startswith("__") or not isinstance(line.value, ast.Call):
                continue
            alias = [k.value.value for k in line.value.keywords if k.arg == "alias"]  # type: ignore[attr-defined]
            name = str(alias[0]) if alias else line.target.id
            if name in LEFT_OUT:
                continue
            properties[name] = self._of_annotation(line.annotation)
            if "Optional" not in ast.unparse(line.annotation):
                required.append(name)
        return record(properties, required)

    def _of_annotation(self, node: ast.expr) -> Schema:
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value)
            if outer == "Optional":
                return self._of_annotation(node.slice)
            if outer == "List":
                return listing(self._of_annotation(node.slice))
            if outer == "Dict" and isinstance(node.slice, ast.Tuple):
                return mapping(self._of_annotation(node.slice.elts[1]))
            if outer == "Annotated" and isinstance(node.slice, ast.Tuple):
                return self._of_annotation(node.slice.elts[0])
            if outer == "Union" and isinstance(node.slice, ast.Tuple):
                return self._of_annotation(node.slice.elts[-1])
        known = {
            "StrictStr": TEXT, "StrictInt": WHOLE, "StrictBool": YES_NO, "StrictFloat": NUMBER,
            "StrictBytes": TEXT, "datetime": TEXT, "object": {}, "Any": {}, "str": TEXT,
        }  # fmt: skip
        name = ast.unparse(node)
        return known[name] if name in known else ref(self._short(name))

    def _of_swagger(self, node: ast.ClassDef) -> Schema:
        named: dict[str, dict[str, str]] = {}
        for line in node.body:
            if isinstance(line, ast.Assign):
                name = ast.unparse(line.targets[0])
                if name in ("openapi_types", "attribute_map"):
                    named[name] = ast.literal_eval(line.value)
        optional = {
            arg.arg for function in node.body
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
            for check in ast.walk(function) if isinstance(check, ast.If)
            for arg in [ast.arg(ast.unparse(check.test).partition(" is not None")[0])]
        }  # fmt: skip
        names = named["attribute_map"]
        properties = {
            names[key]: self._of_words(kind) for key, kind in named["openapi_types"].items()
            if names[key] not in LEFT_OUT
        }  # fmt: skip
        required = {names[key] for key in names if key not in optional}
        return record(properties, required & set(properties))

    def _of_words(self, kind: str) -> Schema:
        if found := re.fullmatch(r"list\[(.+)\]", kind):
            return listing(self._of_words(found[1]))
        if found := re.fullmatch(r"dict\(str, (.+)\)", kind):
            return mapping(self._of_words(found[1]))
        known = {"str": TEXT, "int": WHOLE, "bool": YES_NO, "float": NUMBER, "datetime": TEXT}
        if kind in known:
            return known[kind]
        return ref("Quantity" if "Quantity" in kind else re.sub(r"^V1(?=[A-Z])", "", kind))

    def _of_kuberay(self) -> None:
        """Name the fields that KubeRay documents; it publishes no package that could be read."""
        texts, pods = mapping(TEXT), ref("PodTemplateSpec")
        group = {
            "rayStartParams": texts, "template": pods, "resources": texts, "labels": texts,
        }  # fmt: skip
        self.defs["RayHeadGroup"] = record(
            {
                **group, "headService": {"type": "object"}, "enableIngress": YES_NO,
                "ingressOptions": {"type": "object"},
                "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
            },
            ["rayStartParams", "template"],
        )  # fmt: skip
        self.defs["RayWorkerGroup"] = record(
            {
                **group, "suspend": YES_NO, "groupName": TEXT, "replicas": WHOLE,
                "minReplicas": WHOLE, "maxReplicas": WHOLE, "idleTimeoutSeconds": WHOLE,
                "priority": WHOLE, "numOfHosts": WHOLE,
                "scaleStrategy": record({"workersToDelete": listing(TEXT)}),
            },
            ["groupName", "rayStartParams", "template", "minReplicas", "maxReplicas"],
        )  # fmt: skip
        self.defs["RayClusterSpec"] = record(
            {
                "upgradeStrategy": record({"type": TEXT}), "authOptions": {"type": "object"},
                "suspend": YES_NO, "managedBy": TEXT, "headServiceAnnotations": texts,
                "enableInTreeAutoscaling": YES_NO, "autoscalerOptions": {"type": "object"},
                "gcsFaultToleranceOptions": {"type": "object"},
                "historyServerOptions": {"type": "object"}, "networkPolicy": {"type": "object"},
                "tlsOptions": record({"enabled": YES_NO}), "rayVersion": TEXT,
                "headGroupSpec": ref("RayHeadGroup"),
                "workerGroupSpecs": listing(ref("RayWorkerGroup")),
            },
            ["headGroupSpec"],
        )  # fmt: skip
        self.defs["RayJobSpec"] = record({
            "activeDeadlineSeconds": WHOLE, "backoffLimit": WHOLE,
            "rayClusterSpec": ref("RayClusterSpec"), "submitterPodTemplate": pods,
            "metadata": texts, "clusterSelector": texts,
            "submitterConfig": record({"backoffLimit": WHOLE}),
            "managedBy": {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
            "deletionStrategy": {"type": "object"}, "entrypoint": TEXT, "runtimeEnvYAML": TEXT,
            "jobId": TEXT, "submissionMode": {
                "enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
            },
            "entrypointResources": TEXT, "entrypointNumCpus": NUMBER, "entrypointNumGpus": NUMBER,
            "ttlSecondsAfterFinished": WHOLE, "preRunningDeadlineSeconds": WHOLE,
            "shutdownAfterJobFinishes": YES_NO, "suspend": YES_NO,
        })  # fmt: skip


def kubernetes(packages: Path) -> Schema:
    defs = Models(packages).defs
    kinds = {
        "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", "TrainerV1alpha1TrainJobSpec"),
        "pytorchjob": ("kubeflow.org/v1", "PyTorchJob", "KubeflowOrgV1PyTorchJobSpec"),
        "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet", "JobsetV1alpha2JobSetSpec"),
        "rayjob": ("ray.io/v1", "RayJob", "RayJobSpec"),
    }
    for name, (version, kind, spec) in kinds.items():
        defs[name] = record(
            {
                "apiVersion": {"const": version}, "kind": {"const": kind},
                "metadata": ref("ObjectMeta"), "spec": ref(spec),
            },
            ["apiVersion", "kind", "metadata", "spec"],
        )  # fmt: skip
    config_map = defs["configmap"] = record(
        {
            "apiVersion": {"const": "v1"}, "kind": {"const": "ConfigMap"},
            "metadata": ref("ObjectMeta"), "data": mapping(TEXT), "binaryData": mapping(TEXT),
            "immutable": YES_NO,
        },
        ["apiVersion", "kind", "metadata"],
    )  # fmt: skip
    for key in ("data", "binaryData"):
        config_map["properties"][key]["propertyNames"] = {"pattern": "^[-._a-zA-Z0-9]{1,253}$"}
    return {"$defs": reached(defs, [*kinds, "configmap"])}


# -- the clouds ------------------------------------------------------------------------------------


def vertex(packages: Path) -> Schema:
    """Read the classes of proto-plus; keys are those of the JSON that the service takes."""
    types = packages / "google" / "cloud" / "aiplatform_v1" / "types"
    defs: dict[str, Schema] = {"Duration": TEXT, "Timestamp": TEXT, "Status": {"type": "object"}}
    kinds = {"STRING": TEXT, "INT32": WHOLE, "INT64": {"type": ["integer", "string"]}}
    kinds |= {"BOOL": YES_NO, "FLOAT": NUMBER, "DOUBLE": NUMBER}
    for stem in (
        "custom_job", "machine_resources", "env_var", "io", "encryption_spec",
        "reservation_affinity", "service_networking", "accelerator_type", "job_state",
    ):  # fmt: skip
        for node in ast.parse((types / f"{stem}.py").read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for inner in (one for one in node.body if isinstance(one, ast.ClassDef)):
                defs[inner.name] = _members(inner)
            if ast.unparse(node.bases[0]) == "proto.Enum":
                defs[node.name] = _members(node)
                continue
            properties = {}
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
                    assert isinstance(line.target, ast.Name)
                    call = line.value
                    of = {k.arg: ast.unparse(k.value).strip("'") for k in call.keywords}
                    message = of.get("message") or of.get("enum")
                    kind = ast.unparse(call.args[-1]).rpartition(".")[2]
                    one = ref(message.rpartition(".")[2]) if message else kinds[kind]
                    if ast.unparse(call.func) == "proto.RepeatedField":
                        one = listing(one)
                    elif ast.unparse(call.func) == "proto.MapField":
                        one = mapping(one)
                    properties[_camel(line.target.id)] = one
            defs[node.name] = record(properties)
    only_told = ("name", "state", "createTime", "startTime", "endTime", "updateTime", "error",
                 "webAccessUris", "satisfiesPzs", "satisfiesPzi")  # fmt: skip
    for key in only_told:
        defs["CustomJob"]["properties"].pop(key, None)
    defs["CustomJob"]["required"] = ["displayName", "jobSpec"]
    defs["CustomJobSpec"]["required"] = ["workerPoolSpecs"]
    return {**ref("CustomJobSpec"), "$defs": reached(defs, ["CustomJobSpec"])}


def _members(node: ast.ClassDef) -> Schema:
    return {"enum": [
        line.targets[0].id for line in node.body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    ]}  # fmt: skip


def _camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)


def databricks(packages: Path) -> Schema:
    """Read the data classes of databricks-sdk, which is installed here."""
    from databricks.sdk.service import jobs

    defs: dict[str, Schema] = {}

    def of(kind: Any) -> Schema:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is list:
            return listing(of(args[0]))
        if origin is dict:
            return mapping(of(args[1]))
        if args and type(None) in args:
            return of(next(one for one in args if one is not type(None)))
        if inspect.isclass(kind) and issubclass(kind, enum.Enum):
            return {"enum": [one.value for one in kind]}
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            if kind.__name__ not in defs:
                defs[kind.__name__] = {}
                hints = typing.get_type_hints(kind)
                defs[kind.__name__] = record(
                    {one.name: of(hints[one.name]) for one in dataclasses.fields(kind)},
                    [one.name for one in dataclasses.fields(kind)
                     if one.default is dataclasses.MISSING
                     and one.default_factory is dataclasses.MISSING],
                )  # fmt: skip
            return ref(kind.__name__)
        return {str: TEXT, int: WHOLE, bool: YES_NO, float: NUMBER}.get(kind, {})

    hints = typing.get_type_hints(jobs.JobsAPI.submit)
    hints.pop("return", None)
    defs["Submit"] = record({name: of(kind) for name, kind in hints.items()}, ["tasks"])
    used = ("task_key", "run_if", "timeout_seconds", "new_cluster", "existing_cluster_id",
            "libraries", "spark_python_task", "environment_key", "depends_on", "description",
            "email_notifications", "notification_settings", "health")  # fmt: skip
    task = defs["SubmitTask"]["properties"]  # the other kinds of task are never written
    defs["SubmitTask"]["properties"] = {key: task[key] for key in used if key in task}
    return {**ref("Submit"), "$defs": reached(defs, ["Submit"])}


def azureml(packages: Path) -> Schema:
    """Read the marshmallow schema of azure-ai-ml, which is installed here."""
    from azure.ai.ml._schema.core import fields as theirs
    from azure.ai.ml._schema.job.command_job import CommandJobSchema
    from marshmallow import fields

    defs: dict[str, Schema] = {}

    def of_schema(kind: Any) -> Schema:
        name = kind.__name__.removesuffix("Schema")
        if name not in defs:
            defs[name] = {}
            declared = kind._declared_fields
            defs[name] = record(
                {
                    one.data_key or key: of(one)
                    for key, one in declared.items()
                    if not one.dump_only
                },
                [one.data_key or key for key, one in declared.items() if one.required],
            )
        return ref(name)

    def of(field: Any) -> Schema:
        if isinstance(field, theirs.StringTransformedEnum):
            return {"enum": list(field.allowed_values)}
        if isinstance(field, fields.Nested):
            nested = (
                field.nested()
                if not inspect.isclass(field.nested) and callable(field.nested)
                else field.nested
            )
            return of_schema(nested if inspect.isclass(nested) else type(nested))
        if isinstance(field, theirs.UnionField):
            return {"anyOf": [of(one) for one in field.union_fields]}
        if isinstance(field, fields.List):
            return listing(of(field.inner))
        if isinstance(field, fields.Dict):
            return mapping(of(field.value_field) if field.value_field is not None else {})
        if isinstance(field, fields.Bool):
            return YES_NO
        if isinstance(field, fields.Int):
            return WHOLE
        if isinstance(field, fields.Number):
            return NUMBER
        return {} if type(field) is fields.Field else TEXT

    of_schema(CommandJobSchema)
    job = defs["CommandJob"]
    job["properties"] |= {"$schema": TEXT, "type": {"const": "command"}}
    text_or_record = {"anyOf": [TEXT, {
        **record(dict.fromkeys(("image", "name", "version", "conda_file", "description"), TEXT)),
    }]}  # fmt: skip
    job["properties"]["environment"] = text_or_record
    kinds = ("PyTorchDistribution", "TensorFlowDistribution", "MPIDistribution")
    job["properties"]["distribution"] = {"anyOf": [ref(kind) for kind in kinds]}
    for key in ("code", "compute"):  # of several kinds, all written as text
        job["properties"][key] = TEXT
    for key in ("services", "inputs", "outputs", "creation_context", "identity"):  # never written
        job["properties"].pop(key, None)
    job["required"] = sorted({*job.get("required", ()), "command", "environment", "type"})
    return {**ref("CommandJob"), "$defs": reached(defs, ["CommandJob"])}


def skypilot(packages: Path) -> Schema:
    """Take SkyPilot's own schemas, with the one of resources put where its loader applies it."""
    from sky.utils import schemas

    def cleaned(node: Any) -> Any:
        if isinstance(node, dict):
            dropped = ("$schema", "description", "case_insensitive_enum", "case_sensitive_enum")
            return {k: cleaned(v) for k, v in node.items() if k not in dropped}
        return [cleaned(one) for one in node] if isinstance(node, list) else node

    task, resources = schemas.get_task_schema(), schemas.get_resources_schema()
    kept = ("name", "workdir", "num_nodes", "file_mounts", "setup", "run", "envs", "secrets",
            "event_callback", "volumes")  # fmt: skip
    properties = {key: cleaned(task["properties"][key]) for key in kept}
    resources["properties"] = {
        key: one for key, one in resources["properties"].items()
        if not key.startswith("_") and key not in ("any_of", "ordered")
    }  # fmt: skip
    properties["resources"] = cleaned(resources)
    return record(properties)


# -- what is called in a script, and options of commands -------------------------------------------


def _class(path: Path, name: str) -> ast.ClassDef:
    return next(
        node for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    )  # fmt: skip


def _fields(path: Path, name: str) -> list[str]:
    """Return the keywords of a pydantic model or a data class."""
    return [
        line.target.id for line in _class(path, name).body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
    ]  # fmt: skip


def _arguments(tree: ast.AST, name: str) -> list[str]:
    found = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    every = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    return [one.arg for one in every if one.arg != "self"]


def ray(packages: Path) -> Schema:
    train = packages / "ray" / "train"
    config = train / "v2" / "api" / "config.py"
    return {
        "ray.train.torch.TorchTrainer": _arguments(
            _class(train / "v2" / "torch" / "torch_trainer.py", "TorchTrainer"), "__init__"
        ),
        "ray.train.ScalingConfig": sorted({
            *_fields(packages / "ray" / "air" / "config.py", "ScalingConfig"),
            *_fields(config, "ScalingConfig"),
        }),
        "ray.train.RunConfig": _fields(config, "RunConfig"),
        "ray.train.torch.TorchConfig": _fields(train / "torch" / "config.py", "TorchConfig"),
    }  # fmt: skip


def sagemaker(packages: Path) -> Schema:
    core = packages / "sagemaker" / "core"
    trainer = packages / "sagemaker" / "train" / "model_trainer.py"
    shapes, configs = core / "shapes" / "shapes.py", core / "training" / "configs.py"
    return {
        "sagemaker.train.ModelTrainer": _fields(trainer, "ModelTrainer"),
        "sagemaker.train.ModelTrainer.train": _arguments(_class(trainer, "ModelTrainer"), "train"),
        "sagemaker.train.configs.SourceCode": _fields(configs, "SourceCode"),
        "sagemaker.train.configs.Compute": sorted(
            {*_fields(shapes, "ResourceConfig"), *_fields(configs, "Compute")}
        ),
        "sagemaker.train.configs.StoppingCondition": _fields(shapes, "StoppingCondition"),
        "sagemaker.train.distributed.Torchrun": _fields(
            packages / "sagemaker" / "train" / "distributed.py", "Torchrun"
        ),
    }


def monarch(packages: Path) -> Schema:
    tree = ast.parse((packages / "monarch" / "_src" / "job" / "spmd.py").read_text())
    return {
        "monarch.job.spmd.serve": _arguments(tree, "serve"),
        "monarch.job.spmd.SPMDJob.run_spmd": _arguments(tree, "run_spmd"),
    }


def spark(packages: Path) -> Schema:
    """Say what Spark's reference documents: its package is too large to unpack for two lines."""
    return {
        "pyspark.ml.torch.distributor.TorchDistributor": ["num_processes", "local_mode", "use_gpu"],
        "pyspark.ml.torch.distributor.TorchDistributor.run": ["train_object"],
    }


def options(packages: Path) -> Schema:
    """Read the manual pages of Slurm and the parser of torchrun, both installed here."""
    made = {}
    for command in ("sbatch", "srun"):
        page = subprocess.run(
            f"man {command} | col -b", shell=True, capture_output=True, text=True, check=True
        ).stdout
        found = re.findall(r"^ {7}(?:-\w(?: ?[^ ,]+)?, )?--([a-z0-9-]+)", page, re.M)
        made[command] = sorted(set(found))
    from torch.distributed.run import get_args_parser

    made["torchrun"] = sorted({
        option[2:] for action in get_args_parser()._actions for option in action.option_strings
        if option.startswith("--")
    })  # fmt: skip
    return made


MADE: dict[str, Callable[[Path], Schema]] = {
    "kubernetes": kubernetes, "vertex": vertex, "databricks": databricks, "azureml": azureml,
    "skypilot": skypilot, "ray": ray, "sagemaker": sagemaker, "monarch": monarch, "spark": spark,
    "options": options,
}  # fmt: skip


def main() -> None:
    """Write the schemas that are named, or all."""
    packages, names = Path(sys.argv[1]), sys.argv[2:] or list(MADE)
    for name in names:
        text = json.dumps(MADE[name](packages), separators=(",", ":"), sort_keys=True)
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name:12} {len(text):7} bytes")


if __name__ == "__main__":
    main()
