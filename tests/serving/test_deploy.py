"""What `deploy/` says about the server is true: routes, settings, metrics."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import yaml

from serving.config import load_config
from serving.metrics import PREFIX
from tests.serving.conftest import Bundled
from tests.serving.test_metrics import Serve, scrape

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_every_metric_of_the_dashboard_exists(serve_bundled: Serve, bundled: Bundled) -> None:
    server = serve_bundled()
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    names = {name for name, _ in scrape(server)}
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(rf"{PREFIX}(\w+)", target["expr"])
    }
    assert len(asked) > 15 and asked - names == set()


def test_the_kubernetes_example_names_what_exists(serve_bundled: Serve, tmp_path: Path) -> None:
    server = serve_bundled()
    objects: dict[str, Any] = {
        item["kind"]: item for item in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert httpx.get(server.url + container[probe]["httpGet"]["path"]).status_code == 200
    file = tmp_path / "settings.yaml"
    file.write_text(objects["ConfigMap"]["data"]["settings.yaml"])
    settings = load_config({}, file)
    grace = objects["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert settings.drain_seconds < grace
    assert container["ports"][0]["containerPort"] == settings.http_port
    metric = objects["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric.removeprefix(PREFIX) in {name for name, _ in scrape(server)}
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert httpx.get(server.url + endpoint["path"]).status_code == 200


def test_the_ray_example_has_settings_that_exist() -> None:
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    served = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = served["applications"]
    settings = load_config(application["args"])
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert workers["minReplicas"] == settings.replicas == 2
    module, _, function = application["import_path"].partition(":")
    source = (DEPLOY.parent / f"{module.replace('.', '/')}.py").read_text()
    assert f"def {function}(" in source  # read, not imported: Ray need not be installed
