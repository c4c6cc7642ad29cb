"""Pushing, against a small hub on this machine: the parts of its protocol that small files take."""

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import RunFailed
from horizonrl.ops.cli.main import main
from horizonrl.ops.publish.hub import push
from tests.ops.report.runs import run_config, write_run

TOKEN = "hf_hunter2andmore"


@dataclass
class Hub:
    url: str = ""
    repositories: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.paths.append(self.path)
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.answer(401, {"error": f"no access with {self.headers['Authorization']}"})
            elif self.path == "/api/repos/create":
                hub.repositories.append(json.loads(body))
                self.answer(200, {"url": f"{hub.url}/someone/thing"})
            elif self.path == "/api/validate-yaml":  # the card's front matter
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                shown = [
                    {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for each in asked
                ]
                self.answer(200, {"files": shown})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(
                            line["value"]["content"]
                        )
                address = f"{hub.url}/someone/thing/commit/0123456789"
                self.answer(
                    200,
                    {
                        "success": True,
                        "commitOid": "0123456789",
                        "commitUrl": address,
                        "hookOutput": "",
                    },
                )
            else:
                self.answer(404, {"error": f"not in this hub: {self.path}"})

        def do_GET(self) -> None:
            hub.paths.append(self.path)
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.answer(401, {"error": "no access"})
                return
            self.answer(200, {"id": "someone/thing", "sha": "0" * 40, "siblings": []})

        def answer(self, status: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    from huggingface_hub import close_session

    close_session()  # else the server waits for connections that are kept alive
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_dataset_is_pushed_whole_and_private(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = write_run(run_config(tmp_path)), tmp_path / "out"
    assert main(["dataset", str(run_dir), str(out), "--push", "someone/thing"]) == 0
    (made,) = hub.repositories
    assert made["type"] == "dataset" and TOKEN not in json.dumps(made)
    assert made.get("visibility") == "private" or made.get("private") is True
    assert hub.files == {
        str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()
    }
    shown = capsys.readouterr()
    assert f"pushed to {hub.url}/someone/thing/commit/0123456789" in shown.out
    assert TOKEN not in shown.out + shown.err


def test_public_is_what_was_asked_for(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (".hidden", "secrets.env", "notes.md"):
        (tmp_path / name).write_text("not of an export")
    push(tmp_path, "someone/thing", "model", public=True)
    (made,) = hub.repositories
    assert made.get("visibility") == "public" or made.get("private") is False
    assert hub.files == {"README.md": b"a card", "tokenizer.json": b"{}"}


def test_a_refused_token_is_told_and_not_repeated(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_thewrongone")
    (tmp_path / "README.md").write_text("a card")
    with pytest.raises(
        RunFailed, match="is complete but was not pushed to someone/thing"
    ) as raised:
        push(tmp_path, "someone/thing", "model")
    assert "401" in str(raised.value) and "hf_thewrongone" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_without_a_token_or_with_a_bad_name_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    run_dir, out = write_run(run_config(tmp_path)), tmp_path / "out"
    assert main(["dataset", str(run_dir), str(out), "--push", "someone/thing"]) == 2
    assert "set the environment variable HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["export", str(run_dir), str(out), "--push", "thing"]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err
    assert not out.exists()
