"""Names on the hub are looked up once, before its library starts to try again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megatron_lengen.data.hub import check_on_hub
from megatron_lengen.errors import BadInput


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[list[str]]:
    """A hub of our own that has org/there; gives the paths that were asked for."""
    from huggingface_hub import constants

    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/api/models/org/there" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield asked
    server.shutdown()
    server.server_close()


def test_a_name_that_is_there_is_asked_for_once(hub):
    check_on_hub("org/there", "--model")
    assert hub.count("/api/models/org/there") == 1


def test_a_name_that_is_not_there_is_refused(hub):
    with pytest.raises(BadInput, match="--model: no folder org/theer, and none on http"):
        check_on_hub("org/theer", "--model")


def test_no_network_is_said_at_once(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BadInput, match=r"no folder a/b, and http.* cannot be reached"):
        check_on_hub("a/b", "--load")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="the hub's cache has none"):
        check_on_hub("a/b", "--load")
    assert hub == []


def test_what_is_cached_needs_no_hub(hub, tmp_path):
    folder = tmp_path / "cache" / "models--org--kept"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    check_on_hub("org/kept", "--model")
    assert hub == []
