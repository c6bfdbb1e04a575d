"""The part of the Hugging Face Hub's HTTP API that files of repositories need, on this host."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Files = dict[str, bytes]
"""Content of the files of a repository, by path."""


class HubServer(ThreadingHTTPServer):
    """Serves repositories, kept in memory. All of them are models with one revision; a repository is made by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Files] = {}
        self.allows_writes = True
        """Whether it accepts commits, as with a valid token."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        words = [urllib.parse.unquote(word) for word in path.strip("/").split("/")]
        if words[:2] == ["api", "models"]:
            files = self._repository("/".join(words[2:4]))
            if files is None:
                return
            if words[4:5] == ["tree"]:
                return self._list(files, "/".join(words[6:]))
            siblings = [{"rfilename": each} for each in files]
            return self._send({"id": "/".join(words[2:4]), "sha": _hash(repr(files).encode()), "siblings": siblings})
        if words[2:3] == ["resolve"] and (files := self._repository("/".join(words[:2]))) is not None:
            self._send_file(files, "/".join(words[4:]))

    do_HEAD = do_GET  # noqa: N815 (as http.server calls it)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        words = self.path.partition("?")[0].strip("/").split("/")
        if words[:3] == ["api", "repos", "create"]:
            given = json.loads(body)
            name = f"{given['organization'] or 'me'}/{given['name']}"
            self.server.repositories.setdefault(name, {})
            return self._send({"url": f"/{name}", "name": name})
        if words == ["api", "validate-yaml"]:  # of a model card
            return self._send({})
        files = self._repository("/".join(words[2:4]))
        if words[4:5] == ["paths-info"] and files is not None:
            paths = urllib.parse.parse_qs(body.decode())["paths"]
            return self._send([entry for path in paths for entry in _entries(files) if entry["path"] == path])
        if words[4:5] == ["preupload"] and files is not None:
            sent = json.loads(body)["files"]
            modes = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in sent]
            return self._send({"files": modes})
        if words[4:5] == ["commit"] and files is not None:
            return self._commit(files, [json.loads(line) for line in body.splitlines()])

    def _commit(self, files: Files, lines: list[dict[str, Any]]) -> None:
        if not self.server.allows_writes:
            return self._fail(403, "Forbidden: you must use a write token")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = _hash(repr(files).encode())
        self._send({"commitOid": commit, "commitUrl": f"https://huggingface.co/me/any/commit/{commit}"})

    def _repository(self, name: str) -> Files | None:
        """Return a repository; answer that it does not exist, and return None."""
        if name not in self.server.repositories:
            self._fail(404, "Repository Not Found", code="RepoNotFound")
        return self.server.repositories.get(name)

    def _list(self, files: Files, directory: str) -> None:
        is_recursive = "recursive=true" in self.path.lower()
        start = f"{directory}/" if directory else ""
        found = [entry for entry in _entries(files) if entry["path"].startswith(start)]
        if start and not found:
            return self._fail(404, f"{directory} does not exist", code="EntryNotFound")
        self._send([entry for entry in found if is_recursive or "/" not in entry["path"].removeprefix(start)])

    def _send_file(self, files: Files, path: str) -> None:
        if path not in files:
            return self._fail(404, "Entry not found", code="EntryNotFound")
        content = files[path]
        headers = {"ETag": f'"{_hash(content)}"', "X-Repo-Commit": _hash(repr(files).encode())}
        status = 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(found[1]), min(int(found[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            content, status = content[start:end], 206
        self._respond(status, content, headers)

    def _send(self, value: object) -> None:
        self._respond(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, text: str, *, code: str = "") -> None:
        headers = {"X-Error-Message": text, "Content-Type": "application/json"}
        self._respond(status, json.dumps({"error": text}).encode(), headers | ({"X-Error-Code": code} if code else {}))

    def _respond(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _entries(files: Files) -> list[dict[str, Any]]:
    """Return the files and directories of a repository as the Hub lists them."""
    parents = {path.rsplit("/", depth)[0] for path in files for depth in range(1, path.count("/") + 1)}
    directories = [{"type": "directory", "path": path, "oid": _hash(path.encode())} for path in sorted(parents)]
    found = [{"type": "file", "path": path, "size": len(files[path]), "oid": _hash(files[path])} for path in files]
    return [*directories, *found]


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve a Hub that huggingface_hub of this process uses, in place of huggingface.co."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.constants.ENDPOINT", url)
            template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            patch.setenv("HF_TOKEN", "hf_any")
            yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
