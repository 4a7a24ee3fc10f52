"""The release workflow names what is there, and what it uploads is checked."""

import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import release, wheel

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KERNELS = "radixrt_kernels/_native.cpython-311-x86_64-linux-gnu.so"


def steps() -> list[dict[str, Any]]:
    return [step for job in JOBS.values() for step in job["steps"]]


def test_nothing_is_published_before_all_checks() -> None:
    def before(job: str) -> set[str]:
        needs = JOBS[job].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(before(one) for one in direct))

    checks = {"tag", "tests", "arm64-emulated", "wheels", "newcomer", "check"}
    for job in ("publish", "image", "image-list"):
        assert checks <= before(job), job
        is_for_tags = "github.ref_type == 'tag'"
        assert is_for_tags in JOBS[job].get("if", "") or "publish" in before(job), job


def test_the_commands_of_the_workflow_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [line for step in steps() for line in step.get("run", "").splitlines()]
    made = [word for line in commands for word in (re.match(r"make ([a-z0-9 -]+)", line) or [""])[0].split()[1:]]  # fmt: skip
    assert made and set(made) <= targets
    for line in commands:
        for module in re.findall(r"python -m (tools\.\w+)", line):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists()
        for path in re.findall(r"(?<![\w/])deploy/[\w./]+", line):
            assert (ROOT / path).exists(), path


def test_actions_are_pinned_to_a_version_or_a_commit() -> None:
    used = {step["uses"] for step in steps() if "uses" in step}
    assert used
    for action in used:
        pin = action.partition("@")[2]
        assert re.fullmatch(r"v\d+|[0-9a-f]{40}|release/v1", pin), action


def test_shell_texts_are_valid() -> None:
    scripts = [re.sub(r"\$\{\{.*?\}\}", "x", step["run"]) for step in steps() if "run" in step]
    scripts.append((ROOT / "deploy/release/try_image.sh").read_text())
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert not done.returncode, f"{script}\n{done.stderr}"


def test_the_pythons_of_wheels_tests_and_metadata_are_the_same() -> None:
    built = tuple(re.findall(r"cp3\d+", PROJECT["tool"]["cibuildwheel"]["build"]))
    matrix = JOBS["newcomer"]["strategy"]["matrix"]["python"]
    classified = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]  # fmt: skip
    assert built == release.PYTHONS == tuple(f"cp{one.replace('.', '')}" for one in matrix)
    assert matrix == classified


def test_the_versions_of_package_and_metadata_are_the_same() -> None:
    import radixrt

    assert radixrt.__version__ == PROJECT["project"]["version"]


def fake_wheel(folder: Path, name: str, without: str = "") -> Path:
    """A wheel with all files of the checkout, which are empty."""
    file = folder / name
    files = [one for one in wheel.tracked_files() if not wheel.SOURCES.match(one)]
    with zipfile.ZipFile(file, "w") as archive:
        for one in {*files, KERNELS} - {without}:
            archive.writestr(one, "")
    return file


def test_a_wheel_is_refused_for_its_name_its_tag_and_its_content(tmp_path: Path) -> None:
    version = PROJECT["project"]["version"]
    good = f"radixrt-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert release.wheel_problems(fake_wheel(tmp_path, good)) == []
    assert release.wheel_problems(fake_wheel(tmp_path, good, without=KERNELS)) == ["no kernels"]
    old = fake_wheel(tmp_path, "radixrt-0.0.9-cp311-cp311-manylinux_2_28_x86_64.whl")
    assert release.wheel_problems(old) == ["it has another version"]
    (plain,) = release.wheel_problems(fake_wheel(tmp_path, f"radixrt-{version}-cp311-cp311-linux_x86_64.whl"))  # fmt: skip
    assert "auditwheel" in plain
    pure = fake_wheel(tmp_path, f"radixrt-{version}-py3-none-any.whl")
    assert release.wheel_problems(pure) == ["this is not the name of a wheel of radixrt with kernels"]  # fmt: skip


def test_what_a_release_lacks_is_named() -> None:
    files = [
        Path(f"radixrt-0.1.0-{python}-{python}-manylinux_2_28_{processor}.whl")
        for python in release.PYTHONS
        for processor in release.PROCESSORS
    ]
    everything = [*files, Path("radixrt-0.1.0.tar.gz")]
    assert release.missing_files(everything) == []
    assert release.missing_files(files[1:]) == [
        "there is no wheel for cp311 and x86_64",
        "there is no source distribution",
    ]


def test_a_tag_names_the_version_and_a_section_of_the_changelog() -> None:
    version, another = release.tag_problems("v9.9")
    assert "the tag is v9.9" in version and "CHANGELOG.md has no section" in another


def test_a_source_distribution_without_the_kernels_sources_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "radixrt-0.1.0.tar.gz"
    (tmp_path / "empty").touch()
    kept = [one for one in wheel.tracked_files() if not one.endswith("module.cpp")]
    with tarfile.open(file, "w:gz") as archive:
        for one in [*kept, *release.NEEDED_OF_SDIST]:
            archive.add(tmp_path / "empty", f"radixrt-0.1.0/{one}")
    assert release.sdist_problems(file) == ["lacks radixrt_kernels/csrc/module.cpp"]


def test_only_a_tag_with_a_maintainers_signature_is_released(tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    command = next(step["run"] for step in JOBS["tag"]["steps"] if "run" in step)
    repository = tmp_path / "repository"
    (repository / "deploy/release").mkdir(parents=True)
    signers = repository / "deploy/release/allowed_signers"
    comments = (ROOT / "deploy/release/allowed_signers").read_text()
    for name in ("maintainer", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)  # fmt: skip
    public = (tmp_path / "maintainer.pub").read_text()
    git = ["git", "-c", "user.name=M", "-c", "user.email=m@example.com", "-c", "gpg.format=ssh"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Begin"]):
        subprocess.run([*git, *arguments], cwd=repository, check=True)
    for tag, key in (("v1", "maintainer"), ("v2", "stranger")):
        sign = [*git, "-c", f"user.signingkey={tmp_path / key}", "tag", "--sign", "-m", tag, tag]
        subprocess.run(sign, cwd=repository, check=True)
    subprocess.run([*git, "tag", "v3"], cwd=repository, check=True)

    def is_accepted(tag: str) -> bool:
        environment = {"PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": tag, "HOME": str(tmp_path)}
        done = subprocess.run(["bash", "-c", command], cwd=repository, env=environment, capture_output=True)  # fmt: skip
        return done.returncode == 0

    signers.write_text(comments)
    assert not is_accepted("v1"), "no key is allowed yet"
    signers.write_text(f'{comments}m@example.com namespaces="git" {public}')
    assert [is_accepted(tag) for tag in ("v1", "v2", "v3")] == [True, False, False]
