"""Bringing a model of the hub to this machine."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch

from guided_smc.errors import ModelError
from guided_smc.models.loading import cached_models, load_pretrained

pytestmark = pytest.mark.usefixtures("own_caches")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine: `hub.repositories[name]` is a folder, or a status to answer with."""
    repositories: dict[str, Path | int] = {}
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.split("?")[0].lstrip("/")
            requests.append(path)
            name = "/".join(path.removeprefix("api/models/").split("/")[:2])
            found = repositories.get(name, 404)
            if isinstance(found, int):
                code = {401: "GatedRepo", 404: "RepoNotFound"}.get(found, "")
                return self.answer(found, b"{}", {"X-Error-Code": code})
            if "/tree/" in path:
                files = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                    for f in sorted(found.iterdir())
                ]
                return self.answer(200, json.dumps(files).encode(), {})
            if path.startswith("api/models/"):
                siblings = [{"rfilename": f.name} for f in sorted(found.iterdir())]
                body = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
                return self.answer(200, json.dumps(body).encode(), {})
            file = found / path.rsplit("/", 1)[1]
            data = file.read_bytes()
            tag = f'"{abs(hash((file.name, len(data))))}"'
            return self.answer(200, data, {"ETag": tag, "X-Repo-Commit": COMMIT})

        def answer(self, status, body, headers):
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    server.repositories, server.requests = repositories, requests
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_model_is_downloaded_and_later_loads_without_the_hub(folder, hub, monkeypatch):
    hub.repositories["me/tiny"] = folder
    (folder / "consolidated.safetensors").write_bytes(b"a copy")
    (folder / "own.py").write_text("raise SystemExit")
    told = []
    loaded = load_pretrained("me/tiny", device="cpu", notify=told.append)
    assert loaded.name == "me/tiny"
    assert told == ["Downloading me/tiny from the hub..."]
    fetched = {r.rsplit("/", 1)[1] for r in hub.requests if "/resolve/" in r}
    assert "model.safetensors" in fetched
    assert not fetched & {"consolidated.safetensors", "own.py"}

    told.clear()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    again = load_pretrained("me/tiny", device="cpu", notify=told.append)
    assert told == []
    key = "model.embed_tokens.weight"
    assert torch.equal(again.model.state_dict()[key], loaded.model.state_dict()[key])
    (cached,) = cached_models()
    assert (cached.name, cached.kind) == ("me/tiny", "hub")
    assert cached.bytes >= (folder / "model.safetensors").stat().st_size


def test_pickles_on_the_hub_are_refused_before_they_are_fetched(folder, hub):
    hub.repositories["me/tiny"] = folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="allow_pickle=True"):
        load_pretrained("me/tiny", device="cpu")
    assert not [r for r in hub.requests if "/resolve/" in r]


def test_a_hub_repository_of_gguf_files_only_is_told(folder, hub):
    hub.repositories["me/tiny"] = folder
    (folder / "model.safetensors").rename(folder / "tiny.gguf")
    with pytest.raises(ModelError, match="GGUF files only"):
        load_pretrained("me/tiny", device="cpu")


def test_an_unknown_hub_id_is_told(hub):
    with pytest.raises(ModelError, match=r"not a file or folder here.*no such model"):
        load_pretrained("me/unknown")


def test_a_gated_model_is_told(hub):
    hub.repositories["me/gated"] = 401
    with pytest.raises(ModelError, match=r"gated.*hf auth login"):
        load_pretrained("me/gated")


def test_a_failing_hub_is_told_with_its_answer(hub):
    hub.repositories["me/tiny"] = 503
    with pytest.raises(ModelError, match="the hub answered 503"):
        load_pretrained("me/tiny")


def test_a_hub_that_cannot_be_reached_is_told_soon():
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"not downloaded before.*could not be reached"):
        load_pretrained("me/tiny")
    assert time.monotonic() - started < 10


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr("guided_smc.models.hub._HUB_TIMEOUT_S", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:
        # Connections are accepted by the system; nobody reads them.
        endpoint = f"http://127.0.0.1:{silent.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        started = time.monotonic()
        with pytest.raises(ModelError, match="could not be reached"):
            load_pretrained("me/tiny")
        assert time.monotonic() - started < 10
