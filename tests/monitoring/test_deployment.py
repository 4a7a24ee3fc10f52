"""The files of ``deploy/`` for containers and systemd, as far as they can be checked without
either."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from radixrt.cli.config_flags import add_arguments

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cuda"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_copies_only_files_that_are_there_and_not_ignored(file: Path) -> None:
    ignored = (DOCKER / f"{file.name}.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", file.read_text(), re.MULTILINE)
        for name in line.split()
    ]
    assert copied
    for name in copied:
        assert (ROOT / name).exists() and name in allowed, name


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_accepts_an_image(file: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        ["hadolint", "--ignore", "DL3008", "--ignore", "DL3013", file],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_the_files_that_compose_mounts_are_there_and_its_flags_are_known() -> None:
    import argparse

    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    mounts = [
        volume.split(":")[0] for service in services.values() for volume in service["volumes"]
    ]
    paths = [DOCKER / mount for mount in mounts if mount.startswith(".")]
    assert len(paths) == 4
    assert all(path.exists() for path in paths)
    assert (
        DOCKER
        / services["radixrt"]["build"]["context"]
        / services["radixrt"]["build"]["dockerfile"]
    ).is_file()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.parse_args(services["radixrt"]["command"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "radixrt.service"
    text = (ROOT / "deploy" / "systemd" / "radixrt.service").read_text()
    unit.write_text(
        text.replace("/opt/radixrt/bin/radixrt", "/bin/true")
    )  # it must exist for the check
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
