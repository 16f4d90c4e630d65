"""Envelopes: what is written for each platform, what is refused; nothing can be injected."""

from __future__ import annotations

import ast
import base64
import dataclasses
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import PlanError
from workbench.export import envelopes, published
from workbench.export.envelopes import (
    ENVELOPES,
    JobFacts,
    Resources,
    legal_name,
    memory_bytes,
    write_envelope,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "platforms.md"
JOB = JobFacts("digits", "torch", workers=4, servers=0, processes=4, python="3.11.7")
EVIL = "a\"; rm -rf / #\n$(touch /tmp/x)`id`'${HOME}"
ALL = Resources(
    nodes=2, gpus_per_node=2, cpus_per_worker=3, memory="16Gi", time_s=3600, partition="small",
    account="a1", qos="high", image="img:1", namespace="team", service_account="runner",
    region="aws/us-east-1", instance_type="m5", accelerator="NVIDIA_L4", runtime="16.4.x",
    remote_folder="/shared/job", storage="/shared/ray", data="digits-data",
    role="arn:aws:iam::1:role/x", compute="cpu-cluster",
    hosts=("one", "u@two"), secrets=("tokens:HF_TOKEN",),
)  # fmt: skip
LEAST = Resources(
    image="img:1", instance_type="m5", runtime="x", remote_folder="/shared/job", role="arn",
    compute="c", hosts=("one",),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("import workbench as wb\n\nwb.run_job(__file__)\n\tµ = 1\n")
    (tmp_path / "run.json").write_text('{"format": "workbench-job/1"}\n')
    (tmp_path / "requirements.txt").write_text("# pins\ntorch==2.13.0\n./wb-1-py3-none-any.whl\n")
    (tmp_path / "wb-1-py3-none-any.whl").write_bytes(bytes(range(256)) * 4)
    return tmp_path


def for_platform(name, resources):
    """Return the resources with what one platform alone takes or refuses put right."""
    if name == "monarch":
        resources = dataclasses.replace(resources, nodes=1)
    if name == "skypilot":
        resources = dataclasses.replace(resources, secrets=("HF_TOKEN",), data="s3://bucket")
    return resources


def write(name, folder, job=JOB, resources=ALL):
    return {path.name: path.read_text() for path in write_envelope(
        name, folder, job, for_platform(name, resources)
    )}  # fmt: skip


def refused(code, name, where, job=JOB, **changes):
    with pytest.raises(PlanError) as caught:
        write_envelope(name, where, job, dataclasses.replace(LEAST, **changes))
    assert caught.value.code == code
    return str(caught.value)


def documents(text):
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def read(name, text):
    """Read a file as its platform would; raises where it has no such syntax."""
    if name.endswith((".sh", ".sbatch")):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)
    elif name.endswith(".py"):
        ast.parse(text)
    elif name.endswith(".json"):
        json.loads(text)
    else:
        assert documents(text)


RESOURCES = {
    "all": ALL,
    "least": LEAST,
    "one node for each process": dataclasses.replace(ALL, nodes=4, hosts=("a", "b", "c", "d")),
    "no GPUs": dataclasses.replace(ALL, gpus_per_node=0, accelerator=""),
    "a claim": dataclasses.replace(ALL, volume_claim="jobs"),
    "an image with all in it": dataclasses.replace(ALL, installed=True),
}


@pytest.mark.parametrize("resources", RESOURCES.values(), ids=RESOURCES)
@pytest.mark.parametrize("name", ENVELOPES)
def test_every_envelope_is_written_and_can_be_read(name, resources, folder):
    made = write(name, folder, resources=resources)
    assert set(made) == set(ENVELOPES[name].files)
    for file, text in made.items():
        read(file, text)


@pytest.mark.parametrize("name", ENVELOPES)
def test_every_file_says_what_was_done_to_check_it(name, folder):
    for text in write(name, folder).values():
        assert ENVELOPES[name].note in text


@pytest.mark.parametrize("name", ENVELOPES)
def test_files_are_written_again_without_a_change(name, folder):
    assert write(name, folder) == write(name, folder)


def test_nothing_of_this_environment_is_in_any_file(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    monkeypatch.setenv("USER", "somebody-here")
    for name in ENVELOPES:
        text = "".join(write(name, folder).values())
        assert "hf_secret_of_mine" not in text
        assert "somebody-here" not in text


# -- nothing is injected -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_name_with_quotes_and_lines_becomes_no_syntax(name, folder):
    plain = write(name, folder)
    evil = write(name, folder, job=dataclasses.replace(JOB, name=EVIL))
    for file, text in evil.items():
        read(file, text)
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        if file.endswith((".sh", ".sbatch")):
            assert not [line for line in lines if "/tmp/x" in line]
        elif file.endswith(".py"):
            assert calls(text) == calls(plain[file])
        elif file.endswith(".yaml"):
            assert [*map(keys, documents(text))] == [*map(keys, documents(plain[file]))]


def calls(script):
    return [type(node) for node in ast.walk(ast.parse(script))]


def keys(node):
    """Return what a document is made of, without its texts."""
    if isinstance(node, dict):
        return {key: keys(inner) for key, inner in node.items()}
    return [keys(inner) for inner in node] if isinstance(node, list) else type(node)


FREE = (
    "image",
    "region",
    "instance_type",
    "runtime",
    "remote_folder",
    "storage",
    "role",
    "compute",
)


@pytest.mark.parametrize("one", FREE)
@pytest.mark.parametrize("name", ENVELOPES)
def test_a_value_that_the_user_chooses_is_quoted_everywhere(name, one, folder):
    if name == "skypilot" and one == "region":  # its schema has a pattern
        with pytest.raises(PlanError) as caught:
            write(name, folder, resources=dataclasses.replace(ALL, region=EVIL))
        assert caught.value.code == "WB-PLAN-234"
        return
    plain = write(name, folder)
    for file, text in write(
        name, folder, resources=dataclasses.replace(ALL, **{one: EVIL})
    ).items():
        read(file, text)
        if file.endswith((".sh", ".sbatch")):
            assert "-rf" not in shlex.split(text, comments=True)
        elif file.endswith(".py"):
            assert calls(text) == calls(plain[file])
        elif file.endswith(".yaml"):
            assert [*map(keys, documents(text))] == [*map(keys, documents(plain[file]))]


@pytest.mark.parametrize("one", ["partition", "account", "qos"])
@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --uid=0", "-x", "$(id)", "'"])
def test_a_word_that_slurm_cannot_read_is_refused(one, value, folder):
    refused("WB-PLAN-230", "slurm", folder, **{one: value})


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a b", "a;b", "$(id)", "", "a\nb"])
def test_a_host_that_is_none_is_refused(host, folder):
    refused("WB-PLAN-228", "ssh", folder, hosts=(host,))


@pytest.mark.parametrize("one", ["namespace", "service_account", "volume_claim"])
def test_a_name_that_kubernetes_has_not_is_refused(one, folder):
    refused("WB-PLAN-229", "trainjob", folder, **{one: "My_Team"})


@pytest.mark.parametrize("secret", ["", "a:b c", "a:", "tokens", "A:B", "hf_abc"])
def test_secrets_are_names_never_values(secret, folder):
    refused("WB-PLAN-232", "trainjob", folder, secrets=(secret,))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text())
NODES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(NODES)
def test_yaml_reads_back_as_what_was_written(node):
    text = published.as_yaml([{"x": node}])
    assert documents(text) == [{"x": node}]


@pytest.mark.parametrize(
    "text",
    ["a\nb", "a\nb\n", "  a\n b\n", "\n\na\n", "a\n\n", "a\n  \n", "\ta\n\tb\n",
     "---\na\n", "# a\nb\n", "yes", "no", "1", "1e3", "~", "null", "- a", "a: b\nc",
     "\u0085\n\u2028", "😀", "%a\nb", "=",
     ".inf", "0x1f", "2026-01-01", "\ufeffa\nb"],
)  # fmt: skip
def test_yaml_keeps_texts_that_look_like_something_else(text):
    assert documents(published.as_yaml([{"x": text, "y": [text]}])) == [{"x": text, "y": [text]}]


# -- what the platforms' schemas refuse ------------------------------------------------------------

DOCUMENTS = {
    name: (file, template)
    for name, one in ENVELOPES.items()
    for file, template in one.files.items()
    if template.endswith(".json") and file != "ray-env.yaml"
}


def places(node, path=()):
    """Yield the path of every object that an envelope itself names keys of."""
    if isinstance(node, dict):
        yield path
        for key, inner in node.items():
            yield from places(inner, (*path, key))
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from places(inner, (*path, number))


FREELY_KEYED = {
    "requests", "limits", "envs", "secrets", "file_mounts", "accelerators", "data",
    "rayStartParams", "environment_variables", "spark_env_vars", "pytorchReplicaSpecs",
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_key_that_the_platform_does_not_know_is_refused_wherever_it_is(name, folder):
    envelope, (file, _) = ENVELOPES[name], DOCUMENTS[name]
    document = documents(write(name, folder)[file])[-1]
    schema, _, definition = envelope.schema.partition(":")
    published.check_document(envelope, document, schema, definition)
    tried = 0
    for path in places(document):
        if path and path[-1] in FREELY_KEYED:
            continue
        changed = json.loads(json.dumps(document))
        at = changed
        for step in path:
            at = at[step]
        at["numnodes"] = 1
        with pytest.raises(PlanError) as caught:
            published.check_document(envelope, changed, schema, definition)
        assert caught.value.code == "WB-PLAN-234"
        assert "numnodes" in str(caught.value)
        tried += 1
    assert tried >= 2


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_wrong_key_in_a_template_is_refused_when_it_is_written(name, folder, monkeypatch):
    file, template = DOCUMENTS[name]
    (first, *_) = json.loads(published.template_text(template))
    changed = json.dumps([{**first, "podTemplateOverrides": []}])
    real = published.template_text
    monkeypatch.setattr(
        published, "template_text", lambda one: changed if one == template else real(one)
    )
    with pytest.raises(PlanError) as caught:
        write(name, folder)
    assert caught.value.code == "WB-PLAN-234"
    assert not (folder / file).exists()


def test_a_value_of_a_wrong_kind_is_refused(folder):
    with pytest.raises(PlanError) as caught:
        write("vertex", folder, resources=dataclasses.replace(ALL, accelerator="H100"))
    assert caught.value.code == "WB-PLAN-234"
    assert "acceleratorType" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["#SBATCH --gpus-for-node=1", "srun --kill-on-exit=1 true", "torchrun --nproc=2 train.py",
     "exec python3 -m torch.distributed.run --nodes=2 train.py",
     "srun --kill-on-bad-exit=1 torchrun \\\n  --nodes=2 train.py"],
)  # fmt: skip
def test_an_option_that_a_command_does_not_have_is_refused(line):
    with pytest.raises(PlanError) as caught:
        published.check_options(ENVELOPES["slurm"], line + "\n")
    assert caught.value.code == "WB-PLAN-235"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("ray", "num_workers=", "workers="), ("ray", "scaling_config=", "scale="),
     ("ray", "RunConfig", "RunConfiguration"), ("spark", "use_gpu=", "gpus="),
     ("sagemaker", "instance_count=", "count="), ("sagemaker", "wait=", "block="),
     ("sagemaker", "process_count_per_node=", "nproc="), ("monarch", "scheduler=", "launcher="),
     ("monarch", "job.run_spmd()", "job.run_spmd(1)")],
)  # fmt: skip
def test_a_call_that_a_library_does_not_publish_is_refused(name, old, new, folder, monkeypatch):
    real = published.template_text
    monkeypatch.setattr(published, "template_text", lambda one: real(one).replace(old, new))
    monkeypatch.setattr(envelopes, "template_text", published.template_text)
    with pytest.raises(PlanError) as caught:
        write(name, folder)
    assert caught.value.code == "WB-PLAN-236"


# -- what is asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"nodes": 0}, {"nodes": -1}, {"gpus_per_node": -1}, {"cpus_per_worker": -2}, {"time_s": 0},
     {"time_s": -5.0}, {"nodes": 1.5}, {"nodes": True}, {"workers_per_node": -1}, {"port": 80},
     {"time_s": float("nan")}, {"time_s": float("inf")}, {"time_s": "1h"}, {"port": 65536},
     {"nodes": "2"}],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(wrong, folder):
    refused("WB-PLAN-227", "slurm", folder, **wrong)


@pytest.mark.parametrize("wrong", [{"nodes": 3}, {"nodes": 2, "workers_per_node": 3}, {"nodes": 8}])
def test_processes_that_do_not_fill_the_nodes_evenly_are_refused(wrong, folder):
    assert "1 x 4, 2 x 2, 4 x 1" in refused("WB-PLAN-231", "slurm", folder, **wrong)


def test_servers_are_processes_like_others(folder):
    job = dataclasses.replace(JOB, workers=3, servers=1)
    assert "--nproc-per-node=2" in write("slurm", folder, job=job)["job.sbatch"]


def test_a_platform_that_cannot_start_tensorflow_names_those_that_can(folder):
    job = dataclasses.replace(JOB, framework="tensorflow")
    assert "slurm" in refused("WB-PLAN-223", "trainjob", folder, job=job)


@pytest.mark.parametrize(
    "name", [one.name for one in ENVELOPES.values() if "tensorflow" in one.frameworks]
)
def test_tensorflow_is_started_with_its_own_script(name, folder):
    made = write(name, folder, job=dataclasses.replace(JOB, framework="tensorflow", servers=1))
    assert "start_tf.py" in made
    read("start_tf.py", made["start_tf.py"])
    assert "torchrun" not in "".join(
        line for text in made.values() for line in text.splitlines() if not line.startswith("#")
    )


def test_a_platform_of_one_machine_refuses_several(folder):
    refused("WB-PLAN-224", "monarch", folder, nodes=2)


@pytest.mark.parametrize(
    ("name", "without"),
    [("pytorchjob", "image"), ("sagemaker", "role"), ("azureml", "compute"),
     ("databricks", "remote_folder"), ("vertex", "instance_type")],
)  # fmt: skip
def test_what_a_platform_must_be_told_is_asked_for(name, without, folder):
    assert f"{without}=" in refused("WB-PLAN-225", name, folder, **{without: ""})


def test_gpus_on_a_cloud_must_have_a_name(folder):
    assert "accelerator=" in refused("WB-PLAN-225", "skypilot", folder, gpus_per_node=1)


def test_there_is_one_host_for_each_node(folder):
    refused("WB-PLAN-226", "ssh", folder, nodes=2, hosts=("a", "b", "c"))


def test_an_unknown_platform_is_refused(folder):
    refused("WB-PLAN-037", "slrum", folder)


def test_a_folder_without_a_job_is_refused(tmp_path):
    refused("WB-PLAN-222", "slurm", tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16G", 16 << 30), ("16Gi", 16 << 30), ("16 GiB", 16 << 30), ("512M", 512 << 20),
     ("1.5T", 3 << 39), ("2097152", 2 << 20), ("64gb", 64 << 30)],
)  # fmt: skip
def test_memory_is_read_as_users_of_all_platforms_write_it(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "16", "-1G", "lots", "16GG", "1e3G", "16G\n--x"])
def test_what_is_no_memory_is_refused(text):
    with pytest.raises(PlanError) as caught:
        memory_bytes(text)
    assert caught.value.code == "WB-PLAN-221"


def test_memory_is_written_as_each_platform_takes_it(folder):
    assert "--mem=16384M" in write("slurm", folder)["job.sbatch"]
    (trainjob,) = documents(write("trainjob", folder)["trainjob.yaml"])[-1:]
    assert trainjob["spec"]["trainer"]["resourcesPerNode"]["requests"]["memory"] == "16384Mi"
    assert documents(write("skypilot", folder)["sky.yaml"])[0]["resources"]["memory"] == "16+"


@pytest.mark.parametrize(
    ("name", "legal"),
    [("digits", "digits"), ("My Job", "my-job"), ("äö", "job"), ("", "job"), ("-a-", "a"),
     ("x" * 80, "x" * 40), ("Ä_digits_2", "digits-2"), ("a" * 39 + "-b", "a" * 39),
     ("2 GPUs", "job-2-gpus"), ("7", "job-7")],
)  # fmt: skip
def test_a_name_that_kubernetes_refuses_becomes_a_legal_one(name, legal):
    assert legal_name(name) == legal


def test_a_changed_name_is_told_in_the_file(folder):
    text = write("trainjob", folder, job=dataclasses.replace(JOB, name="My Job"))["trainjob.yaml"]
    assert documents(text)[-1]["metadata"]["name"] == "my-job"
    (line,) = [one for one in text.splitlines() if '"My Job"' in one]
    assert "my-job" in line


def test_time_is_at_least_a_minute_for_slurm(folder):
    short = dataclasses.replace(ALL, time_s=5)
    assert "--time=0-00:01:00" in write("slurm", folder, resources=short)["job.sbatch"]
    long = dataclasses.replace(ALL, time_s=90061)
    assert "--time=1-01:01:01" in write("slurm", folder, resources=long)["job.sbatch"]


def test_a_pod_has_time_to_write_a_checkpoint_when_it_is_told_to_end(folder):
    """torchrun gives its ranks 30 s, which is all that Kubernetes gives a pod by default."""
    (job,) = documents(write("pytorchjob", folder)["pytorchjob.yaml"])[-1:]
    for kind in job["spec"]["pytorchReplicaSpecs"].values():
        assert kind["template"]["spec"]["terminationGracePeriodSeconds"] > 30


def test_a_script_of_slurm_hears_of_both_warnings_and_is_queued_again_after_its_own(folder):
    text = write("slurm", folder)["job.sbatch"]
    assert "#SBATCH --signal=B:USR1@60" in text
    assert "trap 'again=1; warn' USR1" in text
    assert "trap warn TERM" in text
    assert 'if [ -n "$again" ]' in text


def test_gpus_are_asked_for_only_where_there_are_some(folder):
    without = dataclasses.replace(ALL, gpus_per_node=0)
    assert "gpu" not in write("slurm", folder, resources=without)["job.sbatch"]
    assert "--gpus-per-node=2" in write("slurm", folder)["job.sbatch"]


# -- how the folder reaches pods -------------------------------------------------------------------


def test_pods_get_the_whole_folder_from_config_maps(folder):
    (folder / "wb-1-py3-none-any.whl").write_bytes(bytes(range(256)) * 4000)
    *maps, _ = documents(write("trainjob", folder)["trainjob.yaml"])
    texts = maps[0]["data"]
    assert texts["train.py"] == (folder / "train.py").read_text()
    assert texts["requirements.txt"] == (folder / "requirements.txt").read_text()
    parts = {name: data for one in maps[1:] for name, data in one["binaryData"].items()}
    joined = b"".join(base64.b64decode(parts[name]) for name in sorted(parts))
    assert joined == (folder / "wb-1-py3-none-any.whl").read_bytes()
    assert len(parts) == 2
    assert all(len(json.dumps(one)) < 1 << 20 for one in maps)


def test_files_reach_rays_pods_too(folder):
    (folder / "helper.py").write_text("K = 3\n")
    known = {"format": "workbench-job/1", "files": {"helper.py": ""}}
    (folder / "run.json").write_text(json.dumps(known))
    *maps, job = documents(write("rayjob", folder)["rayjob.yaml"])
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (script,) = pod["initContainers"][0]["args"]
    laid_out = folder / "laid-out"
    laid_out.mkdir()
    script = script.replace("/workbench-files/", f"{mounted_from(maps, folder)}/")
    as_container(folder, script.replace(envelopes.MOUNT, str(laid_out)))
    assert (laid_out / "helper.py").read_text() == "K = 3\n"
    assert (laid_out / "wb-1-py3-none-any.whl").read_bytes() == bytes(range(256)) * 4


def test_a_claim_takes_the_place_of_config_maps(folder):
    claimed = dataclasses.replace(ALL, volume_claim="jobs")
    (only,) = documents(write("jobset", folder, resources=claimed)["jobset.yaml"])
    assert "claimName" in json.dumps(only)


def test_files_too_large_for_config_maps_are_refused(folder):
    (folder / "wb-1-py3-none-any.whl").write_bytes(bytes(9 << 20))
    assert "volume_claim=" in refused("WB-PLAN-233", "trainjob", folder)


def test_data_too_large_for_any_config_map_is_not_even_read(folder):
    (folder / "data").mkdir()
    with (folder / "data" / "x.bin").open("wb") as file:
        file.truncate(65 << 20)
    (folder / "run.json").write_text(json.dumps({"files": {"data": ""}}))
    assert "volume_claim=" in refused("WB-PLAN-262", "trainjob", folder)
    write_envelope("slurm", folder, JOB, LEAST)
    write_envelope("trainjob", folder, JOB, dataclasses.replace(LEAST, volume_claim="jobs"))


def test_an_image_with_all_in_it_is_sent_no_wheel(folder):
    ready = dataclasses.replace(ALL, installed=True)
    text = write("trainjob", folder, resources=ready)["trainjob.yaml"]
    assert "binaryData" not in text
    assert "pip install" not in text


def test_a_secret_is_named_and_becomes_a_variable(folder):
    env = documents(write("trainjob", folder)["trainjob.yaml"])[-1]["spec"]["trainer"]["env"]
    source = {"secretKeyRef": {"name": "tokens", "key": "HF_TOKEN"}}
    assert {"name": "HF_TOKEN", "valueFrom": source} in env
    assert documents(write("skypilot", folder)["sky.yaml"])[0]["secrets"] == {"HF_TOKEN": None}


def test_ray_finds_the_wheel_in_its_working_folder(folder):
    environment = documents(write("ray", folder)["ray-env.yaml"])[0]
    assert environment["pip"] == [
        "torch==2.13.0", "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/wb-1-py3-none-any.whl",
    ]  # fmt: skip


# -- the commands, as their containers would run them ----------------------------------------------

FAKE_PYTHON = f"""#!/bin/sh
echo "python $*" >> "$LOG"
case "$*" in
  *torch.distributed.run*) find . -type f; cat *.whl | wc -c;;
  *zipfile*) exec {sys.executable} "$@";;
esac
"""


def as_container(folder, script, **environment):
    """Run a container's script with a Python that notes what it is asked; return both's words."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "python3").write_text(FAKE_PYTHON)
    (programs / "python3").chmod(0o755)
    log = folder / "log"
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(log), "TMPDIR": str(folder),
             **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split(), log.read_text().splitlines()


def mounted_from(maps, folder):
    """Return the folder that pods see: ConfigMaps laid over each other."""
    mounted = folder / "mounted"
    mounted.mkdir()
    for one in maps:
        assert len(json.dumps(one)) < 1 << 20
        for name, text in one.get("data", {}).items():
            (mounted / name).write_text(text)
        for name, data in one.get("binaryData", {}).items():
            (mounted / name).write_bytes(base64.b64decode(data))
    return mounted


def test_the_command_of_a_trainjob_lays_out_the_folder_and_starts_torchrun(folder):
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "deep" / "x.csv").write_text("1,2\n")
    (folder / "helper.py").write_bytes(random.Random(0).randbytes(envelopes.MAP_BYTES))
    known = {"train.py": "", "data": "", "helper.py": "", "wb-1-py3-none-any.whl": ""}
    (folder / "run.json").write_text(json.dumps({"format": "workbench-job/1", "files": known}))
    *maps, job = documents(write("trainjob", folder)["trainjob.yaml"])
    mounted = mounted_from(maps, folder)
    (script,) = job["spec"]["trainer"]["args"]
    seen, asked = as_container(folder, script, WORKBENCH_FILES=str(mounted))
    assert {"./train.py", "./run.json", "./requirements.txt", "1024"} <= set(seen)
    assert {"./data/deep/x.csv", "./helper.py"} <= set(seen)
    asked = [line for line in asked if "zipfile" not in line]
    assert asked[0].endswith("-r requirements.txt")
    assert asked[1].split()[-1] == "train.py"


@pytest.mark.parametrize("name", ["torchrun", "slurm"])
def test_an_environment_that_is_not_there_is_said(name, folder):
    write_envelope(name, folder, JOB, LEAST)
    (file,) = ENVELOPES[name].files
    done = subprocess.run(
        ["bash", str(folder / file), "--venv", "nowhere"],
        env={"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert str(folder) in done.stderr


FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
mkdir -p "$HOSTS_ARE/$2" && cd "$HOSTS_ARE/$2" && exec sh -c "$3"
"""
FAKE_TORCHRUN = """#!/bin/sh
echo "torchrun $*" > started; [ -n "$WORKBENCH_JOB_KEY" ] && echo key >> started
if [ -e fails-here ]; then read -r _ < "$HOSTS_ARE/ready"; exit 7; fi
if [ -e waits-here ]; then
  sleep 60 &
  trap 'echo told >> started; kill $!; exit 1' TERM
  echo > "$HOSTS_ARE/ready"
  wait
fi
"""


def over_ssh(folder, hosts):
    """Run start-ssh.sh with an ssh whose hosts are folders; return its exit code."""
    made = folder.with_name(f"{folder.name}-hosts")
    for name, text in (("ssh", FAKE_SSH), ("bin/torchrun", FAKE_TORCHRUN)):
        program = folder / "programs" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    resources = dataclasses.replace(LEAST, remote_folder="", nodes=len(hosts), hosts=hosts)
    write_envelope("ssh", folder, dataclasses.replace(JOB, name=EVIL), resources)
    done = subprocess.run(
        ["bash", str(folder / "start-ssh.sh")],
        env={"PATH": f"{folder / 'programs'}:/usr/bin:/bin", "HOSTS_ARE": str(made),
             "WORKBENCH_VENV": str(folder / "programs")},
        timeout=60, check=False, capture_output=True,
    )  # fmt: skip
    return done.returncode, {
        host: made / host / "workbench-jobs" / legal_name(EVIL) for host in hosts
    }


def test_a_job_over_ssh_is_copied_to_each_host_and_started_there(folder):
    (folder / "runs").mkdir()
    code, there = over_ssh(folder, ("one", "u@two"))
    assert code == 0
    for node, at in enumerate(there.values()):
        assert (at / "train.py").read_text() == (folder / "train.py").read_text()
        assert not (at / "runs").exists()
        command, key = (at / "started").read_text().splitlines()
        assert f"--node-rank={node} " in command
        assert "--master-addr=one " in command
        assert key == "key"


def test_a_far_folder_begins_where_a_login_does(folder):
    far = dataclasses.replace(LEAST, remote_folder="~/my jobs/x")
    assert "there='my jobs/x'\n" in write("ssh", folder, resources=far)["start-ssh.sh"]


def test_a_host_that_fails_ends_the_others(folder):
    _, there = over_ssh(folder, ("one", "two"))
    (there["two"] / "fails-here").touch()
    (there["one"] / "waits-here").touch()
    os.mkfifo(folder.with_name(f"{folder.name}-hosts") / "ready")
    code, _ = over_ssh(folder, ("one", "two"))
    assert code == 7
    assert "told" in (there["one"] / "started").read_text()


# -- the page --------------------------------------------------------------------------------------


def row(one):
    files = ", ".join(f"`{file}`" for file in one.files)
    depth = "deep" if one.deep else "thin"
    records = one.records.replace("|", "\\|")
    cells = [f"`{one.name}`", one.summary, files, depth, one.note, f"`{one.start}`", records]
    return f"| {' | '.join(cells)} |"


def test_the_page_of_platforms_has_every_envelope_as_it_is():
    page = PAGE.read_text(encoding="utf-8")
    assert [row(one) for one in ENVELOPES.values() if row(one) not in page] == []
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len([line for line in rows if line.count(" | ") == 6]) == len(ENVELOPES)
