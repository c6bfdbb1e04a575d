"""The files of deploy/: valid for their tools, and each host starts the torchrun that it should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from acsgd.config.run_file import parse

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = ("kubernetes", "kubernetes-elastic")
SHOW = 'torchrun() { printf "%s\\0" "$@"; }; exec() { "$@"; }; getent() { true; }\n'
"""Shell functions that show the arguments of torchrun in place of starting it."""


def documents(name: str) -> dict[str, Any]:
    """Return the objects of a manifest by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text())}


def started(command: list[str], environment: dict[str, str]) -> Any:
    """Return the arguments of torchrun that a host's command starts, parsed by torchrun; the run's are parsed, too."""
    if command[0] == "bash":
        command[2] = SHOW + command[2]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        command = ["torchrun", *done.stdout.split("\0")[:-1]]
    arguments = get_args_parser().parse_args(command[1:])
    run_file, *options = arguments.training_script_args
    assert (arguments.training_script, arguments.module) == ("acsgd", True)
    assert run_file in ("/etc/acsgd/run.toml", "examples/gpt2.toml")
    parse([str(ROOT / "examples/gpt2.toml"), *options])
    return arguments


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_valid_for_kubernetes(name: str) -> None:
    validation = pytest.importorskip("kubernetes_validate")
    for document in documents(name).values():
        validation.validate(document, validation.latest_version(), strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_pod_starts_its_torchrun(name: str) -> None:
    """Pod i of a Job is reached as JOB-i.SERVICE, if the pods name the service, which selects the pods."""
    found = documents(name)
    job, service = found["Job"], found["Service"]
    pod, host = job["spec"]["template"]["spec"], job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": host}
    hosts = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == hosts
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    for index in range(hosts):
        words = [
            word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"] + container["args"]
        ]
        torchrun = started(words, {"HOSTNAME": f"{host}-{index}", "PATH": "/usr/bin:/bin"})
        assert torchrun.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
        assert torchrun.shutdown_timeout < pod["terminationGracePeriodSeconds"]
        if name == "kubernetes":
            assert (torchrun.nnodes, torchrun.node_rank) == (str(hosts), index)
            assert torchrun.master_addr == f"{host}-0.{pod['subdomain']}"
        else:
            assert torchrun.rdzv_endpoint == ",".join(f"{host}-{each}.{pod['subdomain']}:29400" for each in range(2))


def test_each_host_of_skypilot_starts_its_torchrun() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    hosts, gpus = task["num_nodes"], task["resources"]["accelerators"].partition(":")[2]
    script = task["run"].replace("~/acsgd/bin/torchrun", "torchrun")
    given = {"SKYPILOT_NUM_NODES": str(hosts), "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    for rank in range(hosts):
        variables = given | {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        torchrun = started(["bash", "-c", script], {"PATH": "/usr/bin:/bin", **task["envs"], **variables})
        assert (torchrun.nnodes, torchrun.node_rank) == (str(hosts), rank)
        assert (torchrun.nproc_per_node, torchrun.master_addr) == (gpus, "10.0.0.1")


def test_the_skypilot_file_is_valid_for_skypilot() -> None:
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml(str(DEPLOY / "skypilot.yaml")).num_nodes == 2


def test_the_image_installs_what_the_project_pins() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    (torch,) = re.findall(r"torch==\S+", text)
    assert torch in (ROOT / "constraints.txt").read_text().splitlines()
    assert torch in yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["setup"]
