"""A server that speaks just enough OpenAI to be measured, with latencies that are known."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    """Answers every request with ``max_tokens`` tokens. Use as a context manager."""

    first_token_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    vocab_size: int | None = 1000
    """None: there is no /get_model_info, as with other servers."""
    fail_every: int = 0
    """Every so many-th request gets a 503."""
    api_key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    """The times of the chunks with tokens, of each answer: seconds from the arrival of its
    request."""
    flushes: int = 0
    running: int = 0
    most_running: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def __enter__(self) -> "FakeServer":
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a refused connection is tried again only after a second


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.fake.api_key and self.headers["Authorization"] != f"Bearer {self.fake.api_key}":
            self.reply(401, {})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "fake"}]})
        elif self.path == "/get_model_info" and self.fake.vocab_size:
            self.reply(200, {"vocab_size": self.fake.vocab_size})
        else:
            self.reply(404, {"detail": "no such page"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fake = self.fake
        if self.path == "/flush_cache":
            fake.flushes += 1
            self.reply(200, {})
            return
        with fake.lock:
            fake.bodies.append(json.loads(body))
            fake.arrivals.append(time.perf_counter())
            number = len(fake.bodies)
            fake.running += 1
            fake.most_running = max(fake.most_running, fake.running)
        try:
            if fake.fail_every and number % fake.fail_every == 0:
                self.reply(503, {"error": {"message": "the queue is full"}})
            else:
                self.stream(json.loads(body))
        finally:
            with fake.lock:
                fake.running -= 1

    def reply(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        left, total = body["max_tokens"], body["max_tokens"]
        begin, sent = time.perf_counter(), list[float]()
        self.fake.sent.append(sent)
        time.sleep(self.fake.first_token_s)
        while left:
            count = min(left, 1 if left == total else self.fake.tokens_per_chunk)
            left -= count
            sent.append(time.perf_counter() - begin)
            self.event({"choices": [self.choice(body, [7] * count)], "usage": None})
            if left:
                time.sleep(self.fake.gap_s)
        prompt_tokens = len(body.get("prompt") or body["messages"])
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        }
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def choice(self, body: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        text = "la " * len(token_ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        if body.get("return_token_ids") and self.fake.vocab_size:
            choice["token_ids"] = token_ids
        return choice

    def event(self, document: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        self.wfile.flush()
