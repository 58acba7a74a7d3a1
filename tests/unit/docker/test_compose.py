"""The compose file is one that Docker takes, its parts agree, and the commands in it are the programs' own."""

import json
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from ray.scripts.scripts import start

from opentinker.cli.main import app

FILE = Path(__file__).parents[3] / "docker" / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
DURATION = {"type": "string", "pattern": r"^([0-9]+(us|ms|s|m|h))+$"}


def closed(required: str, **fields: Any) -> dict[str, Any]:
    """A JSON schema of an object that has these fields and no others."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def mapping(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": of}


# The fields that we use, as the Compose Specification declares them.
SERVICE = closed(
    "image command",
    build=closed("context", context=TEXT, dockerfile=TEXT),
    image=TEXT,
    shm_size={"type": "string", "pattern": "^[0-9]+(b|k|m|g|kb|mb|gb)$"},
    volumes=TEXTS,
    environment=mapping(TEXT),  # a bare yes or 0 would be YAML's, not the program's
    secrets=TEXTS,
    command=TEXTS,
    ports={"type": "array", "items": {"type": "string", "pattern": r"^127\.0\.0\.1:[0-9]+:[0-9]+$"}},
    healthcheck=closed("test", test=TEXTS, interval=DURATION, timeout=DURATION, retries={"type": "integer", "minimum": 1}),
    depends_on=mapping(closed("condition", condition={"enum": ["service_started", "service_healthy"]})),
)
SCHEMA = {
    **closed(
        "name services",
        name={"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        services=mapping(SERVICE),
        secrets=mapping(closed("file", file=TEXT)),
        volumes=mapping({"type": "null"}),
    ),
    "patternProperties": {"^x-": {}},
}


def commands(service: str) -> list[list[str]]:
    """The programs that a service runs, each with its arguments."""
    command = SERVICES[service]["command"]
    if command[:2] != ["bash", "-c"]:
        return [command]
    (script,) = command[2:]
    return [shlex.split(part.strip().removeprefix("exec ")) for part in script.split("&&")]


def arguments(service: str, *program: str) -> list[str]:
    """What a service gives to a program, such as `ray start`."""
    (found,) = [command for command in commands(service) if command[: len(program)] == list(program)]
    return found[len(program) :]


def ray_start(service: str) -> dict[str, Any]:
    """The options as Ray's own command parses them."""
    return dict(start.make_context("ray start", arguments(service, "ray", "start")).params)


def up() -> Any:
    command = typer.main.get_command(app).commands["up"]  # type: ignore[attr-defined]
    return command.make_context("up", arguments("scheduler", "opentinker", "up")).params


def test_it_is_one_that_compose_takes() -> None:
    jsonschema.validate(COMPOSE, SCHEMA)


def test_a_misspelt_field_would_be_noticed() -> None:
    broken = {**COMPOSE, "services": {**SERVICES, "worker": {**SERVICES["worker"], "comand": []}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_whatever_a_service_refers_to_is_there() -> None:
    for service in SERVICES.values():
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(COMPOSE["volumes"])
        for other, wanted in service.get("depends_on", {}).items():
            assert wanted["condition"] == "service_healthy"
            assert "healthcheck" in SERVICES[other]
        token = PurePosixPath(service["environment"]["RAY_AUTH_TOKEN_PATH"])
        assert str(token.parent) == "/run/secrets"
        assert token.name in service["secrets"]
        context = FILE.parent / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).is_file()
        assert service["environment"]["XDG_CACHE_HOME"].startswith("/data/")


def test_the_operators_secret_is_kept_out_of_git_and_of_the_image() -> None:
    root = FILE.parents[1]
    name = (FILE.parent / COMPOSE["secrets"]["ray_token"]["file"]).resolve().relative_to(root)
    assert str(name) in (root / ".gitignore").read_text()
    dockerfile = (FILE.parent / "Dockerfile").read_text()
    assert not re.search(r"^(COPY|ADD) (\.|docker)\b", dockerfile, re.MULTILINE)


def test_up_takes_its_arguments_and_its_folders_are_on_the_volume() -> None:
    options = up()
    assert options["ray_address"] == "auto"
    mounts = [volume.split(":")[1] for volume in SERVICES["scheduler"]["volumes"]]
    for folder in (options["state_dir"], options["runs_dir"]):
        assert any(folder.is_relative_to(mount) for mount in mounts)


def test_what_compose_publishes_and_asks_is_where_up_listens() -> None:
    options = up()
    ports = [port.split(":") for port in SERVICES["scheduler"]["ports"]]
    assert [int(inside) for _, _, inside in ports] == [options["port"]]
    assert options["host"] == "0.0.0.0"  # published ports reach the container's own address, not its loopback
    kind, python, option, code = SERVICES["scheduler"]["healthcheck"]["test"]
    assert (kind, python, option) == ("CMD", "python", "-c")
    compile(code, "healthcheck", "exec")
    assert f"http://127.0.0.1:{options['port']}/health" in code


def test_ray_takes_its_arguments_and_the_worker_joins_the_head() -> None:
    head, worker = ray_start("scheduler"), ray_start("worker")
    assert head["head"] is True
    assert worker["address"] == f"scheduler:{head['port']}"
    assert worker["block"] is True  # otherwise the container ends at once
    assert json.loads(worker["resources"]) == {"cpu_slot": 1}
    assert head["num_gpus"] == 0
