"""Uploads of checkpoints: complete or absent at the target, continued where they were cut, and read again by a run."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from lib.commands import acsgd
from lib.models import NO_LAYERS
from lib.saved import SMALL, small_run, train_alone
from lib.stores import STORES, accept, open_store

from acsgd.comm.waits import DIRECT
from acsgd.errors import AfterLastStepError, WaitInterruptedError
from acsgd.io.checkpoint import upload
from acsgd.io.checkpoint.copies import SHARED, Disks
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.upload import Uploader, UploadingRun
from acsgd.io.files import remote as remote_files
from acsgd.io.files.checksum import file_checksum
from acsgd.io.files.remote import CHUNK_BYTES, RemoteDirectory, check_address, explain_remote, fetch_directory
from acsgd.run.plan.job import with_local_checkpoint
from acsgd.run.plan.limits import check_directories
from acsgd.run.step import upload as step_upload
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.hub import create_repository, find_model
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile

LIMIT_S = 30.0
NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def _in_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep ids in a directory of each test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory in which local copies are kept."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(params=["file", *STORES])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with open_store(request.param) if request.param != "file" else nullcontext(f"file://{tmp_path}/target dir") as name:
        yield name


def checkpoint(directory: Path, step: int, *, size: int = 1000, hosts: dict[str, list[str]] | None = None) -> Path:
    path = CheckpointDirectory(directory).of(step)
    path.mkdir(parents=True)
    files = []
    for name in NAMES:
        (path / name).write_bytes(f"{name}{step}".encode() * size)
        files.append(StoredFile(name, (path / name).stat().st_size, file_checksum(path / name)))
    Manifest(
        step=step, task="lm", model=NO_LAYERS, layers={}, replicas={}, model_files=files, run=None, hosts=hosts or {}
    ).write(path)
    return path


class Uploads:
    """An uploader and what it notes."""

    def __init__(
        self,
        address: str,
        disks: Disks = SHARED,
        disk: int = 0,
        rate: float | None = None,
        run: str = "runs/one",
        id_: str = "1",
        resumed: Path | None = None,
    ) -> None:
        self.notes: list[str] = []
        own = UploadingRun(run, id_, Path("upload-id").absolute(), resumed)
        self.uploader = Uploader(address, disks, disk, run=own, bytes_per_s=rate, note=self.notes.append)

    def send(self, *paths: Path) -> list[str]:
        with self.uploader:
            for path in paths:
                self.uploader.submit(path)
                assert self.uploader.wait(LIMIT_S)
        return self.notes


def content(address: str, name: str) -> dict[str, bytes]:
    remote = RemoteDirectory.open(address).of(name)
    return {each: remote.read(each) for each in remote.list()}


def test_an_upload_is_the_checkpoint(address: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 7)
    (note,) = Uploads(address).send(path)
    assert note.startswith(f"uploaded step-00000007 to {address}/step-00000007, 0.0 MB")
    assert content(address, path.name) == {each.name: each.read_bytes() for each in path.iterdir()}
    assert Uploads(address).send(path) == [], "it is complete already"


def test_an_upload_that_was_cut_continues(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a file: what is there without being listed is sent again, what is listed is not."""
    path, sent = checkpoint(tmp_path / "checkpoints", 7, size=CHUNK_BYTES), list[str]()
    send = RemoteDirectory.send

    def cut(self: RemoteDirectory, source: Path, paced: Callable[[int], None]) -> tuple[int, str]:
        sent.append(source.name)
        if source.name == "b" and sent.count("b") == 1:
            calls = iter(range(1))
            return send(self, source, lambda size: next(calls) and None)  # StopIteration in the second chunk
        return send(self, source, paced)

    monkeypatch.setattr(RemoteDirectory, "send", cut)
    first, second = Uploads(address).send(path, path)
    assert "step-00000007 could not be uploaded" in first
    assert "the next save, or the same command, tries again" in first
    assert second.startswith("uploaded step-00000007")
    assert sent == ["a", "b", "b", "c"]
    assert content(address, path.name) == {each.name: each.read_bytes() for each in path.iterdir()}


def test_an_address_belongs_to_one_run(address: str, tmp_path: Path) -> None:
    """Another one would replace files of complete checkpoints of the same steps."""
    ours, theirs = checkpoint(tmp_path / "ours", 7), checkpoint(tmp_path / "theirs", 7, size=10)
    Uploads(address).send(ours)
    (note,) = Uploads(address, run="runs/two").send(theirs)
    assert f"not be uploaded to {address}: it holds checkpoints of the run with log.dir=runs/one, not runs/two" in note
    assert content(address, ours.name) == {each.name: each.read_bytes() for each in ours.iterdir()}


def test_of_two_runs_with_one_name_only_one_uploads(address: str, tmp_path: Path) -> None:
    """One that resumes from a checkpoint at the address continues the run, also if the former one comes back."""
    paths = [checkpoint(tmp_path / "checkpoints", step) for step in (7, 8, 9)]
    former, other, later = Uploads(address), Uploads(address, id_="2"), Uploads(address, id_="3", resumed=paths[0])
    assert former.send(paths[0])[0].startswith("uploaded")
    (refused,) = other.send(paths[1])
    advice = f"to continue that one, give checkpoint.resume={address}, else give each run an address of its own"
    assert f"{address}: it holds checkpoints of another run with log.dir=runs/one; {advice}" in refused
    assert later.send(paths[1])[0].startswith("uploaded")
    again = Uploads(address, resumed=paths[0])
    assert again.send(paths[2])[0].startswith("uploaded")
    (taken,) = Uploads(address, id_="3").send(paths[2])
    assert "another run with log.dir=runs/one" in taken


def test_a_run_that_loses_the_address_while_it_trains_does_not_take_it_back(address: str, tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path / "checkpoints", step) for step in (7, 8, 9)]
    uploads = Uploads(address, resumed=paths[0])
    with uploads.uploader:
        for path, id_ in zip(paths, ("1", "2"), strict=False):
            RemoteDirectory.open(address).write(upload.OWNER, f"runs/one\n{id_}".encode())
            uploads.uploader.submit(path)
            assert uploads.uploader.wait(LIMIT_S)
    assert [note.startswith("uploaded") for note in uploads.notes] == [True, False]


@pytest.mark.parametrize(
    ("here", "resumes", "elsewhere", "expected"),
    [("a", True, "", "a"), ("", True, "b", "b"), ("", True, "", "new"), ("a", False, "", "new")],
)
def test_a_run_that_resumes_has_the_id_that_any_of_its_disks_keeps(
    here: str, resumes: bool, elsewhere: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / step_upload.ID).write_text(here)
    groups = SimpleNamespace(run_id="new", all_gather_text=lambda name, mine, *, timeout_s: [mine, elsewhere])
    config = SimpleNamespace(log=SimpleNamespace(dir="runs/one"))
    job = SimpleNamespace(paths=SimpleNamespace(run=tmp_path), config=config, disk_timeout_s=1.0)
    session: Any = SimpleNamespace(job=job, groups=groups)
    assert step_upload._uploading_run(session, tmp_path if resumes else None).id == expected


@pytest.mark.soak
def test_a_run_keeps_its_id_and_another_one_of_its_name_gets_another(
    tiny_model: Callable[..., Path], tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Resumed on its disk; from the address without its disk; begun anew."""
    address = f"file://{tmp_path}/target"
    config = small_run(tiny_model("gpt2", **SMALL), tmp_path / "run", upload=address)
    config = replace(config, log=replace(config.log, to="print"))

    def trained(steps: int, resume: str) -> bool:
        """Return whether the run has the address."""
        options = replace(config.checkpoint, resume=resume)
        run = replace(config, optim=replace(config.optim, steps=steps), checkpoint=options)
        with contextlib.suppress(AfterLastStepError):  # of a run without the address
            train_alone(with_local_checkpoint(run))
        (owner,) = RemoteDirectory.open(address).read(upload.OWNER).splitlines()[1:]
        is_owner = owner.decode() == (tmp_path / "run/upload-id").read_text()
        assert is_owner == ("another run with log.dir=" not in "".join(capfd.readouterr()))
        return is_owner

    assert trained(2, "auto")
    assert trained(3, "auto")
    shutil.rmtree(tmp_path / "run")
    assert trained(4, address)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/upload-id").write_text("of a run that is gone")
    assert not trained(2, "auto")


def test_a_cut_names_its_error_and_leaves_no_file(address: str, tmp_path: Path) -> None:
    path, remote = checkpoint(tmp_path / "checkpoints", 7), RemoteDirectory.open(address)

    def full(size: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        remote.send(path / "a", full)
    assert not remote.list()


def test_files_are_replaced_without_the_former_manifest(address: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Of another run's checkpoint of the same step."""
    Uploads(address).send(checkpoint(tmp_path / "former", 7, size=10))
    path, send = checkpoint(tmp_path / "checkpoints", 7), RemoteDirectory.send

    def without_manifest(self: RemoteDirectory, source: Path, paced: Callable[[int], None]) -> tuple[int, str]:
        assert MANIFEST not in self.list()
        return send(self, source, paced)

    monkeypatch.setattr(RemoteDirectory, "send", without_manifest)
    (note,) = Uploads(address).send(path)
    assert note.startswith("uploaded")


def test_a_file_that_is_cut_at_the_target_is_sent_again(address: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 7)
    (path / "c").rename(tmp_path / "c")
    uploads = Uploads(address)
    uploads.send(path)
    assert uploads.uploader.failed == path
    (tmp_path / "c").rename(path / "c")
    RemoteDirectory.open(address).of(path.name).write("a", b"cut")
    Uploads(address).send(path)
    assert content(address, path.name) == {each.name: each.read_bytes() for each in path.iterdir()}


def test_no_manifest_is_there_before_all_files_are(address: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = checkpoint(tmp_path / "checkpoints", 7)
    (path / "c").write_bytes(b"damaged since")
    (note,) = Uploads(address).send(path)
    assert "c is not there as its manifest says" in note
    assert MANIFEST not in content(address, path.name)


def test_a_failure_is_one_sentence_and_the_next_checkpoint_is_sent(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [checkpoint(tmp_path / "checkpoints", step) for step in (1, 2)]
    write, fails = RemoteDirectory.write, iter([True, False])

    def full(self: RemoteDirectory, name: str, raw: bytes) -> None:
        if name == MANIFEST and next(fails):
            raise OSError(28, "No space left on device")
        write(self, name, raw)

    monkeypatch.setattr(RemoteDirectory, "write", full)
    first, second = Uploads(address).send(*paths)
    assert "No space left on device" in first
    assert second.startswith("uploaded step-00000002")
    assert not content(address, paths[0].name), "the next one has its room"


def test_a_checkpoint_that_is_sent_is_not_removed(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    paths = [checkpoint(directory.path, step) for step in (1, 2, 3)]
    directory.prune(3, keep=1, keep_every=None, is_used=paths[1].__eq__)
    assert directory.steps() == [2, 3]


def test_a_checkpoint_that_was_removed_is_passed_over(address: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 1)
    shutil.rmtree(path)
    assert Uploads(address).send(path) == ["step-00000001 was removed before it was uploaded"]


def test_the_rate_is_bounded(address: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 1, size=50_000)  # 3 files of 100 kB
    started = time.monotonic()
    Uploads(address, rate=1e6).send(path)
    assert time.monotonic() - started >= 0.2, "after the first file, those before it have to be paid for"


def test_an_end_does_not_wait_for_the_rest_of_an_upload(address: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 1)
    uploads = Uploads(address, rate=1.0)
    with uploads.uploader:
        uploads.uploader.submit(path)
        assert not uploads.uploader.wait(0.05)
        assert uploads.uploader.is_reading(path)
    assert uploads.notes == []


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("signal", "the last checkpoint is not uploaded: ended by SIGINT; the run is complete here"),
        ("stall", "the last checkpoint is not uploaded: nothing was sent for 0.01 s; the run is complete here"),
        ("failure", "the last checkpoint is not uploaded: its upload failed; the run is complete here"),
        ("stopped", ""),
        ("another run's", ""),
    ],
)
def test_the_end_of_a_run_waits_for_the_last_upload(
    case: str, expected: str, address: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Until a signal, or while bytes are sent, also where nothing interrupts a wait; never for another run's.

    The run fails if it was not stopped and its last checkpoint is not there.
    """
    monkeypatch.setattr(step_upload, "POLL_S", 0.01)
    monkeypatch.setattr(step_upload, "STALL_S", 0.01 if case == "stall" else LIMIT_S)
    own = tmp_path / "checkpoints"
    path = checkpoint(tmp_path / "other" if case == "another run's" else own, 7)
    if case == "failure":
        (path / "c").unlink()
    paths = SimpleNamespace(checkpoints=CheckpointDirectory(own))
    known = list[str]()

    def wait_for_all(*_: object, timeout_s: float) -> None:
        known.append("all")
        raise WaitInterruptedError("the first rank has ended the run")

    texts = list[str]()
    """Of this rank, which uploads, and then as another rank gathers them."""

    def all_gather_text(_: str, text: str, **__: object) -> list[str]:
        texts.append(text)
        return [*texts]

    groups = SimpleNamespace(waits=DIRECT, all_gather_text=all_gather_text, timeout_s=1.0)
    groups.wait_for_all = wait_for_all
    session: Any = SimpleNamespace(job=SimpleNamespace(paths=paths), groups=groups)
    newest: Any = SimpleNamespace(newest=path)
    signals: Any = SimpleNamespace(received="SIGINT" if case == "signal" else None)
    state: Any = SimpleNamespace(is_stopped=case == "stopped", ended_because=None)
    notes: list[str] = []
    uploader = Uploads(address, rate=None if case == "failure" else 1.0).uploader
    with uploader:
        hook = step_upload.Upload(session, uploader, newest, signals, notes.append)
        hook.before_step(state)
        if case == "failure":
            assert uploader.wait(LIMIT_S)
        with pytest.raises(AfterLastStepError, match=expected) if expected else contextlib.nullcontext():
            hook.at_end(state)
        assert bool(known) == bool(expected), "no rank ends before all know why"
        other = step_upload.Upload(session, None, newest, signals, notes.append)
        with pytest.raises(AfterLastStepError, match=expected) if expected else contextlib.nullcontext():
            other.at_end(state)
    assert any("waiting for the last upload" in note for note in notes) == (case in ("signal", "stall"))
    assert any("the run was stopped; the next start continues it" in note for note in notes) == (case == "stopped")


def test_each_host_sends_what_was_written_there(address: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The first host writes the manifest, once the others have sent their files."""
    monkeypatch.setattr(upload, "POLL_S", 0.01)
    hosts = {"a": ["one", "two"], "b": ["two", "one"], "c": ["one", "two"]}
    disks = Disks(((0,), (1,)), ("one", "two"))
    paths = [checkpoint(tmp_path / host, 1, hosts=hosts) for host in disks.names]
    (paths[0] / "b").unlink()
    (paths[1] / "a").unlink()
    first, second = Uploads(address, disks, 0), Uploads(address, disks, 1)
    thread = threading.Thread(target=first.send, args=[paths[0]])
    thread.start()
    assert second.send(paths[1]) == []
    thread.join(LIMIT_S)
    assert first.notes[0].startswith("uploaded")
    assert {*content(address, "step-00000001")} == {*NAMES, MANIFEST}


def test_a_host_that_sends_nothing_is_named(address: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(upload, "POLL_S", 0.01)
    monkeypatch.setattr(upload, "OTHERS_S", 0.05)
    hosts = {name: ["two" if name == "b" else "one"] for name in NAMES}
    path = checkpoint(tmp_path / "one", 1, hosts=hosts)
    (note,) = Uploads(address, Disks(((0,), (1,)), ("one", "two"))).send(path)
    assert "1 files of two have not come, b first" in note


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sftp://me:secret@host/run", "holds a password"),
        ("s3://key:secret@bucket/run", "holds a password"),
        ("bucket/run", "must be an address"),
        ("s3://", "must be an address"),
        ("nosuch://a/b", "a protocol that fsspec does not know"),
    ],
)
def test_an_address_that_cannot_be_is_refused_before_the_run(text: str, expected: str, tmp_path: Path) -> None:
    config = small_run(tmp_path, tmp_path / "run", upload=text)
    with pytest.raises(ValueError) as caught:
        check_directories(config, 0)
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("install s3fs")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(ValueError, match="needs s3fs, which is not installed; pip install s3fs"):
        check_address("s3://bucket/run", "checkpoint.upload")


def test_no_message_holds_the_signature_of_an_address() -> None:
    error = OSError("403 for https://host/key?X-Amz-Credential=AKIA&X-Amz-Signature=abc\nand more")
    assert explain_remote(error) == "403 for https://host/key and more"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            RepositoryNotFoundError,
            "not on the Hugging Face Hub, or private; check the name, and if it is private type hf",
        ),
        (GatedRepoError, "gated on the Hugging Face Hub; ask for access on its page there, and type hf auth login"),
        (HfHubHTTPError, "closed without a valid login to the Hugging Face Hub; type hf auth login"),
    ],
)
def test_a_repository_that_the_hub_does_not_show_is_named_with_what_to_type(
    kind: type[HfHubHTTPError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model by its id or address, as the target of an upload or a push; else it is 5 lines of the Hub's own."""
    response: Any = SimpleNamespace(status_code=401, headers={}, request=None)

    def refuse(*_: object, **__: object) -> None:
        raise kind("401 Client Error. (Request ID: 1)\n\nRepository Not Found for url: ...", response=response)

    def list_nothing(*_: object, **__: object) -> None:
        try:
            refuse()
        except HfHubHTTPError as error:  # as HfFileSystem does
            raise FileNotFoundError("nobody/nothing (repository not found)") from error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    monkeypatch.setattr("huggingface_hub.HfFileSystem.ls", list_nothing)
    for refused in (
        lambda: find_model("nobody/nothing", option="model.name", config_only=True),
        lambda: find_model("hf://nobody/nothing", option="model.name"),
        lambda: create_repository("hf://nobody/nothing"),
    ):
        with pytest.raises(ValueError) as error:
            refused()
        assert says in str(error.value)
        assert len(str(error.value)) < 200
    with pytest.raises(FileNotFoundError) as absent:
        RemoteDirectory.open("hf://nobody/nothing").list()
    assert says in explain_remote(absent.value)


@pytest.mark.parametrize("address", ["file", *STORES[1:]], indirect=True)
def test_a_run_uploads_and_continues_from_there_without_its_disk(
    address: str, tiny_model: Callable[..., Path], tmp_path: Path, home: Path
) -> None:
    """Also a model for another run; a newer checkpoint on the disk counts more than an older one there."""
    config = small_run(tiny_model(n_layer=1), tmp_path / "run", upload=address, resume=address)
    assert with_local_checkpoint(config).checkpoint.resume == "auto", "nothing is there yet"
    train_alone(with_local_checkpoint(config))
    saved = CheckpointDirectory(tmp_path / "run/checkpoints")
    newest = saved.of(saved.steps()[-1])
    assert content(address, newest.name) == {each.name: each.read_bytes() for each in newest.iterdir()}
    owner = RemoteDirectory.open(address).read(upload.OWNER).decode().splitlines()
    assert owner == [str(tmp_path / "run"), (tmp_path / "run/upload-id").read_text()]
    assert with_local_checkpoint(config).checkpoint.resume == "auto", "it is here, too"
    shutil.rmtree(tmp_path / "run")
    resumed = Path(with_local_checkpoint(config).checkpoint.resume)
    assert resumed.is_relative_to(home)
    assert not list(ShardDirectory(resumed).corrupt_files())
    assert ShardDirectory(resumed).step == 2
    model = find_model(address, option="model.name")
    assert model == resumed
    with pytest.raises(ValueError, match=r"model.name=.* cannot be read: it has no config.json"):
        find_model(f"{address}/home", option="model.name")


def files_in(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


@pytest.mark.soak
@pytest.mark.parametrize("address", STORES[1:], indirect=True)
@pytest.mark.parametrize("stream", ["", "stream:"])
def test_a_run_has_nothing_but_addresses(
    address: str, stream: str, tiny_model: Callable[..., Path], tmp_path: Path, home: Path
) -> None:
    """Model, data, uploads and generated text; it loses its disk and ends as the run that has all of it on a disk."""
    local = tmp_path / "local"
    local.mkdir()
    (local / "data.jsonl").write_text("".join(json.dumps({"text": f"The {n}th line. " * 3}) + "\n" for n in range(50)))
    model = tiny_model(n_layer=1)
    for directory, files in (("model", model.iterdir()), ("data", [local / "data.jsonl"])):
        for file in files:
            RemoteDirectory.open(address).of(directory).send(file, lambda size: None)

    def trained(place: str, data: str, name: str, steps: int, **checkpoint: Any) -> Path:
        config = small_run(Path("m"), tmp_path / name, steps=steps, **checkpoint)
        sources = replace(config.data, sources=f"{stream}{data}/data.jsonl", eval_fraction=0.0)
        schedule = replace(config.optim, schedule="constant")
        config = replace(config, model=replace(config.model, name=place), data=sources, optim=schedule)
        return CheckpointDirectory(train_alone(with_local_checkpoint(config))).of(steps)

    expected = trained(str(model), str(local), "undisturbed", 4)
    options = {"upload": f"{address}/run", "resume": f"{address}/run"}
    trained(f"{address}/model", f"{address}/data", "run", 2, **options)
    shutil.rmtree(tmp_path / "run")
    ended = trained(f"{address}/model", f"{address}/data", "run", 4, **options)
    assert CheckpointDirectory(ended.parent).steps() == [3, 4]
    assert Manifest.read(ended).layers == Manifest.read(expected).layers
    assert content(f"{address}/run", ended.name) == files_in(ended)
    for place, prompts, out in ((expected, local, "one"), (f"{address}/run", f"{address}/data", "other")):
        options = ["--file", f"{prompts}/data.jsonl", "--max-new-tokens", "2", "--out", tmp_path / out]
        assert acsgd("generate", place, *options)[0] == 0
    assert (tmp_path / "one").read_text() == (tmp_path / "other").read_text() != ""


@pytest.mark.soak
def test_training_continues_after_credentials_end_and_the_next_start_continues_the_upload(
    s3: Any, tiny_model: Callable[..., Path], tmp_path: Path, home: Path, monkeypatch: Any, capfd: Any
) -> None:
    """The server answers 403 from the second file on, for as long as it examines the credentials."""
    send, sent = RemoteDirectory.send, list[str]()

    def until_they_end(self: RemoteDirectory, source: Path, paced: Callable[[int], None]) -> tuple[int, str]:
        sent.append(source.name)
        if len(sent) == 2:
            accept(s3, 0)
        return send(self, source, paced)

    monkeypatch.setattr(RemoteDirectory, "send", until_they_end)
    target = "s3://bucket/run"
    config = small_run(tiny_model(n_layer=1), tmp_path / "run", every=None, upload=target, resume=target)
    config = replace(config, log=replace(config.log, to="print", trace="1:2"))
    missing = "the last checkpoint is not uploaded: its upload failed; the run is complete"
    with pytest.raises(AfterLastStepError, match=missing):
        train_alone(with_local_checkpoint(config))
    assert (tmp_path / "run/trace-1-2.json").exists(), "what else ends with the run has ended"
    out, err = capfd.readouterr()
    (failure,) = (line for line in (out + err).splitlines() if "could not be uploaded" in line)
    assert f"step-00000002 could not be uploaded to {target}: " in failure
    assert "AWS Access Key Id you provided does not exist" in failure
    with pytest.raises(ValueError, match=r"checkpoint.resume=.* cannot be read: .*check the address and its cred"):
        with_local_checkpoint(config)
    accept(s3, math.inf)
    train_alone(with_local_checkpoint(config))
    first, failed, *again = sent
    assert failed == again[0]
    assert first not in again, "it is there"
    saved = CheckpointDirectory(tmp_path / "run/checkpoints").of(2)
    assert content(target, saved.name) == {each.name: each.read_bytes() for each in saved.iterdir()}
    assert not list(ShardDirectory(find_model(target, option="model.name")).corrupt_files())


@pytest.mark.soak
def test_uploads_to_s3(s3: Any, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts; cut; to a bucket that is not there; with a server that is gone; read by a run."""
    monkeypatch.setattr(remote_files, "PART_BYTES", 5 << 20)  # the least that S3 takes
    path, address = checkpoint(tmp_path / "checkpoints", 7, size=6 << 20), "s3://bucket/my run"
    (missing,) = Uploads("s3://nosuchbucket/run").send(path)
    assert "could not be uploaded to s3://nosuchbucket/run" in missing
    send, cuts = RemoteDirectory.send, iter([True, False, False])

    def cut(self: RemoteDirectory, source: Path, paced: Callable[[int], None]) -> tuple[int, str]:
        sizes = iter(range(7 if source.name == "b" and next(cuts) else 10**6))
        return send(self, source, lambda size: next(sizes) and None)

    monkeypatch.setattr(RemoteDirectory, "send", cut)
    first, second = Uploads(address).send(path, path)
    assert "could not be uploaded" in first
    assert second.startswith("uploaded")
    assert content(address, path.name) == {each.name: each.read_bytes() for each in path.iterdir()}
    copy = fetch_directory(RemoteDirectory.open(f"{address}/{path.name}"), home, ["*"], note=print)
    assert {each.name: each.read_bytes() for each in copy.iterdir()} == content(address, path.name)
    s3.stop()
    (gone,) = Uploads(address).send(path)
    assert "could not be uploaded" in gone
    assert "hush" not in missing + first + gone
