"""launch/*.yaml against the types that Kubeflow Trainer, JobSet and SkyPilot publish."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.launch.launch_jobs import ROOT

# Module and class of Kubeflow's, which take seconds to import: where a test needs one.
KUBERNETES = {
    "k8s-trainjob": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    "k8s-jobset": ("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
}
SKYPILOT = json.loads((Path(__file__).parent / "schemas" / "skypilot.json").read_text())


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "launch" / f"{name}.yaml").read_text(encoding="utf8"))


def check(name: str, document: Any) -> None:
    """Raises a ValueError if a field is missing, unknown, or of another type."""
    if name in KUBERNETES:
        module, kind = KUBERNETES[name]
        of_kind: Any = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), kind)
        # The models drop fields that they don't know.
        if of_kind.from_dict(document).to_dict() != document:
            raise ValueError(f"{name} has an unknown field")
        return
    for schema, part in (("task", document), ("resources", document["resources"])):
        try:
            jsonschema.validate(part, SKYPILOT[schema], jsonschema.Draft202012Validator)
        except jsonschema.ValidationError as error:
            raise ValueError(error.message) from None


@pytest.mark.parametrize("name", [*KUBERNETES, "sky"])
def test_schema_accepts(name: str) -> None:
    check(name, read(name))


def trainer(document: Any) -> Any:
    return document["spec"]["trainer"]


def patched_pod(document: Any) -> Any:
    patch = document["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    return patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def job(document: Any) -> Any:
    return document["spec"]["replicatedJobs"][0]


def pod(document: Any) -> Any:
    return job(document)["template"]["spec"]["template"]["spec"]


def resources(document: Any) -> Any:
    return document["resources"]


def whole(document: Any) -> Any:
    return document


@pytest.mark.parametrize(
    ("name", "part", "key", "new_key", "new_value"),
    [
        pytest.param("k8s-trainjob", trainer, "numNodes", "nodes", 2, id="unknown"),
        pytest.param("k8s-trainjob", trainer, "numNodes", "num_nodes", 2, id="python's name"),
        pytest.param("k8s-trainjob", trainer, "numNodes", "numNodes", "2", id="type"),
        pytest.param("k8s-trainjob", patched_pod, "volumes", "volume", [], id="unknown in a patch"),
        pytest.param("k8s-trainjob", whole, "spec", "spec", {}, id="missing"),
        pytest.param("k8s-jobset", job, "replicas", "replica", 2, id="jobset: unknown"),
        pytest.param("k8s-jobset", job, "name", "replicas", 2, id="jobset: missing"),
        pytest.param("k8s-jobset", pod, "volumes", "volumes", [{"nam": "x"}], id="jobset: in pod"),
        pytest.param("sky", whole, "num_nodes", "num_node", 2, id="sky: unknown"),
        pytest.param("sky", whole, "num_nodes", "num_nodes", "2", id="sky: type"),
        pytest.param("sky", resources, "accelerators", "gpus", "H100:8", id="sky: in resources"),
    ],
)
def test_schema_refuses(
    name: str, part: Callable[[Any], Any], key: str, new_key: str, new_value: object
) -> None:
    document = copy.deepcopy(read(name))
    part(document).pop(key)
    part(document)[new_key] = new_value
    with pytest.raises(ValueError):
        check(name, document)


def test_jobset_nodes_meet_at_the_first_pod() -> None:
    document = read("k8s-jobset")
    name, replicated = document["metadata"]["name"], job(document)["name"]
    (train,) = pod(document)["containers"]
    (head,) = [item["value"] for item in train["env"] if item["name"] == "HEAD"]
    assert head == f"{name}-{replicated}-0-0.{name}"


@pytest.mark.parametrize("name", list(KUBERNETES))
def test_kubernetes_mounts_have_volumes(name: str) -> None:
    spec = {"k8s-trainjob": patched_pod, "k8s-jobset": pod}[name](read(name))
    (container,) = spec["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]} == {"shared", "memory"}
