"""The files of deploy/ against the gateway: metrics and their labels, paths, ports, settings, names."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from bench.engine_sim import EngineSim, SimConfig
from bench.gateway_thread import run_gateway, settings_for
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
DASHBOARD = json.loads((DEPLOY / "grafana" / "headstart.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
FILES = sorted(file for file in DEPLOY.rglob("*") if file.suffix in {".yml", ".yaml"})

SAMPLE = re.compile(r"(headstart_\w+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
OURS = {"le", "instance", "job"}
"""Labels that every histogram has, or that Prometheus adds."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text("utf-8")))


@cache
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name, all that the kustomization lists."""
    listed = documents("kustomization.yaml")[0]["resources"]
    return {(each["kind"], each["metadata"]["name"]): each for file in listed for each in documents(file)}


def pod(kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifests()[kind, name]["spec"]["template"]["spec"]
    return spec


def workloads() -> Iterator[dict[str, Any]]:
    return (each for (kind, _), each in manifests().items() if kind in {"Deployment", "StatefulSet"})


def gateway_variables() -> dict[str, str]:
    lines = (DEPLOY / "kubernetes" / "gateway.env").read_text("utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines)


def queries() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
    return [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in rules]


@pytest.fixture
async def page(tmp_path: Path, model_dir: Path, redis_url: str) -> str:
    """`/metrics` of a gateway that has answered a request with a budget."""
    async with EngineSim(SimConfig(model_dir=model_dir, time_scale=0.01, decode_tokens_per_s=None)) as sim:
        settings = settings_for(tmp_path, sim.url, tokenizer=str(model_dir), redis_url=redis_url, calibrate=True)
        async with run_gateway(settings) as gateway:
            # Without a known speed no budget is kept or missed.
            await gateway.until_calibrated()
            reply = await gateway.ask(
                "sim-model", "What of the tide?", stream=True, headstart={"ttft_budget_ms": 5000}
            )
            assert reply.status == 200
            async with gateway.session() as session, session.get("/metrics") as response:
                return await response.text()


def exported(page: str) -> dict[str, set[str]]:
    """Sample names of a page with their labels, those of histograms as they are queried."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE))
    samples: dict[str, set[str]] = {}
    for name, kind in kinds.items():
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            samples[name + suffix] = set()
    for name, labels in re.findall(r"^(headstart_\w+)\{([^}]*)\}", page, re.MULTILINE):
        samples.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return samples


async def test_every_metric_that_is_shown_or_watched_is_exported_with_its_labels(page: str) -> None:
    known = exported(page)
    asked = queries()
    assert len(asked) > 40
    for query in asked:
        found = SAMPLE.findall(query)
        assert found or "up{" in query, query
        labels = {label.strip() for group in GROUPING.findall(query) for label in group.split(",")}
        for name, matchers in found:
            assert name in known, f"{name} in {query}"
            wanted = labels | set(re.findall(r"(\w+)(?:=~|!=|=)", matchers))
            assert wanted <= known[name] | OURS, query


def test_the_dashboard_shows_what_the_operator_asks_about() -> None:
    names = {name for query in queries() for name, _ in SAMPLE.findall(query)}
    for wanted in (
        "headstart_ttft_seconds_bucket",
        "headstart_ttft_actual_to_predicted_ratio_bucket",
        "headstart_predicted_cached_tokens",
        "headstart_reported_cached_tokens",
        "headstart_tokens_total",
        "headstart_prefix_breaks_total",
        "headstart_folds",
        "headstart_replica_usable",
        "headstart_queued_requests",
    ):
        assert wanted in names


def test_panels_have_one_id_each_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_variables_that_queries_use_are_the_dashboards() -> None:
    own = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) <= own


def test_grafana_reads_the_dashboard_and_prometheus_where_they_are() -> None:
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    provider = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text("utf-8"))["providers"][0]
    assert f"{provider['options']['path']}/headstart.json" in mounted
    source = yaml.safe_load((DEPLOY / "grafana" / "datasources.yml").read_text("utf-8"))["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_asks_the_gateways_of_the_compose_file_with_the_key_and_reads_the_alerts() -> None:
    job = PROMETHEUS["scrape_configs"][0]
    found = job["dns_sd_configs"][0]
    publishes = {name for name, each in COMPOSE["services"].items() if str(each.get("ports")).endswith(":8080']")}
    assert set(found["names"]) == publishes
    assert found["port"] == Settings.model_fields["port"].default
    service = COMPOSE["services"]["prometheus"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{service['secrets'][0]}"
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    assert set(PROMETHEUS["rule_files"]) <= mounted


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_deployment_files_are_yaml_and_name_no_registry(file: Path) -> None:
    assert all(yaml.safe_load_all(file.read_text("utf-8")))
    for image in re.findall(r"image: *(\S+)", file.read_text("utf-8")):
        assert re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)?:[\w.-]+", image), image


def test_every_manifest_is_in_the_kustomization() -> None:
    folder = DEPLOY / "kubernetes"
    listed = documents("kustomization.yaml")[0]["resources"]
    assert sorted(listed) == sorted(file.name for file in folder.glob("*.yaml") if file.name != "kustomization.yaml")


def test_every_variable_of_the_gateway_is_a_setting_with_a_value_that_it_takes() -> None:
    values = gateway_variables()
    named = {f"HEADSTART_{name.upper()}": name for name in Settings.model_fields}
    ours = {name: value for name, value in values.items() if name.startswith("HEADSTART_")}
    assert ours.keys() <= named.keys()
    Settings(**{named[name]: value for name, value in ours.items()})  # type: ignore[arg-type]
    for name in re.findall(r"HEADSTART_[A-Z_]*[A-Z]", (DEPLOY / "kubernetes" / "gateway.yaml").read_text("utf-8")):
        assert name in named
    # Kubernetes would set HEADSTART_PORT=tcp://... for the service of that name.
    assert all(each["spec"]["template"]["spec"]["enableServiceLinks"] is False for each in workloads())


async def test_the_gateways_probes_are_paths_that_answer_without_a_key(tmp_path: Path) -> None:
    container = pod("Deployment", "headstart")["containers"][0]
    probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {ports[probe["port"]] for probe in probes} == {int(gateway_variables()["HEADSTART_PORT"])}
    async with EngineSim(SimConfig(fixed_ttft_s=0.0)) as sim:
        settings = settings_for(tmp_path, sim.url, api_keys=f"ada:{'0' * 64}")
        async with run_gateway(settings) as gateway, gateway.session() as session:
            for probe in probes:
                # As the node does: the pod's address is the host.
                async with session.get(probe["path"], headers={"host": "10.1.2.3:8080"}) as response:
                    assert response.status == 200, probe
            async with session.get(PROMETHEUS["scrape_configs"][0]["metrics_path"]) as response:
                assert response.status == 401


async def test_the_engines_probes_are_paths_of_the_engine() -> None:
    container = pod("StatefulSet", "vllm")["containers"][0]
    async with EngineSim(SimConfig()) as sim, aiohttp.ClientSession(sim.url) as session:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            async with session.get(container[kind]["httpGet"]["path"]) as response:
                assert response.status == 200


def test_services_select_pods_and_name_their_ports() -> None:
    pods = [each["spec"]["template"] for each in workloads()]
    services = [each for (kind, _), each in manifests().items() if kind == "Service"]
    assert services
    for service in services:
        spec = service["spec"]
        chosen = [each for each in pods if spec["selector"].items() <= each["metadata"]["labels"].items()]
        assert len(chosen) == 1
        names = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in spec["ports"]} <= names


def test_the_engines_are_a_headless_service_whose_name_the_gateway_follows() -> None:
    values = gateway_variables()
    for variable, name in (("HEADSTART_ENGINE_URL", "vllm"), ("HEADSTART_REDIS_URL", "redis")):
        service = manifests()["Service", name]["spec"]
        assert f"://{name}:{service['ports'][0]['port']}" in values[variable]
    assert manifests()["Service", "vllm"]["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in manifests()["Service", "vllm"]["spec"]


def test_an_engine_that_goes_is_left_by_the_gateway_before_it_is_stopped() -> None:
    """It leaves the name at once; the gateway needs two look-ups to believe it."""
    engine = pod("StatefulSet", "vllm")
    pause_s = int(engine["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    refresh_s = Settings.model_fields["dns_refresh_s"].default
    assert 2 * refresh_s + 30 < pause_s < engine["terminationGracePeriodSeconds"]


def test_the_engines_of_compose_and_kubernetes_are_the_same_release_with_the_same_flags() -> None:
    ours = pod("StatefulSet", "vllm")["containers"][0]
    theirs = COMPOSE["services"]["vllm"]
    assert ours["image"] == theirs["image"]
    assert {flag for flag in theirs["command"] if flag.startswith("--enable")} <= set(ours["args"])
    events = next(arg for arg in ours["args"] if arg.startswith("--kv-events-config="))
    published = json.loads(events.partition("=")[2])
    opened = {port["containerPort"] for port in ours["ports"]}
    allowed = {rule["port"] for rule in manifests()["NetworkPolicy", "only-gateways"]["spec"]["ingress"][0]["ports"]}
    for address in (published["endpoint"], published["replay_endpoint"]):
        assert int(address.rsplit(":", 1)[1]) in opened & allowed


def test_pods_run_without_rights() -> None:
    for name in ("headstart", "redis"):
        spec = pod("Deployment", name)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
        assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
