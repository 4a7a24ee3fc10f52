"""The programs and requests on the pages run and give the printed answers.

The snippets of docs/lang.md are run by ``tests/lang/test_docs.py``.
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from radixrt import LLM
from radixrt.base.config import ServerConfig
from radixrt.base.settings.setting import flag_of
from tests.docs.pages import PAGES, blocks
from tests.servers import Server
from tests.servers.engine_in_threads import engines_in_threads

SAID = "http://127.0.0.1:30000"
DOCUMENT = "The port of Vidur is Noval. " * 20
QUESTION = "What is the port of Vidur?"

ELSEWHERE = {"lang.md", "add_a_model.md", "kv_events.md", "embeddings.md"}
"""Their programs are run by the tests of their subjects."""
PROGRAMS = [page for page in PAGES if blocks(page, "python") and page.name not in ELSEWHERE]
REQUESTS = [page for page in PAGES if "\ncurl " in page.read_text() and page.name not in ELSEWHERE]


@pytest.fixture
def url(demo_server: Server) -> str:
    return demo_server.url


@pytest.fixture
def of_the_reader(url: str) -> dict[str, Any]:
    """What docs/cache_hints.md leaves to its reader: a client, a document, and what to ask."""
    return {
        "__name__": "snippet",
        "client": OpenAI(base_url=f"{url}/v1", api_key="none"),
        "messages": [{"role": "user", "content": f"{DOCUMENT} {QUESTION}"}],
        "document": DOCUMENT, "manual": DOCUMENT, "question": QUESTION, "questions": [QUESTION],
    }  # fmt: skip


class SharedLLM:
    """``LLM()`` of a page: an engine that is there already, with an empty cache. Closing it does
    nothing."""

    engine: LLM

    def __init__(self) -> None:
        self.engine.flush_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __enter__(self) -> "SharedLLM":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_programs_run_and_print_what_the_page_says(
    page: Path,
    url: str,
    demo_llm: LLM,
    of_the_reader: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after another. What a program prints stands behind its ``print``, or in the block below
    it.

    The README's program starts an engine of its own.
    """
    monkeypatch.setenv("RADIXRT_URL", url)
    if page.name != "README.md":
        monkeypatch.setattr(SharedLLM, "engine", demo_llm, raising=False)
        monkeypatch.setattr("radixrt.LLM", SharedLLM)
    programs = re.findall(
        r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), flags=re.DOTALL
    )
    assert programs
    for program, below in programs:
        printed = io.StringIO()
        with engines_in_threads(), contextlib.redirect_stdout(printed):
            exec(compile(program.replace(SAID, url), page.name, "exec"), of_the_reader)
        beside = re.findall(r"print\(.*\)(?:  |\n\n)# (.*)$", program, re.MULTILINE)
        assert set(beside) <= set(printed.getvalue().splitlines()), program
        assert not below or printed.getvalue() == below, program


def requests_of(page: Path) -> Iterator[tuple[str, str]]:
    """Each curl command, and the comment below it that shows the answer."""
    for block in blocks(page, "bash"):
        for request in re.split(r"^(?=curl )", block, flags=re.MULTILINE)[1:]:
            command, *comment = re.split(r"^(?=#)", request, maxsplit=1, flags=re.MULTILINE)
            yield command.rstrip(), "".join(comment)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", REQUESTS, ids=lambda page: page.name)
def test_requests_are_answered_as_the_page_says(page: Path, url: str) -> None:
    """With every field that the page shows. An id that a page shows cut short stands for that of
    the answer before."""
    shown = list(requests_of(page))
    assert len(shown) == page.read_text().count("\ncurl ")
    id_before = ""
    for command, answer in shown:
        command = re.sub(r"\b(chatcmpl|conv)-\w+…", id_before, command.replace(SAID, url))
        done = subprocess.run(["bash", "-c", f"{command} -sS"], capture_output=True, text=True, timeout=60)  # fmt: skip
        assert done.returncode == 0 and '"error"' not in done.stdout, f"{command}\n{done.stdout}"
        fields = set(re.findall(r'"(\w+)":', answer))
        assert not fields - set(re.findall(r'"(\w+)":', done.stdout)), done.stdout
        if '"stream": true' not in command:
            reply = json.loads(done.stdout)
            id_before = reply.get("id", "") if isinstance(reply, dict) else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_blocks_are_well_formed(page: Path) -> None:
    """Of languages whose blocks are not run: what a shell, TOML and YAML make of them."""
    for script in blocks(page, "bash"):
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0, f"{page.name}: {checked.stderr}"
    for table in blocks(page, "toml"):
        assert tomllib.loads(table)
    for mapping in blocks(page, "yaml"):
        settings = yaml.safe_load(mapping)
        if "model-path" in settings:
            known = {flag_of(field.name).removeprefix("--") for field in fields(ServerConfig)}
            assert settings.keys() <= known, f"{page.name}: {settings.keys() - known}"
