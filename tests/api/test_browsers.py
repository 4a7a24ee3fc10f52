"""Requests as browsers send them: of the server's own pages, of other sites, and after DNS
rebinding."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from radixrt.api.banner import banner
from radixrt.api.http.browsers import MAX_LOGGED, accepted_names
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from tests.api.conftest import RunningServer, StartServer
from tests.servers.fake_scheduler import engine_info

CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://chat.example.com"
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def open_server(start_server: StartServer) -> RunningServer:
    """A server that the pages of one site may use."""
    server = start_server(
        cors_origins=f"{PAGE}, http://localhost:3000", allowed_hosts="llm.example.com"
    )
    server.answer_with("Hello")
    return server


def post(server: RunningServer, path: str = CHAT_PATH, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    content = json.dumps(CHAT)
    return httpx.post(f"{server.url}{path}", content=content, headers=names, timeout=20)


def code(response: httpx.Response) -> str:
    return response.json()["error"]["code"]


# ------------------------------------------------------------ programs


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_programs_need_no_content_type(server: RunningServer, kind: str) -> None:
    """``curl -d`` sends that of a form."""
    assert post(server, content_type=kind).status_code == 200
    assert httpx.post(f"{server.url}{CHAT_PATH}", content=json.dumps(CHAT)).status_code == 200


# ------------------------------------------------------------ pages


def test_a_page_of_another_site_can_post_nothing(server: RunningServer) -> None:
    """What each kind of page sends without asking first."""
    server.scheduler.requests.clear()
    for headers in (
        {"origin": EVIL, "content_type": "text/plain"},
        {"origin": EVIL, "content_type": "application/x-www-form-urlencoded"},
        {"origin": EVIL, "content_type": "application/json"},
        {"origin": "null", "content_type": "text/plain"},  # of a sandboxed frame
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors"},  # another port of this machine
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
    ):  # fmt: skip
        for path in (CHAT_PATH, "/abort_request", "/flush_cache"):
            response = post(server, path, **headers)
            assert response.status_code == 403 and code(response) == "origin_not_allowed"
            assert "access-control-allow-origin" not in response.headers
    assert server.scheduler.requests == []


def test_each_refused_origin_is_logged_once_with_the_flag_that_lets_it_in(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The browser tells its user no more than that the fetch failed."""
    server = start_server()
    for origin in (EVIL, EVIL, "http://localhost:3000", "null; rm -rf"):
        assert post(server, origin=origin).status_code == 403
    assert httpx.get(f"{server.url}/health", headers={"host": "rebound.example"}).status_code == 421
    logged = [line for line in caplog.messages if "was refused" in line]
    assert [line for line in logged if EVIL in line] == [
        f"A page of {EVIL!r} was refused; --cors-origins {EVIL} lets such pages use the server. Browsers only say 'Failed to fetch'."
    ]
    assert len(logged) == 4 and "--cors-origins NAME" in logged[2]
    assert "--allowed-hosts rebound.example" in logged[-1]
    for number in range(100):
        post(server, origin=f"http://{number}.example")
    assert len([line for line in caplog.messages if "was refused" in line]) == MAX_LOGGED


def test_a_page_of_another_site_gets_no_permission(server: RunningServer) -> None:
    asks = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{server.url}{CHAT_PATH}", headers=asks)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_page_of_another_site_loads_nothing_but_follows_links(server: RunningServer) -> None:
    with server.http as http:
        image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}  # fmt: skip
        assert http.get("/health_generate", headers=image).status_code == 403
        frame = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}  # fmt: skip
        assert http.get("/", headers=frame).status_code == 403
        assert http.get("/", headers=frame | {"Sec-Fetch-Dest": "document"}).status_code == 200
        assert http.get("/", headers={"Sec-Fetch-Site": "none"}).status_code == 200


def test_the_servers_own_pages_may_send_json(server: RunningServer) -> None:
    own = {"origin": server.url, "sec_fetch_site": "same-origin"}
    assert post(server, **own, content_type="application/json; charset=utf-8").status_code == 200
    for kind in ("text/plain", "application/jsonp", ""):
        response = post(server, **own, content_type=kind)
        assert response.status_code == 415 and code(response) == "json_required"
    other_port = server.url.rpartition(":")[0] + ":1"
    assert post(server, origin=other_port, content_type="application/json").status_code == 403


def test_pages_of_listed_origins_may_ask_and_read(open_server: RunningServer) -> None:
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    permission = httpx.options(f"{open_server.url}{CHAT_PATH}", headers=asks)
    assert permission.status_code == 200
    assert permission.headers["access-control-allow-origin"] == PAGE
    assert "POST" in permission.headers["access-control-allow-methods"]
    allowed_headers = permission.headers["access-control-allow-headers"]
    assert {"authorization", "content-type", "x-stainless-os"} <= {*allowed_headers.split(",")}
    assert "Origin" in permission.headers["vary"]

    answer = post(open_server, origin=PAGE, content_type="application/json")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["vary"] == "Origin"
    exposed = answer.headers["access-control-expose-headers"]
    assert {"X-Request-Id", "Retry-After"} == {*exposed.split(", ")}
    assert "access-control-allow-credentials" not in answer.headers

    mistake = post(open_server, origin=PAGE, content_type="text/plain")
    assert mistake.status_code == 415 and mistake.headers["access-control-allow-origin"] == PAGE


def test_listed_origins_let_no_others_in(open_server: RunningServer) -> None:
    for origin in (
        EVIL,
        "https://chat.example.com.evil.example",
        "http://chat.example.com",
        "null",
    ):
        assert post(open_server, origin=origin, content_type="application/json").status_code == 403
        asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        refusal = httpx.options(f"{open_server.url}{CHAT_PATH}", headers=asks)
        assert refusal.status_code == 400
        assert "access-control-allow-origin" not in refusal.headers


def test_pages_can_read_that_their_key_is_wrong(start_server: StartServer) -> None:
    server = start_server(api_key="secret", cors_origins="*")
    asks = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    assert httpx.options(f"{server.url}{CHAT_PATH}", headers=asks).status_code == 200
    response = post(server, origin=EVIL, content_type="application/json")
    assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "https://A.example", "http://u@a"])  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid origin"):
        ServerConfig(cors_origins=f"https://b.example,{origin}").validate()
    ServerConfig(cors_origins="https://b.example:8443, null,app://obsidian.md").validate()


# ------------------------------------------------------------ host names


def test_a_rebound_name_gets_nothing(server: RunningServer) -> None:
    """Its origin equals its host, and a GET has no origin."""
    host = f"evil.example:{urlsplit(server.url).port}"
    with server.http as http:
        for path in ("/get_server_info", "/v1/cache/tree", "/metrics", "/"):
            response = http.get(path, headers={"Host": host})
            assert response.status_code == 421 and code(response) == "host_not_allowed"
    response = post(server, host=host, origin=f"http://{host}", content_type="application/json")
    assert response.status_code == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "app.localhost", "localhost.", "192.168.1.2:3", "[::1]:30000", "[fe80::1%25eth0]"],
)  # fmt: skip
def test_addresses_and_localhost_need_no_permission(server: RunningServer, host: str) -> None:
    with server.http as http:
        assert http.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["", ":30000", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost", "1.2.3", "[evil.example]", "localhost@evil.example"])  # fmt: skip
def test_names_that_only_look_like_them_are_refused(server: RunningServer, host: str) -> None:
    with server.http as http:
        assert http.get("/health", headers={"Host": host}).status_code == 421


def test_listed_names_pass(open_server: RunningServer) -> None:
    with open_server.http as http:
        assert http.get("/health", headers={"Host": "LLM.example.com:443"}).status_code == 200
        assert http.get("/health", headers={"Host": "llm.example.org"}).status_code == 421


def test_every_name_of_a_request_is_checked(server: RunningServer) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).split()[1] in (b"400", b"421")


def test_the_start_up_lines_say_the_names() -> None:
    def lines(**settings: str) -> str:
        config = ServerConfig(**settings)
        return banner(config, engine_info(), config.host, 30000)

    assert "names" not in lines()
    open_lines = lines(host="0.0.0.0", allowed_hosts="LLM.example.com")
    assert (
        f"names     localhost, {socket.gethostname().lower()}, llm.example.com and IP" in open_lines
    )
    assert "names     any\n" in lines(host="0.0.0.0", allowed_hosts="*")
    assert accepted_names("box.local", ())[-1] == "box.local"


# ------------------------------------------------------------ methods


def test_get_changes_nothing(server: RunningServer) -> None:
    response = httpx.get(f"{server.url}/flush_cache")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
