"""Dashboard and alert rules in a real Prometheus that scrapes two servers under load (``make
test-monitoring``)."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench import children
from bench.local_server import free_port
from deploy.monitoring.dashboard import dashboard
from tests.servers import Server, run_server

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
SCRAPE_S = 1
LOAD_S = 20
"""Seconds of load; rates need several scrapes."""


def test_the_dashboard_is_the_one_of_its_script() -> None:
    assert json.loads((FOLDER / "dashboard.json").read_text()) == dashboard()


def test_promtool_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    checked = subprocess.run(
        ["promtool", "check", "rules", FOLDER / "alerts.yaml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prometheus that has scraped two servers under load."""
    if os.environ.get("RADIXRT_MONITORING") != "1" or shutil.which("prometheus") is None:
        pytest.skip("make test-monitoring runs it, where prometheus is installed")
    folder = tmp_path_factory.mktemp("prometheus")
    servers = [run_server("demo", "--max-total-tokens", "4096") for _ in range(2)]
    try:
        for server in servers:
            server.start()
        config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        config["global"]["scrape_interval"] = f"{SCRAPE_S}s"
        targets = [server.url.removeprefix("http://") for server in servers]
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        shutil.copy(FOLDER / "alerts.yaml", folder)
        address = f"127.0.0.1:{free_port()}"
        process = children.start(
            ["prometheus", "--config.file", "prometheus.yaml", "--storage.tsdb.path", "data", "--web.listen-address", address],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            load(servers)
            yield f"http://{address}"
        finally:
            children.end(process)
    finally:
        for server in servers:
            server.remove()


def load(servers: list[Server]) -> None:
    end = time.monotonic() + LOAD_S
    number = 0
    while time.monotonic() < end:
        number += 1
        message = {
            "role": "user",
            "content": f"The fee of Vidur is {number}. What is the fee of Vidur?",
        }
        for server in servers:
            for stream in (False, True):
                body = {"messages": [message], "max_tokens": 20, "stream": stream}
                assert (
                    httpx.post(
                        f"{server.url}/v1/chat/completions", json=body, timeout=30
                    ).status_code
                    == 200
                )


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    response = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    assert response["status"] == "success", f"{expression}: {response}"
    return response["data"]["result"]


def test_every_panel_has_data(prometheus: str) -> None:
    choices = {"$model_name": ".*", "$instance": ".*", "$__rate_interval": f"{4 * SCRAPE_S}s"}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            expression = re.sub(r"\$\w+", lambda match: choices[match[0]], target["expr"])
            assert query(prometheus, expression), f"{panel['title']}: {expression}"


def test_every_variable_of_the_dashboard_has_values(prometheus: str) -> None:
    for label, count in (("model_name", 1), ("instance", 2)):
        values = httpx.get(
            f"{prometheus}/api/v1/label/{label}/values",
            params={"match[]": "radixrt_running_requests"},
        ).json()
        assert len(values["data"]) == count


def test_every_rule_has_data_and_none_fires_on_a_healthy_server(prometheus: str) -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        compared = re.sub(r"\[\d+[mh]\]", f"[{4 * SCRAPE_S}s]", rule["expr"])
        for part in compared.split(" and "):
            value = re.sub(r" > 100\)", ")", re.sub(r" (==|>|<) [\d.]+$", "", part))
            value = re.sub(r" > 2 \* \w+$", "", value)
            if "outcome=" in value:
                value = value.replace('{outcome="error"}', "")
            assert query(prometheus, value), f"{rule['alert']}: {value}"
        assert not query(prometheus, compared), f"{rule['alert']} fires"
