"""docs/api.md knows every endpoint and every field."""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from radixrt.api.native.generate import NativeRequest, NativeSampling
from radixrt.api.native.prompt_calls import Detokenize, TokenizeRequest
from radixrt.api.requests.protocol import (
    UNSUPPORTED,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    StreamOptions,
)
from tests.api.conftest import RunningServer
from tests.docs.pages import PAGES, code_of, spans

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
STRUCTS = [
    ChatCompletionRequest, ChatMessage, CompletionRequest, StreamOptions, NativeRequest, NativeSampling,
    TokenizeRequest, Detokenize,
]  # fmt: skip


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_in_the_docs(struct: type[msgspec.Struct]) -> None:
    named = set(re.findall(r"`([a-z_]+)`", DOCS))
    assert set(struct.__struct_fields__) <= named


def test_every_refused_field_is_in_the_docs() -> None:
    assert set(UNSUPPORTED) <= set(re.findall(r"`([a-z_]+)`", DOCS))


@dataclass
class Offered:
    """What the server has."""

    endpoints: list[str]
    metrics: set[str]


@pytest.fixture(scope="module")
def offered(shared_server: RunningServer) -> Offered:
    with shared_server.http as http:
        metrics = re.findall(r"^# HELP (radixrt_\w+)", http.get("/metrics").text, re.M)
        return Offered(http.get("/").json()["endpoints"], set(metrics))


def test_every_endpoint_and_metric_is_in_the_docs(offered: Offered) -> None:
    for path in offered.endpoints:
        assert path in DOCS
    for name in offered.metrics:
        assert name in DOCS or name.replace("radixrt_kv_pages", "") in DOCS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_endpoint_and_metric_that_a_page_names_is_there(offered: Offered, page: Path) -> None:
    told = re.compile(
        r"(?:GET |POST |127\.0\.0\.1:30000)?(/(?:v1/)?[a-z_]+(?:/[a-z_]+|/\{model\})*)(\?\S*)?"
    )
    named = {match[1] for span in spans(page) if (match := told.fullmatch(span))}
    assert not named - set(offered.endpoints) - {"/v1", "/openapi.json", "/proc"}
    words = re.findall(r"\bradixrt_(?!kernels\b)\w+", code_of(page))
    known = {*offered.metrics, *(f"{name}_total" for name in offered.metrics)}
    assert not set(words) - known - {"radixrt_kernels"}
