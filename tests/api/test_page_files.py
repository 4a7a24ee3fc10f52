"""The files of the web page: served to browsers, open to all, and bound to this server by their
headers."""

import hashlib
import re
import tomllib
from pathlib import Path

import httpx
import pytest

from radixrt.api.page.files import FOLDER
from tests.api.conftest import RunningServer, StartServer

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "sec-fetch-site": "none"}
FILES = sorted(FOLDER.iterdir())
MARKED = "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"
"""SHA-256 of lib/marked.esm.js in marked 18.2.1, as the npm registry has it."""


def test_a_browser_gets_the_page_and_programs_get_json(server: RunningServer) -> None:
    with server.http as http:
        page = http.get("/", headers=BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.text == (FOLDER / "index.html").read_text()
        for accept in ("*/*", "application/json"):
            root = http.get("/", headers={"accept": accept})
            assert "endpoints" in root.json() and root.headers["vary"] == page.headers["vary"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_is_served_and_allows_nothing_from_elsewhere(
    server: RunningServer, file: Path
) -> None:
    with server.http as http:
        response = http.get(f"/page/{file.name}")
        again = http.get(f"/page/{file.name}", headers={"if-none-match": response.headers["etag"]})
    assert response.content == file.read_bytes()
    assert (again.status_code, again.content) == (304, b"")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))  # fmt: skip
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    assert response.headers["x-content-type-options"] == "nosniff"


def test_no_file_names_another_host_or_makes_html_of_text() -> None:
    for file in (file for file in FILES if not file.name.startswith("marked.")):
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|[\"'(]//\w", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(| style=", text)  # fmt: skip


def test_the_library_is_the_one_of_its_authors() -> None:
    library = (FOLDER / "marked.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() == MARKED and b"marked v18.2.1" in library[:100]
    assert "Permission is hereby granted" in (FOLDER / "marked.LICENSE.txt").read_text()
    uses = {file.name for file in FILES if "marked.js" in file.read_text()}
    assert uses == {"markdown.js"}, "which makes elements of its tokens, never HTML"


def test_only_the_page_is_open_without_a_key(start_server: StartServer) -> None:
    url = start_server(api_key="secret").url
    assert httpx.get(url, headers=BROWSER).status_code == 200
    assert httpx.get(f"{url}/page/app.js").status_code == 200
    assert httpx.get(url).status_code == 401
    assert httpx.post(url, headers=BROWSER, json={}).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=BROWSER).status_code == 401
    for path in ("/page/../v1/models", "/page/%2e%2e/about.py", "/page//etc/passwd", "/page/"):
        assert httpx.get(url + path).status_code in (401, 404), path


def test_an_installation_has_the_files() -> None:
    package = FOLDER.parents[2]
    project = tomllib.loads((package.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["radixrt"]
    installed = {file for pattern in patterns for file in package.glob(pattern)}
    assert installed >= set(FILES)
