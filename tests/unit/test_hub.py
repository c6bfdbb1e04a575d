"""Models of the Hugging Face Hub, here a server on this host: what is downloaded, and files that torch.save wrote."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from lib.commands import acsgd
from lib.saved import SMALL
from safetensors.torch import load_file

from acsgd.config.options import ModelConfig
from acsgd.shards.locate import open_model

TinyModel = Callable[..., Path]
REVISION = "0" * 40


def in_old_form(directory: Path, *, shards: int = 1, zipped: bool = True) -> None:
    """Replace the safetensors of a model by files of torch.save, with an index if there are several."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{shard:05d}-of-{shards:05d}.bin"
        part = {key: x for number, (key, x) in enumerate(tensors.items()) if number % shards == shard}
        torch.save(part, directory / name, _use_new_zipfile_serialization=zipped)
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def layers(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("gpt2", **SMALL), tmp_path / "model"))


@pytest.mark.parametrize(("shards", "zipped"), [(1, True), (3, True), (1, False)])
def test_files_of_torch_save_become_the_same_shards(shards: int, zipped: bool, model: Path, tmp_path: Path) -> None:
    assert acsgd("convert", "from-hf", model, tmp_path / "new") == (0, "")
    in_old_form(model, shards=shards, zipped=zipped)
    assert acsgd("convert", "from-hf", model, tmp_path / "old") == (0, "")
    assert layers(tmp_path / "old") == layers(tmp_path / "new") != {}


class Code:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_of_torch_save_is_never_executed(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    executed, path = tmp_path / "executed", model / "pytorch_model.bin"
    for content in ({**tensors, "x": Code(executed)}, Code(executed)):
        torch.save(content, path)
        code, printed = acsgd("convert", "from-hf", model, tmp_path / "target")
        assert (code, printed.count("\n")) == (2, 1)
        assert printed.startswith(f"error: {path} holds ")
    torch.save({**tensors, "x": Code(executed)}, path, _use_new_zipfile_serialization=False)
    assert acsgd("convert", "from-hf", model, tmp_path / "target")[0] == 2
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_a_truncated_file_of_torch_save_is_refused(model: Path, tmp_path: Path) -> None:
    in_old_form(model)
    path = model / "pytorch_model.bin"
    content = path.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        code, printed = acsgd("convert", "from-hf", model, tmp_path / "target")
        assert (code, printed.count("\n")) == (2, 1)
        assert printed.startswith(f"error: {path} is not a complete file")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_flipped_bit_in_a_file_of_torch_save_is_found(shards: int, model: Path, tmp_path: Path) -> None:
    in_old_form(model, shards=shards)
    path = max(model.glob("*.bin"))
    tensor = max(torch.load(path, weights_only=True).values(), key=torch.Tensor.numel)
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(content)
    code, printed = acsgd("convert", "from-hf", model, tmp_path / "target")
    assert (code, printed.count("\n")) == (2, 1)
    assert printed.startswith(f"error: {path} is corrupt: the checksum of ")
    assert os.listdir(tmp_path) == ["model"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """Serve a directory as the repository owner/name; return it with the names of the files that were sent."""
    repository, sent = tmp_path / "repository", list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            if self.path.startswith("/api/models/owner/name"):
                names = sorted(os.listdir(repository))
                tree = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
                info = {"id": "owner/name", "sha": REVISION, "siblings": [{"rfilename": name} for name in names]}
                content = json.dumps(tree if "/tree/" in self.path else info).encode()
            elif self.path.startswith(f"/owner/name/resolve/{REVISION}/"):
                content = (repository / self.path.rpartition("/")[2]).read_bytes()
                sent.extend([self.path.rpartition("/")[2]] if body else [])
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield repository, sent
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_safetensors_are_downloaded_if_there_are_any(
    has_safetensors: bool, hub: tuple[Path, list[str]], model: Path, tmp_path: Path
) -> None:
    repository, sent = hub
    shutil.copytree(model, repository)
    in_old_form(repository)
    if has_safetensors:
        shutil.copy(model / "model.safetensors", repository)
    for name in ("training_args.bin", "consolidated.safetensors"):
        (repository / name).write_bytes(b"")
    code, printed = acsgd("convert", "from-hf", "owner/name", tmp_path / "target")
    assert code == 0, printed
    weights = [name for name in sent if name.endswith((".safetensors", ".bin"))]
    assert weights == ["model.safetensors" if has_safetensors else "pytorch_model.bin"]
    assert acsgd("convert", "from-hf", model, tmp_path / "again") == (0, "")
    assert layers(tmp_path / "target") == layers(tmp_path / "again")
    assert open_model(ModelConfig("owner/name"))[0].name == REVISION, "found in the cache"
