"""The compose file, held against the files it mounts, the image it builds and the program in it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from server.settings import ENV_PREFIX, Settings
from server.settings import load as load_settings
from tests.deploy.facts import END_SECONDS, image, routes
from tests.deploy.objects import DEPLOY, ROOT, load

FOLDER = DEPLOY / "compose"
(COMPOSE,) = load(FOLDER / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def settings() -> Settings:
    environment = {name: text for name, text in SERVICES["lockstep"]["environment"].items() if "${" not in text}
    assert all(
        name.removeprefix(ENV_PREFIX).lower() in Settings.model_fields for name in SERVICES["lockstep"]["environment"]
    )
    return load_settings(list(image().command[1:]), image().environment | environment)


def mounts(service: str) -> dict[str, str]:
    """Where in the container -> what."""
    return {entry.split(":")[1]: entry.split(":")[0] for entry in SERVICES[service].get("volumes", [])}


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_is_there_and_read_only(service: str) -> None:
    for entry in SERVICES[service].get("volumes", []):
        source, _, rest = entry.partition(":")
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
            assert rest.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("service", SERVICES)
def test_only_this_machine_is_served_and_no_right_is_left(service: str) -> None:
    definition = SERVICES[service]
    assert all(port.startswith("127.0.0.1:") for port in definition["ports"])
    assert definition["cap_drop"] == ["ALL"]
    assert definition["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in definition
    assert not definition["image"].endswith(":latest")


def test_the_server_is_built_here_and_may_write_where_the_image_says() -> None:
    build = SERVICES["lockstep"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert SERVICES["lockstep"]["read_only"] is True
    assert {entry.partition(":")[0] for entry in SERVICES["lockstep"]["tmpfs"]} == set(image().volumes)
    assert SERVICES["lockstep"]["ports"] == [f"127.0.0.1:{settings().port}:{settings().port}"]


def test_compose_waits_for_the_drain() -> None:
    grace = int(SERVICES["lockstep"]["stop_grace_period"].removesuffix("s"))
    assert grace > settings().drain_timeout + END_SECONDS


def test_prometheus_scrapes_the_server_and_reads_the_rules() -> None:
    (config,) = load(DEPLOY / "prometheus" / "prometheus.yml")
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    assert mounts("prometheus")["/etc/prometheus/prometheus.yml"] == "../prometheus/prometheus.yml"
    assert set(config["rule_files"]) <= set(mounts("prometheus"))
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"lockstep:{settings().port}"]}]
    assert "GET" in routes()[job["metrics_path"]]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    assert mounts("grafana")["/etc/grafana/provisioning"] == "../grafana/provisioning"
    (sources,) = load(provisioning / "datasources" / "prometheus.yml")
    (source,) = sources["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    assert f"127.0.0.1:{url.port}:{url.port}" in SERVICES[str(url.hostname)]["ports"]
    (providers,) = load(provisioning / "dashboards" / "lockstep.yml")
    (provider,) = providers["providers"]
    assert mounts("grafana")[provider["options"]["path"]] == "../grafana/dashboards"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder, _, name = home.rpartition("/")
    assert folder == provider["options"]["path"]
    assert json.loads((DEPLOY / "grafana" / "dashboards" / name).read_text())["uid"] == "lockstep-overview"
