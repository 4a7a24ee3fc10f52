"""docs/internals/dependencies.md gives a reason for every dependency, and for no other."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"Always": project["dependencies"], **project["optional-dependencies"]}
    required = {
        re.match(r"[\w-]+", requirement)[0]
        for requirements in groups.values()
        for requirement in requirements
    } - {"radixrt"}
    page = (ROOT / "docs" / "internals" / "dependencies.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)) == required
