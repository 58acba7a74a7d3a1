"""The Kubernetes manifests are valid, agree with each other and with the program that they start."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from opentinker.cli.main import app
from opentinker.config.base import parse_config, read_yaml
from opentinker.scheduler.placement import addable
from opentinker.scheduler.settings import Settings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docker" / "kubernetes"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def closed(required: str, **fields: Any) -> dict[str, Any]:
    """A JSON schema of an object that has these fields and no others."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


# The fields that we use, as KubeRay 1.7's custom resource definition declares them; pod specs are checked by Kubernetes' own.
PARAMS = {"type": "object", "additionalProperties": TEXT}
TEMPLATE = closed("spec", metadata={"type": "object"}, spec={"type": "object"})
RAY_CLUSTER = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata={"type": "object"},
    spec=closed(
        "headGroupSpec",
        rayVersion=TEXT,
        authOptions=closed("", mode={"enum": ["disabled", "token"]}, secretName=TEXT),
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=closed(
            "", version={"enum": ["v1", "v2"]}, idleTimeoutSeconds={"type": "integer"}, resources={"type": "object"}
        ),
        headGroupSpec=closed("template", serviceType=TEXT, rayStartParams=PARAMS, template=TEMPLATE),
        workerGroupSpecs={
            "type": "array",
            "items": closed(
                "groupName maxReplicas minReplicas template",
                groupName=TEXT,
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                rayStartParams=PARAMS,
                template=TEMPLATE,
            ),
        },
    ),
)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


KUSTOMIZATION = documents("kustomization.yaml")[0]
OBJECTS = [document for name in KUSTOMIZATION["resources"] for document in documents(name)]
(CLUSTER,) = [document for document in OBJECTS if document["kind"] == "RayCluster"]
SPEC = CLUSTER["spec"]
HEAD, WORKERS = SPEC["headGroupSpec"], SPEC["workerGroupSpecs"]
PODS = [HEAD["template"], *(group["template"] for group in WORKERS)]


def names(kind: str) -> set[str]:
    return {document["metadata"]["name"] for document in OBJECTS if document["kind"] == kind}


def head_script() -> str:
    (script,) = HEAD["template"]["spec"]["containers"][0]["args"]
    assert isinstance(script, str)
    return script


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_kubernetes_takes(version: str) -> None:
    for document in OBJECTS:
        if document is not CLUSTER:
            kubernetes_validate.validate(document, version, strict=True)
    for number, template in enumerate(PODS):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": f"pod-{number}", **template.get("metadata", {})}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_cluster_is_one_that_kuberay_takes() -> None:
    jsonschema.validate(CLUSTER, RAY_CLUSTER)


def test_a_misspelt_field_would_be_noticed() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**CLUSTER, "spec": {**SPEC, "enableInTreeAutoScaling": True}}, RAY_CLUSTER)
    policy = next(document for document in OBJECTS if document["kind"] == "NetworkPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**policy, "spec": {**policy["spec"], "ingres": []}}, VERSIONS[0], strict=True)


def test_whatever_a_pod_refers_to_is_made() -> None:
    secrets = {generator["name"] for generator in KUSTOMIZATION["secretGenerator"]}
    config_maps = {generator["name"] for generator in KUSTOMIZATION["configMapGenerator"]}
    assert SPEC["authOptions"]["secretName"] in secrets
    for template in PODS:
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name") in {None, *config_maps}
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *names("PersistentVolumeClaim")}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)


def test_the_scheduler_knows_the_kinds_of_nodes_that_the_autoscaler_can_add() -> None:
    fields = {**read_yaml(FOLDER / "settings.yaml"), "state_dir": "state", "runs_dir": "runs"}
    settings = parse_config(Settings, fields)
    assert settings.autoscale
    assert SPEC["enableInTreeAutoscaling"] is True
    groups = []
    for group in WORKERS:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        resources = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
        assert set(resources) <= {"cpu_slot"}
        groups.append((int(limits.get("nvidia.com/gpu", 0)), resources.get("cpu_slot", 0), group["maxReplicas"]))
    assert groups == [(kind.gpus, kind.cpu_slots, kind.max) for kind in settings.node_types]
    assert len(addable(settings.node_types)) == sum(group[2] for group in groups)


def test_only_the_api_is_reachable_from_outside_the_cluster() -> None:
    policies = [document["spec"] for document in OBJECTS if document["kind"] == "NetworkPolicy"]
    every_pod = {"matchLabels": {"ray.io/cluster": CLUSTER["metadata"]["name"]}}
    assert any(policy["podSelector"] == every_pod and "Ingress" in policy["policyTypes"] for policy in policies)
    for policy in policies:
        for rule in policy["ingress"]:
            if rule.get("from") != [{"podSelector": every_pod}]:
                assert (policy["podSelector"]["matchLabels"]["ray.io/node-type"], rule) == ("head", {"ports": [{"port": 8780}]})
    (service,) = [document["spec"] for document in OBJECTS if document["kind"] == "Service"]
    assert [port["port"] for port in service["ports"]] == [8780]
    assert service.get("type", "ClusterIP") == HEAD["serviceType"] == "ClusterIP"


def test_every_container_has_probes_and_bounds_and_no_rights_that_it_does_not_need() -> None:
    for template in PODS:
        (container,) = template["spec"]["containers"]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} < set(container)
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert (container[probe].get("httpGet") or container[probe]["tcpSocket"])["port"] in ports
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for group in WORKERS:
        spec = group["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert group["rayStartParams"]["node-manager-port"] == str(spec["containers"][0]["ports"][0]["containerPort"])


def test_the_heads_script_is_sound_and_its_options_exist(tmp_path: Path) -> None:
    script = tmp_path / "head.sh"
    script.write_text(head_script())
    subprocess.run(["bash", "-n", str(script)], check=True)
    match = re.search(r"opentinker (.*?) &$", head_script().replace("\\\n", " "), re.MULTILINE)
    assert match is not None
    command, *arguments = shlex.split(match.group(1))
    options = {option for parameter in typer.main.get_command(app).commands[command].params for option in parameter.opts}  # type: ignore[attr-defined]
    given = {argument for argument in arguments if argument.startswith("--")}
    assert {"--ray-address", "--state-dir", "--runs-dir", "--settings"} < given <= options
    mounts = [mount["mountPath"] for mount in HEAD["template"]["spec"]["containers"][0]["volumeMounts"]]
    for option in ("--state-dir", "--runs-dir", "--settings"):
        assert any(arguments[arguments.index(option) + 1].startswith(f"{mount}/") for mount in mounts)


def test_ray_is_the_version_that_is_installed() -> None:
    constraints = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    assert f"ray=={SPEC['rayVersion']}" in constraints


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders it, and is not here")
def test_kustomize_renders_it(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "ray_token").write_text("0" * 64)
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "kubernetes")], capture_output=True, text=True, timeout=60
    )
    assert rendered.returncode == 0, rendered.stderr
    objects = list(yaml.safe_load_all(rendered.stdout))
    assert {document["kind"] for document in objects} == {document["kind"] for document in OBJECTS} | {"Secret", "ConfigMap"}
    for document in objects:
        if document["kind"] == "RayCluster":
            jsonschema.validate(document, RAY_CLUSTER)
        else:
            kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
