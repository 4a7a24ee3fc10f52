"""Receipts that cannot be given are refused."""

from tests.api.conftest import RunningServer


def test_a_server_without_receipts_refuses_to_give_one(server: RunningServer) -> None:
    with server.http as http:
        response = http.post("/v1/completions", json={"prompt": "hi", "receipt": True})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "receipt" and "--receipts" in error["message"]
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
