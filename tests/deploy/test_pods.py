"""Every pod that deploy/ describes, against the program and the image it runs.

The sources named `files` need no tool: they are read as they are. The others are built by kustomize and by Helm.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from runtime.api import ConfigError
from server import fetch
from server.__main__ import COMMANDS
from server.settings import ENV_PREFIX, Settings
from server.settings import load as load_settings
from tests.deploy.facts import END_SECONDS, image, routes
from tests.deploy.objects import DEPLOY, OVERLAYS, Object, Pod, chart, hooks, kustomize, load, pods, weights_fill

KUSTOMIZE = DEPLOY / "kustomize"
FILES = (
    KUSTOMIZE / "base" / "deployment.yaml",
    KUSTOMIZE / "components" / "multihost" / "leaderworkerset.yaml",
    KUSTOMIZE / "weights-fill" / "job.yaml",
)
SOURCES = ("files", "weights-fill", *(f"{tool}:{overlay}" for tool in ("kustomize", "helm") for overlay in OVERLAYS))


def objects_of(source: str) -> list[Object]:
    if source == "files":
        return [document for path in FILES for document in load(path)]
    if source == "weights-fill":
        return weights_fill()
    tool, _, overlay = source.partition(":")
    return kustomize(overlay) if tool == "kustomize" else [*chart(overlay), *hooks(overlay)]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def all_pods(source: str) -> list[Pod]:
    found = list(pods(objects_of(source)))
    assert found
    return found


@pytest.fixture
def servers(all_pods: list[Pod]) -> list[Pod]:
    return [pod for pod in all_pods if pod.role == "server"]


def settings_of(pod: Pod) -> Settings:
    """What the program would make of the pod's arguments and variables. $(VARIABLES) are the cluster's to fill in."""
    command, *arguments = pod.main["args"]
    assert command == "serve"
    environment = {name: value for name, value in pod.environment().items() if "$(" not in value}
    return load_settings(arguments, image().environment | environment)


def test_nothing_runs_with_more_rights_than_it_needs(all_pods: list[Pod]) -> None:
    user = int(image().user.partition(":")[0])
    for pod in all_pods:
        spec, context = pod.spec, pod.spec["securityContext"]
        assert spec["automountServiceAccountToken"] is False
        assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, user, user)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(spec)
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not container["image"].endswith(":latest")


def test_no_service_can_set_a_setting(all_pods: list[Pod]) -> None:
    """The link for a Service called lockstep is LOCKSTEP_PORT=tcp://..., and the program would read it."""
    assert "port" in Settings.model_fields
    for pod in all_pods:
        assert pod.spec["enableServiceLinks"] is False


def test_arguments_and_variables_are_the_program_s(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        for container in pod.containers:
            for entry in container.get("env", []):
                if entry["name"].startswith(ENV_PREFIX):
                    assert entry["name"].removeprefix(ENV_PREFIX).lower() in Settings.model_fields, entry["name"]
            if "command" in container:
                continue
            assert container["args"][0] in COMMANDS
            if container["args"][0] == "fetch":
                given = fetch.parser().parse_args(container["args"][1:])
                mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
                assert not mounts[str(given.directory)].get("readOnly", False)
                assert mounts[str(given.sums.parent)]["readOnly"]
        if pod.role in ("server", "worker"):
            settings_of(pod)


def test_probes_ask_paths_that_exist(servers: list[Pod]) -> None:
    known = routes()
    for pod in servers:
        paths = {kind: pod.main[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
        assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/live"}
        for path in paths.values():
            assert "GET" in known[path]
        ports = {port["name"]: port["containerPort"] for port in pod.main["ports"]}
        for kind in paths:
            assert ports[pod.main[f"{kind}Probe"]["httpGet"]["port"]] == settings_of(pod).port
        assert list(ports.values()) == list(image().ports)


def test_the_server_can_be_reached(servers: list[Pod]) -> None:
    for pod in servers:
        assert settings_of(pod).host == "0.0.0.0"


def test_probes_are_slower_than_the_program(servers: list[Pod]) -> None:
    """The program gives up on a start, and says no on /live, before the kubelet loses patience."""
    for pod in servers:
        startup, liveness = pod.main["startupProbe"], pod.main["livenessProbe"]
        settings = settings_of(pod)
        assert startup["periodSeconds"] * startup["failureThreshold"] > settings.engine_start_timeout
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30
        assert pod.main["readinessProbe"]["failureThreshold"] == 1


def test_the_grace_period_covers_the_drain(servers: list[Pod]) -> None:
    for pod in servers:
        wait = pod.main["lifecycle"]["preStop"]["sleep"]["seconds"]
        settings = settings_of(pod)
        assert wait >= 2 * pod.main["readinessProbe"]["periodSeconds"]
        assert pod.spec["terminationGracePeriodSeconds"] > wait + settings.drain_timeout + END_SECONDS


def test_a_rollout_waits_for_a_start_and_makes_progress(source: str) -> None:
    for document in objects_of(source):
        if document["kind"] != "Deployment":
            continue
        (pod,) = pods([document])
        startup = pod.main["startupProbe"]
        spec = document["spec"]
        assert spec["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
        strategy = spec["strategy"]["rollingUpdate"]
        assert (strategy["maxSurge"], strategy["maxUnavailable"]) in ((1, 0), (0, 1))


def test_resources(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        for container in pod.containers:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(requests)
            assert "memory" in limits
            assert "cpu" not in limits
            for name in set(requests) & set(limits) - {"memory", "ephemeral-storage"}:
                assert requests[name] == limits[name], name
        if pod.role in ("server", "worker"):
            assert settings_of(pod).threads == int(pod.main["resources"]["requests"]["cpu"])
            assert (settings_of(pod).device == "cuda") == ("nvidia.com/gpu" in pod.main["resources"]["limits"])


def test_whatever_is_written_is_on_a_volume(all_pods: list[Pod]) -> None:
    folders = [value for value in image().environment.values() if value.startswith("/var/")]
    assert folders
    for pod in all_pods:
        if pod.role not in ("server", "worker"):
            continue
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        writable = [
            PurePosixPath(mount["mountPath"])
            for mount in pod.main["volumeMounts"]
            if "emptyDir" in volumes[mount["name"]] and not mount.get("readOnly")
        ]
        for folder in (*folders, "/tmp"):
            assert any(PurePosixPath(folder).is_relative_to(path) for path in writable), folder
        known = {*folders, *image().volumes, "/dev/shm"}
        for path in writable:
            assert str(path) in known, f"{path} is written by nothing"
        assert all(volumes[name]["emptyDir"]["sizeLimit"] for name in volumes if "emptyDir" in volumes[name])


def test_weights_are_read_only_where_the_server_reads_them(servers: list[Pod]) -> None:
    for pod in servers:
        settings = settings_of(pod)
        mounts = {mount["mountPath"]: mount for mount in pod.main["volumeMounts"]}
        assert settings.model_dir == "" or mounts[settings.model_dir]["readOnly"] is True
        if settings.model_dir:
            assert settings.served_model_name


def test_every_mount_has_a_volume_and_every_volume_a_mount(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        mounted = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.spec.get("volumes", [])}


def test_keys_come_from_a_secret(servers: list[Pod]) -> None:
    for pod in servers:
        (entry,) = [entry for entry in pod.main["env"] if entry["name"] == "LOCKSTEP_API_KEY"]
        assert entry["valueFrom"]["secretKeyRef"]["optional"] is True


def test_a_group_is_a_process_group(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        group = {name: value for name, value in pod.environment().items() if "$(LWS_" in value}
        expected = {
            "MASTER_ADDR": "$(LWS_LEADER_ADDRESS)",
            "WORLD_SIZE": "$(LWS_GROUP_SIZE)",
            "RANK": "$(LWS_WORKER_INDEX)",
        }
        assert group == (expected if pod.owner.startswith("LeaderWorkerSet/") else {})


def test_a_group_of_hosts_is_for_a_later_version() -> None:
    """The docs say so, and the program does: this fails when it is no longer true."""
    (group,) = load(KUSTOMIZE / "components" / "multihost" / "leaderworkerset.yaml")
    size = str(group["spec"]["leaderWorkerTemplate"]["size"])
    for pod in pods([group]):
        settings_of(pod)
        with pytest.raises(ConfigError, match="WORLD_SIZE"):
            load_settings(pod.main["args"][1:], image().environment | {"WORLD_SIZE": size})
