"""A server that speaks the part of the hub's API by which models are downloaded."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_REPOSITORY = re.compile(r"/api/models/([^/]+/[^/]+)(/tree|/revision|$)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")


class FakeHub:
    """Repositories of models, each with one commit. Use as a context manager."""

    def __init__(self, **repositories: dict[str, bytes]) -> None:
        self.repositories = {f"maker/{name}": files for name, files in repositories.items()}
        """By hub id, the content of each file."""
        self.gated: set[str] = set()
        self.downloads: list[str] = []
        self.packed_architectures: dict[str, str] = {}
        """By hub id, what the hub has read in GGUF files."""

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        repository = _REPOSITORY.match(path) or _FILE.match(path)
        files = self.hub.repositories.get(repository[1]) if repository else None
        if repository is None or files is None:
            return self._reply(404, {"X-Error-Code": "RepoNotFound"})
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        if path.startswith("/api/"):
            body = json.dumps(
                [{"type": "file", "path": p, "size": len(c), "oid": _sha(c)} for p, c in files.items()]
                if repository[2] == "/tree"
                else {"id": repository[1], "sha": commit, "siblings": [{"rfilename": p, "size": len(c)} for p, c in files.items()]}
                | ({"config": json.loads(files["config.json"])} if "config.json" in files else {})
                | ({"gguf": {"architecture": self.hub.packed_architectures[repository[1]]}} if repository[1] in self.hub.packed_architectures else {})
            )  # fmt: skip
            return self._reply(200, {"Content-Type": "application/json"}, body.encode())
        if repository[1] in self.hub.gated:
            return self._reply(403, {"X-Error-Code": "GatedRepo"})
        content = files[repository[2]]
        if self.command == "GET":
            self.hub.downloads.append(repository[2])
        return self._reply(
            200, {"X-Repo-Commit": commit, "ETag": f'"{_sha(content)}"'}, body=content
        )

    do_HEAD = do_GET

    def _reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _sha(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
