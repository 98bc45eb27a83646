"""The objects around the pods: what refers to what, and to the program's routes, ports and metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.deploy.facts import GAUGES, image, routes
from tests.deploy.objects import DEPLOY, OVERLAYS, Object, Pod, chart, kustomize, load, named, pods

(PORT,) = image().ports


@pytest.fixture(params=[f"{tool}:{overlay}" for tool in ("kustomize", "helm") for overlay in OVERLAYS])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    tool, _, overlay = request.param.partition(":")
    return kustomize(overlay) if tool == "kustomize" else chart(overlay)


@pytest.fixture
def server(objects: list[Object]) -> Pod:
    (pod,) = [pod for pod in pods(objects) if pod.role == "server"]
    return pod


def selects(selector: dict[str, str], pod: Pod) -> bool:
    return bool(selector) and selector.items() <= pod.labels.items()


def test_objects_are_in_one_namespace_and_named_once(objects: list[Object]) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(set(names)) == len(names)
    assert {document["metadata"]["namespace"] for document in objects} == {"lockstep"}
    for document in objects:
        assert document["metadata"]["labels"]["app.kubernetes.io/name"] == "lockstep"


def test_selectors_find_the_server_and_only_it(objects: list[Object], server: Pod) -> None:
    others = [pod for pod in pods(objects) if pod.role != "server"]
    (service,) = named(objects, "Service")
    (budget,) = named(objects, "PodDisruptionBudget")
    selectors = [service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]]
    selectors += [pool["spec"]["selector"]["matchLabels"] for pool in named(objects, "InferencePool")]
    for selector in selectors:
        assert selects(selector, server)
        assert not any(selects(selector, other) for other in others)
    for deployment in named(objects, "Deployment"):
        assert selects(deployment["spec"]["selector"]["matchLabels"], server)
    (policy,) = named(objects, "NetworkPolicy")
    for pod in pods(objects):
        assert selects(policy["spec"]["podSelector"]["matchLabels"], pod)
        assert pod.spec["serviceAccountName"] == named(objects, "ServiceAccount")[0]["metadata"]["name"]


def test_ports_are_the_server_s(objects: list[Object], server: Pod) -> None:
    assert {port["name"]: port["containerPort"] for port in server.main["ports"]} == {"http": PORT}
    (service,) = named(objects, "Service")
    assert [(port["targetPort"], port["port"]) for port in service["spec"]["ports"]] == [("http", PORT)]
    for pool in named(objects, "InferencePool"):
        assert pool["spec"]["targetPorts"] == [{"number": PORT}]
    for monitor in named(objects, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] == "http"
            assert "GET" in routes()[endpoint["path"]]
            assert selects(monitor["spec"]["selector"]["matchLabels"], server)


def test_the_network_policy_is_closed_but_for_what_is_needed(objects: list[Object], server: Pod) -> None:
    (policy,) = named(objects, "NetworkPolicy")
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    first, *rest = policy["spec"]["ingress"]
    assert first["ports"] == [{"port": "http", "protocol": "TCP"}]
    assert {"podSelector": {}} in first["from"]
    namespaces = {
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for peer in first["from"]
        if "namespaceSelector" in peer
    }
    scraped = named(objects, "PodMonitor") or "annotations" in str(server_annotations(objects))
    expected = {route["spec"]["parentRefs"][0]["namespace"] for route in named(objects, "HTTPRoute")}
    assert namespaces == expected | ({"monitoring"} if scraped else set())
    grouped = bool(named(objects, "LeaderWorkerSet"))
    fetching = any(container["args"][0] == "fetch" for container in server.containers)
    assert len(rest) == grouped
    egress = policy["spec"]["egress"]
    assert bool(egress) == (grouped or fetching)
    assert any(rule.get("ports") == [{"port": 443, "protocol": "TCP"}] for rule in egress) == fetching


def server_annotations(objects: list[Object]) -> list[Any]:
    found = [each["spec"]["template"]["metadata"].get("annotations") for each in named(objects, "Deployment")]
    return ["annotations" if note and note["prometheus.io/scrape"] == "true" else None for note in found]


def test_scrape_annotations_name_the_metrics(objects: list[Object]) -> None:
    for deployment in named(objects, "Deployment"):
        notes = deployment["spec"]["template"]["metadata"].get("annotations", {})
        if notes:
            assert notes["prometheus.io/port"] == str(PORT)
            assert "GET" in routes()[notes["prometheus.io/path"]]


def test_the_gateway_reaches_the_pool_and_the_pool_its_picker(objects: list[Object], server: Pod) -> None:
    pools, http = named(objects, "InferencePool"), named(objects, "HTTPRoute")
    assert len(pools) == len(http)
    for pool, route in zip(pools, http, strict=True):
        (rule,) = route["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        assert (backend["kind"], backend["name"], backend["port"]) == ("InferencePool", pool["metadata"]["name"], PORT)
        assert rule["timeouts"] == {"request": "0s"}
        prefix = rule["matches"][0]["path"]["value"]
        assert all(path.startswith(prefix + "/") for path in routes() if path.startswith("/v1"))
        assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
        assert server.labels["llm-d.ai/engine-type"] == "vllm"
        (values,) = load(DEPLOY / "gateway" / "epp-values.yaml")
        router = values["router"]
        assert router["modelServers"]["matchLabels"] == pool["spec"]["selector"]["matchLabels"]
        assert router["modelServers"]["targetPorts"] == pool["spec"]["targetPorts"]
        assert router["epp"]["extProcPort"] == pool["spec"]["endpointPickerRef"]["port"]["number"]
        assert router["inferencePool"]["create"] is False


def test_the_picker_reads_a_route_that_exists() -> None:
    (values,) = load(DEPLOY / "gateway" / "epp-values.yaml")
    assert "GET" in routes()[values["router"]["epp"]["metricsDataSource"]["path"]]


def test_autoscalers_scale_the_deployment_on_gauges_that_exist(objects: list[Object]) -> None:
    scalers = named(objects, "HorizontalPodAutoscaler") + named(objects, "ScaledObject")
    deployments = named(objects, "Deployment")
    assert len(scalers) <= 1
    for deployment in deployments:
        assert ("replicas" in deployment["spec"]) == (not scalers)
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"] == {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": deployments[0]["metadata"]["name"],
        }
        text = str(scaler["spec"].get("metrics") or [each["metadata"] for each in scaler["spec"]["triggers"]])
        names = set(re.findall(r"lockstep_\w+", text))
        assert names == {"lockstep_requests_waiting", "lockstep_state_slot_usage_ratio"}
        assert names <= GAUGES


def test_both_autoscalers_behave_alike() -> None:
    (hpa,) = load(DEPLOY / "kustomize" / "components" / "hpa" / "horizontalpodautoscaler.yaml")
    (keda,) = load(DEPLOY / "kustomize" / "components" / "keda" / "scaledobject.yaml")
    config = keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    assert config["behavior"] == hpa["spec"]["behavior"]
    assert (keda["spec"]["minReplicaCount"], keda["spec"]["maxReplicaCount"]) == (
        hpa["spec"]["minReplicas"],
        hpa["spec"]["maxReplicas"],
    )
    waiting, slots = hpa["spec"]["metrics"]
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in keda["spec"]["triggers"]]
    assert thresholds[0] == float(waiting["pods"]["target"]["averageValue"])
    assert thresholds[1] == float(slots["pods"]["target"]["averageValue"].removesuffix("m")) / 1000
    (base,) = load(DEPLOY / "kustomize" / "base" / "deployment.yaml")
    startup = base["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert keda["spec"]["cooldownPeriod"] >= startup["periodSeconds"] * startup["failureThreshold"]


def test_prometheus_adapter_gives_what_the_autoscaler_asks_for() -> None:
    (values,) = load(DEPLOY / "prometheus" / "adapter-values.yaml")
    (hpa,) = load(DEPLOY / "kustomize" / "components" / "hpa" / "horizontalpodautoscaler.yaml")
    given = {rule["name"]["as"]: rule["seriesQuery"].partition("{")[0] for rule in values["rules"]["custom"]}
    assert set(given) == {metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]}
    assert set(given.values()) <= GAUGES


def test_config_maps_can_be_applied(objects: list[Object]) -> None:
    """Below the size that etcd takes. Above 256 KiB only `kubectl apply --server-side` works: the docs say so."""
    for document in named(objects, "ConfigMap"):
        assert sum(len(text.encode()) for text in document["data"].values()) < 900 * 1024
