"""HTTPS with a self-signed certificate."""

import dataclasses
import json
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from radixrt.api.banner import banner
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.server_url import server_context
from radixrt.cli.chat.local_server import client_of
from radixrt.cli.main import main
from radixrt.cli.top import ServerAwayError, ServerWatch
from tests.api.conftest import RunningServer, StartServer
from tests.servers.fake_scheduler import engine_info


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test -days 2"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def server(start_server: StartServer, pem: Path) -> RunningServer:
    server = start_server(tls_cert=str(pem / "cert.pem"), tls_key=str(pem / "key.pem"))
    server.answer_with("Hello world")
    return dataclasses.replace(server, url=server.url.replace("http:", "https:"))


def test_the_openai_client_speaks_https(server: RunningServer, pem: Path) -> None:
    with (
        httpx.Client(verify=ssl.create_default_context(cafile=pem / "cert.pem")) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client,
    ):
        messages = [{"role": "user", "content": "Hi"}]
        chunks = client.chat.completions.create(model="tiny", messages=messages, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello world"


def test_a_client_that_does_not_know_the_certificate_is_not_served(server: RunningServer) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health")
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        httpx.get(f"{server.url.replace('https', 'http')}/health")


def test_top_and_bench_serve_speak_https(
    server: RunningServer, pem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerAwayError, match="certificate"):
        ServerWatch(server.url).read()
    monkeypatch.setenv("SSL_CERT_FILE", str(pem / "cert.pem"))
    assert ServerWatch(server.url).read().model == "tiny"
    flags = ["--num-prompts", "2", "--workload", "random", "--input-len", "4", "--output-len", "4"]
    report = tmp_path / "report.json"
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", "--base-url", f"{server.url}/v1", "--json", str(report), *flags])
    assert end.value.code == 0
    assert json.loads(report.read_text())["summary"]["succeeded"] == 2


def test_the_chat_trusts_the_certificate_of_its_own_server(
    server: RunningServer, pem: Path
) -> None:
    """Also under a name that the certificate does not have."""
    files = {"tls_cert": str(pem / "cert.pem"), "tls_key": str(pem / "key.pem")}
    port = int(server.url.rpartition(":")[2])
    client = client_of(ServerConfig(host="localhost", port=port, **files))
    assert client.is_ready() and client.models()[0]["id"] == "tiny"
    with pytest.raises(ConfigError, match="no such file"):
        client_of(ServerConfig(tls_cert=str(pem / "none.pem")))


def test_the_start_up_lines_have_the_scheme(pem: Path) -> None:
    config = ServerConfig(tls_cert=str(pem / "cert.pem"))
    assert "https://127.0.0.1:30000/v1" in banner(config, engine_info(), "127.0.0.1", 30000)


def test_files_that_cannot_be_used_are_refused_at_start(pem: Path, tmp_path: Path) -> None:
    cert, key = str(pem / "cert.pem"), str(pem / "key.pem")
    with pytest.raises(ConfigError, match="--tls-key needs --tls-cert"):
        ServerConfig(tls_key=key).validate()
    with pytest.raises(ConfigError, match="no such file"):
        server_context(cert, str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="cannot be used"):
        server_context(cert, None)  # has no key in it
    encrypted = str(tmp_path / "encrypted.pem")
    command = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", encrypted]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="is encrypted"):
        server_context(cert, encrypted)
