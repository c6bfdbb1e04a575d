"""What a host gets from members is a whole, verified checkpoint, or nothing; strangers get nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from lib import commands, daemons
from lib.saved import SMALL, small_run, train_alone

from acsgd.comm.waits import InterruptibleWaits
from acsgd.commands import members
from acsgd.commands.doctor.command import DoctorCommand
from acsgd.commands.invitation import VERSION, Invitation
from acsgd.config.options import Config, DataConfig, ModelConfig, OptimConfig
from acsgd.elastic.host import files, model_files
from acsgd.elastic.host.files import DATA, TIMEOUT_S, FileRequest, Listing, LocalFiles, PartCodes, RemoteFiles
from acsgd.elastic.host.model_files import ModelFiles
from acsgd.elastic.membership.messages import SharedFiles
from acsgd.errors import CorruptFileError, RefusedError, RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.inspect import inspect
from acsgd.io.files.checksum import file_checksum
from acsgd.shards.convert import from_hf
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.files import tensor_headers
from acsgd.shards.locate import open_shards
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile
from acsgd.shards.writer import open_weights
from tests.lib.ports import free_addresses

TinyModel = Callable[..., Path]
STEP = "step-00000002"


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints of which each of two hosts holds a part."""
    path = train_alone(small_run(tiny_model("gpt2", **SMALL), tmp_path_factory.mktemp("run") / "run", best="eval_loss"))
    for step in ("step-00000001", STEP):
        manifest = Manifest.read(path / step)
        hosts = {file.file: [f"host{number % 2}"] for number, file in enumerate(manifest.files)}
        dataclasses.replace(manifest, hosts=hosts).write(path / step)
    return path


@pytest.fixture
def parts(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of checkpoints of the two hosts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for number in range(2):
        shutil.copytree(whole, tmp_path / f"host{number}/run/checkpoints", symlinks=True)
        for step in (tmp_path / f"host{number}/run/checkpoints").glob("step-*"):
            for file, hosts in Manifest.read(step).hosts.items():
                if hosts != [f"host{number}"]:
                    (step / file).unlink()
    return [tmp_path / f"host{number}/run/checkpoints" for number in range(2)]


@pytest.fixture
def invitation(parts: list[Path], tmp_path: Path) -> Iterator[Path]:
    """A file with the invitation of a run with these hosts, which are running; it names only the first one."""
    addresses = free_addresses(2)
    with contextlib.ExitStack() as stack:
        workers = []
        for number, part in enumerate(parts):
            path = stack.enter_context(daemons.host(addresses, number, tmp_path, min_hosts=2, secret="secret"))
            workers.append(daemons.Worker(path, part.parent, files=SharedFiles(str(part))))
        for worker in workers:
            worker.next_view(2)
        options = f'[log]\ndir = "{tmp_path / "member/run"}"\n'
        text = Invitation("run", "secret", tuple(addresses[:1]), "1:8", "false", options, VERSION).encode()
        (tmp_path / "invitation").write_text(text)
        yield tmp_path / "invitation"


def assert_files(path: Path, whole: Path) -> None:
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }


def assert_equal(path: Path, whole: Path) -> None:
    assert_files(path, whole)
    [report] = inspect(path)
    assert not report.errors
    assert not report.elsewhere


def test_a_checkpoint_is_collected_from_all_running_hosts(invitation: Path, whole: Path, tmp_path: Path) -> None:
    assert commands.acsgd("fetch", invitation) == (0, "")
    target = tmp_path / "member/run/checkpoints" / STEP
    assert_equal(target, whole / STEP)
    assert [path.name for path in target.parent.iterdir()] == [STEP]
    best = (whole / "best").resolve().name
    assert commands.acsgd("fetch", invitation, "--best", "--to", tmp_path / "best") == (0, "")
    assert_equal(tmp_path / "best", whole / best)


def test_doctor_looks_for_the_run_of_an_invitation(
    invitation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(file: Path) -> dict[str, str]:
        with contextlib.suppress(SystemExit):
            DoctorCommand(file, json=True).run()
        return next(each for each in json.loads(capsys.readouterr().out)["diagnoses"] if each["subject"] == "run run")

    assert found(invitation)["level"] == "ok"
    assert len(re.findall(r"127\.0\.0\.1:\d+", found(invitation)["text"])) == 2, "the invitation names one host alone"
    other = dataclasses.replace(Invitation.open(str(invitation)), endpoints=("127.0.0.1:1",))
    (tmp_path / "other").write_text(other.encode())
    assert (other_found := found(tmp_path / "other"))["level"] == "error"
    assert "no host of run run answers (127.0.0.1:1: Connection refused)" in other_found["text"]
    with pytest.raises(ValueError, match="holds the secret of the run, and other users of this host see what is typed"):
        DoctorCommand(Path(other.encode())).run()


def test_weights_alone_are_the_model_of_the_checkpoint(invitation: Path, whole: Path, tmp_path: Path) -> None:
    """Also if the transfer is interrupted; from running hosts, and from directories."""
    assert "give it with --to" in commands.acsgd("fetch", invitation, "--weights")[1]
    assert commands.acsgd("fetch", invitation, "--weights", "--to", tmp_path / "weights") == (0, "")
    [report] = inspect(tmp_path / "weights")
    assert not report.errors
    shards, original = ShardDirectory(tmp_path / "weights"), ShardDirectory(whole / STEP)
    for layer in original.manifest.layers:
        taken, theirs = shards.read_layer(layer), original.read_layer(layer)
        assert taken.keys() == theirs.keys()
        assert all(torch.equal(taken[key], theirs[key]) for key in theirs)
        assert not shards.state(layer)
        assert original.state(layer)
    for source, target in ((whole / STEP, "a"), (tmp_path / "weights", "b")):
        assert commands.acsgd("convert", "to-hf", source, tmp_path / target)[0] == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.name != "README.md"}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir() if path.name in written}
    code, message = commands.acsgd("fetch", invitation, "--weights", "--to", tmp_path / "weights")
    assert (code, "exists and holds something else; it is kept" in message) == (2, True)


def test_the_file_of_weights_can_be_read_from_everywhere(whole: Path) -> None:
    path = whole / STEP / "block-00000.safetensors"
    with open_weights(path) as file:
        content = file.read()
        for start in range(0, len(content), 997):
            assert file.seek(start) == start
            assert file.read(1234) == content[start : start + 1234]
    assert safetensors.torch.load(content).keys() == {key for key in tensor_headers(path) if "/" not in key}


def test_a_host_completes_its_own_part_in_place(
    invitation: Path, parts: list[Path], whole: Path, tmp_path: Path
) -> None:
    """Its files stay, also where other hosts have the same; what it has is not sent."""
    before = {file: file.stat().st_ino for file in (parts[0] / STEP).iterdir()}
    message = commands.acsgd("convert", "to-hf", parts[0].parent, tmp_path / "hf")[1]
    assert f"not on this host: acsgd fetch {parts[0] / STEP}" in message
    assert "host1" in message
    assert "this host knows no invitation to the run" in commands.acsgd("fetch", parts[0] / STEP)[1]
    own = Invitation.decode(invitation.read_text())
    own = dataclasses.replace(own, options=f'[log]\ndir = "{parts[0].parent}"\n')
    (tmp_path / ".acsgd").mkdir(mode=0o700)
    (tmp_path / ".acsgd/run.invitation").write_text(own.encode())
    for _ in range(2):
        assert commands.acsgd("fetch", parts[0] / STEP) == (0, "")
        assert_equal(parts[0] / STEP, whole / STEP)
        assert {file: file.stat().st_ino for file in before} == before
    assert commands.acsgd("convert", "to-hf", parts[0] / STEP, tmp_path / "hf")[0] == 0


def test_running_hosts_decide_which_checkpoints_count(
    invitation: Path, parts: list[Path], whole: Path, tmp_path: Path
) -> None:
    """Not a directory that is left from steps that the run has given up."""
    run, last = tmp_path / "member/run/checkpoints", "step-00000003"
    shutil.copytree(whole, run, symlinks=True)
    manifest = Manifest.read(run / STEP)
    dataclasses.replace(manifest, hosts={}).write(run / STEP)
    shutil.copytree(run / STEP, run / last)
    dataclasses.replace(manifest, hosts={}, step=3).write(run / last)
    best = (whole / "best").resolve().name
    CheckpointDirectory(run).mark_best(1 if best == STEP else 2)
    code, printed = commands.acsgd("fetch", invitation, "--to", tmp_path / "newest")
    assert (code, f"{run} has another {STEP}, which is left out" in printed) == (0, True)
    assert_equal(tmp_path / "newest", whole / STEP)
    assert commands.acsgd("fetch", invitation, "--best", "--to", tmp_path / "best")[0] == 0
    assert_equal(tmp_path / "best", whole / best)
    code, printed = commands.acsgd("fetch", invitation, "--step", 3, "--to", tmp_path / "last")
    assert (code, f"no running host has {last}: the run may have given up its steps" in printed) == (0, True)
    for part in parts:
        (part / STEP / "head.safetensors").unlink(missing_ok=True)
    code, printed = commands.acsgd("fetch", invitation, "--step", 2, "--to", tmp_path / "theirs")
    assert (code, f"no checkpoint is complete: {STEP} lacks 1 files" in printed) == (2, True)


def test_hosts_that_have_ended_are_read_from_their_directories(parts: list[Path], whole: Path, tmp_path: Path) -> None:
    assert commands.acsgd("fetch", parts[0].parent, "--step", 1, "--from", parts[1].parent) == (0, "")
    assert_equal(parts[0] / "step-00000001", whole / "step-00000001")
    (parts[1] / STEP / "head.safetensors").unlink(missing_ok=True)
    (parts[0] / STEP / "head.safetensors").unlink(missing_ok=True)
    code, message = commands.acsgd("fetch", parts[0].parent, "--step", 2, "--from", parts[1], "--to", tmp_path / "to")
    assert code == 2
    assert f"{STEP} lacks 1 files, the first one is head.safetensors of host" in message
    assert commands.acsgd("fetch", parts[0].parent, "--from", parts[1], "--to", tmp_path / "to")[0] == 0
    assert_equal(tmp_path / "to", whole / "step-00000001")
    code, message = commands.acsgd("fetch", parts[0], "--from", parts[1], "--step", 7)
    assert code == 2
    assert "no host has step-00000007; checkpoints there: step-00000001, step-00000002" in message


def test_an_interrupted_fetch_continues_where_it_was(
    invitation: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, asked = RemoteFiles.read, list[tuple[str, int]]()

    def break_off(self: RemoteFiles, directory: str, file: str, offset: int) -> Iterator[bytes]:
        for part in read(self, directory, file, offset):
            yield part
            if file != MANIFEST:
                raise ConnectionResetError("reset")

    def note(self: RemoteFiles, directory: str, file: str, offset: int) -> Iterator[bytes]:
        asked.append((file, offset))
        return read(self, directory, file, offset)

    monkeypatch.setattr("acsgd.elastic.host.files.CHUNK_BYTES", 512)
    monkeypatch.setattr(RemoteFiles, "read", break_off)
    code, message = commands.acsgd("fetch", invitation, "--to", tmp_path / "to")
    assert code == 2
    assert "type the same command again" in message
    assert not (tmp_path / "to").exists()
    monkeypatch.setattr(RemoteFiles, "read", note)
    assert commands.acsgd("fetch", invitation, "--to", tmp_path / "to") == (0, "")
    assert_equal(tmp_path / "to", whole / STEP)
    assert 512 in [offset for _, offset in asked]


def test_another_directory_is_never_overwritten_and_room_is_checked_first(
    invitation: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole / "step-00000001", tmp_path / "to")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    for name in ("to", "other"):
        code, message = commands.acsgd("fetch", invitation, "--to", tmp_path / name)
        assert (code, "exists and holds something else; it is kept" in message) == (2, True)
    assert_equal(tmp_path / "to", whole / "step-00000001")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    code, message = commands.acsgd("fetch", invitation, "--to", tmp_path / "new")
    assert (code, "GB are to be received" in message) == (2, True)
    assert not (tmp_path / "new").exists()


def test_a_stranger_gets_no_file_and_a_member_none_but_those_of_the_run(invitation: Path, parts: list[Path]) -> None:
    address = Invitation.decode(invitation.read_text()).endpoints[0]
    for run, secret in (("run", b"other"), ("other", b"secret")):
        stranger = RemoteFiles(address, run, secret)
        with contextlib.closing(stranger), pytest.raises(ValueError, match="signature"):
            stranger.list()
    (parts[0].parent / "config.toml").write_text("private")
    (parts[0] / STEP / "private.txt").write_text("private")
    (parts[0] / STEP / "run.py").write_text("private")
    with contextlib.closing(RemoteFiles(address, "run", b"secret")) as member:
        for directory, file in (
            (STEP, "../../config.toml"),
            (STEP, "private.txt"),
            (STEP, "run.py"),
            ("..", "config.toml"),
            (f"../checkpoints/{STEP}", MANIFEST),
            ("model", MANIFEST),
            ("step-1", MANIFEST),
        ):
            with pytest.raises(ValueError, match=r"no file|file name|directory|taken"):
                b"".join(member.read(directory, file, 0))
        assert b"".join(member.read(STEP, MANIFEST, 0)) == (parts[0] / STEP / MANIFEST).read_bytes()


def test_an_answer_that_was_recorded_is_refused(invitation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = Invitation.decode(invitation.read_text()).endpoints[0]
    with contextlib.closing(RemoteFiles(address, "run", b"secret")) as member:
        monkeypatch.setattr("acsgd.elastic.host.files.seal", lambda *args: seal(*args[:-1], FileRequest("earlier")))
        from acsgd.elastic.membership.messages import seal

        with pytest.raises(ValueError, match="something else than an answer"):
            member.list()


def test_files_of_data_are_read_once_for_all_hosts_that_join_unless_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Path]()
    monkeypatch.setattr(files, "file_checksum", lambda path: read.append(path) or file_checksum(path))
    (tmp_path / "a.txt").write_text("one")
    source = LocalFiles(SharedFiles(data=(str(tmp_path / "a.txt"),)))
    before = [source.held(DATA) for _ in range(3)]
    assert len(read) == 1
    (tmp_path / "a.txt").write_text("another")
    assert source.held(DATA) not in before
    assert len(read) == 2


@pytest.mark.parametrize("read", [1, 2], ids=["part", "code"])
@pytest.mark.parametrize("file", ["", MANIFEST, "config.json"])
def test_bytes_that_were_changed_on_the_way_are_refused_whatever_their_checksum(
    file: str, read: int, invitation: Path
) -> None:
    """Without a mesh, by somebody who can choose them and their checksums, but has not the secret of the run."""
    address = Invitation.decode(invitation.read_text()).endpoints[0]
    with contextlib.closing(RemoteFiles(address, "run", b"secret", connect_s=3.0)) as member:
        assert member._connection.gettimeout() == TIMEOUT_S, "once it has greeted"
        content, reads = member._file, itertools.count(1)

        def changed(size: int) -> bytes:
            part = content.read(size)
            return part[:-1] + bytes([part[-1] ^ 1]) if next(reads) == read else part

        member._file = SimpleNamespace(readline=content.readline, read=changed, close=content.close)  # type: ignore[assignment]
        with pytest.raises(ValueError, match="is not what a member of the run has sent"):
            b"".join(member._request(FileRequest("nonce", STEP if file else "", file)))


def test_parts_have_codes_of_their_order_and_of_their_answer() -> None:
    first, second = PartCodes(b"secret", "a"), PartCodes(b"secret", "a")
    assert (first.next(b"x"), first.next(b"y")) != (second.next(b"y"), second.next(b"x"))
    assert PartCodes(b"secret", "a").next(b"x") != PartCodes(b"secret", "b").next(b"x")
    assert PartCodes(b"secret", "a").next(b"x") != PartCodes(b"other", "a").next(b"x")


def test_each_host_is_tried_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tried = list[str]()

    def connect(address: str, *_: object) -> SimpleNamespace:
        tried.append(address)
        if address == "dead":
            raise ConnectionRefusedError("refused")
        return SimpleNamespace(close=lambda: None, list=lambda: Listing(hosts=("a", "b", "c", "dead")))

    monkeypatch.setattr(members, "_connect", connect)
    invitation = Invitation("run", "secret", ("a", "b"), "1:8", "false", "", VERSION)
    with members.open_members(invitation) as found:
        assert (len(found), tried) == (3, ["a", "b", "c", "dead"])
    assert capsys.readouterr().err.count("dead") == 1


def test_an_endpoint_of_another_mesh_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mesh:
        def __init__(self, *_: object, on_rejected: Callable[[str, str], None], **__: object) -> None:
            self.start = lambda: on_rejected("a:1", "is of another mesh")
            self.stop = lambda: None
            self._polls = iter(range(9))

        @property
        def daemons(self) -> list[str]:
            return ["v:1"] if next(self._polls) > 2 else []

    monkeypatch.setattr(members, "Mesh", Mesh)
    monkeypatch.setattr(members, "RETRY_S", 0.0)
    invitation = Invitation("run", "secret", ("a:1", "b:1"), "1:8", "true", "", VERSION)
    with contextlib.ExitStack() as stack:
        assert members._enter_mesh(stack, invitation, b"secret") == ["v:1"]
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match="a:1 is of another mesh"):
        members._enter_mesh(stack, dataclasses.replace(invitation, endpoints=("a:1",)), b"secret")


@pytest.mark.parametrize("name", ["model.py", "weights.bin", "optimizer.pt", "a.pkl", "tokenizer.so"])
def test_nothing_that_could_be_executed_is_taken_from_a_peer(name: str, parts: list[Path], tmp_path: Path) -> None:
    """Not even if its manifest lists it."""
    step = parts[1] / STEP
    (step / name).write_text("import os")
    manifest = Manifest.read(step)
    file = StoredFile(name, 9, file_checksum(step / name))
    dataclasses.replace(manifest, model_files=[*manifest.model_files, file], hosts={}).write(step)
    for each in manifest.files:  # it holds all that it lists
        if not (step / each.file).exists():
            shutil.copyfile(parts[0] / STEP / each.file, step / each.file)
    code, message = commands.acsgd("fetch", parts[1].parent, "--step", 2, "--from", parts[1], "--to", tmp_path / "to")
    assert code == 2
    assert f"'{name}' is not taken from another host" in message
    assert not (tmp_path / "to").exists()


def test_a_file_that_is_not_what_the_manifest_says_is_refused(parts: list[Path], tmp_path: Path) -> None:
    [file, *_] = [file for file in Manifest.read(parts[1] / STEP).files if (parts[1] / STEP / file.file).exists()]
    raw = (parts[1] / STEP / file.file).read_bytes()
    (parts[1] / STEP / file.file).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    code, message = commands.acsgd("fetch", parts[0].parent, "--step", 2, "--from", parts[1], "--to", tmp_path / "to")
    assert code == 2
    assert f"{file.file} is not what its manifest says" in message
    assert not (tmp_path / "to").exists()
    assert LocalFiles(SharedFiles(str(parts[0]))).list().best == ShardDirectory(parts[0] / "best").path.resolve().name


@pytest.fixture
def inputs(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invitation]:
    """The invitation of a run on a host that has its inputs: layer shards of a model, and a file of data."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "first/shards").mkdir(parents=True)
    from_hf(tiny_model("gpt2", **SMALL), tmp_path / "first/shards")
    (tmp_path / "first/notes.jsonl").write_text('{"text": "one"}\n' * 1000)
    addresses = free_addresses(1)
    with daemons.host(addresses, 0, tmp_path, secret="secret") as path:
        shared = SharedFiles(
            str(tmp_path / "first/checkpoints"),
            str(tmp_path / "first/shards"),
            data=(str(tmp_path / "first/notes.jsonl"),),
        )
        daemons.Worker(path, tmp_path / "first/run", files=shared).next_view(1)
        (tmp_path / "second").mkdir()
        monkeypatch.chdir(tmp_path / "second")
        yield Invitation("run", "secret", tuple(addresses), "1:8", "false", "", VERSION)


INPUTS = Config(
    model=ModelConfig("models/gpt"),
    data=DataConfig(sources="texts/notes.jsonl:0.5,demo", sequence=8, batch=2),
    optim=OptimConfig(lr=1.0, steps=1),
)


def test_a_host_that_joins_gets_its_inputs_where_its_run_file_names_them(
    inputs: Invitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, config and tokenizer are those of the first host; what is there is not touched, and nobody is asked."""
    members.get_inputs(inputs, INPUTS)
    path, first = Path("models/gpt"), tmp_path / "first"
    taken, theirs = (Manifest.read(each) for each in (path, first / "shards"))
    assert {each.name for each in path.iterdir()} == {MANIFEST, *(each.file for each in theirs.model_files)}
    for each in theirs.model_files:
        assert (path / each.file).read_bytes() == (first / "shards" / each.file).read_bytes()
    assert taken.weights_checksum == theirs.weights_checksum
    open_shards(path)
    assert Path("texts/notes.jsonl").read_bytes() == (first / "notes.jsonl").read_bytes()
    assert sorted(path.name for path in Path().rglob("*") if path.is_dir()) == ["gpt", "models", "texts"]
    monkeypatch.delattr(members, "open_members")
    members.get_inputs(inputs, INPUTS)


def test_layers_come_from_hosts_of_the_view_when_they_are_read(
    inputs: Invitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their content: once the host has no model, from a checkpoint that has a file with the same; or not at all."""
    members.get_inputs(inputs, INPUTS)
    path, first, checkpoint = Path("models/gpt"), tmp_path / "first/shards", tmp_path / "first/checkpoints" / STEP
    monkeypatch.setattr(model_files, "RETRY_S", 0.0)
    files_of = partial(ModelFiles, run="run", secret=b"secret", waits=InterruptibleWaits())
    shards = ShardDirectory(path, files_of(["127.0.0.1:1", *inputs.endpoints]).get)
    with pytest.raises(
        CorruptFileError, match=r"lacks .*embed.safetensors, .* which are on 127.0.0.1:\d+, not on this "
    ):
        ShardDirectory(path).read_layer("embed")
    read = shards.read_layer("head")
    theirs = ShardDirectory(first).read_layer("head")
    assert read.keys() == theirs.keys()
    assert all(torch.equal(read[key], theirs[key]) for key in theirs)
    assert [layer for layer in shards.manifest.layers if not shards.lacks(layer)] == ["head"]
    assert not [*path.glob(".*")]

    manifest = Manifest.read(first)
    entry, embedding = manifest.layers["block-00000"], manifest.layers["embed"]
    checkpoint.mkdir(parents=True)
    copied = dataclasses.replace(entry, file="block-00000.constants.safetensors")
    shutil.move(first / entry.file, checkpoint / copied.file)
    dataclasses.replace(manifest, constants={"block-00000": copied}).write(checkpoint)
    raw = bytearray((first / embedding.file).read_bytes())
    (first / embedding.file).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert shards.read_layer("block-00000")
    with pytest.raises(RunError, match=r"embed\.safetensors is not what its manifest says"):
        shards.read_layer("embed")
    (first / embedding.file).unlink()
    with pytest.raises(
        RefusedError, match=r"lacks embed\.safetensors, and no host of the run holds it: start a host that "
    ):
        ShardDirectory(path, files_of(inputs.endpoints).get).read_layer("embed")


def test_a_model_with_new_weights_needs_config_and_tokenizer_alone(
    inputs: Invitation, tiny_model: TinyModel, tmp_path: Path
) -> None:
    shards, model = tmp_path / "first/shards", tiny_model("gpt2", **SMALL)
    shutil.rmtree(shards)
    shutil.copytree(model, shards)
    (shards / "tokenizer_code.py").write_text("import os")  # is listed by no host, and so not taken
    with pytest.raises(ValueError, match="no host has layer shards of models/gpt to send: copy the model to this host"):
        members.get_inputs(inputs, INPUTS)
    members.get_inputs(inputs, dataclasses.replace(INPUTS, model=ModelConfig("models/gpt", init="scratch")))
    names = {path.name for path in Path("models/gpt").iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".safetensors", ".py"))]


def test_a_host_without_its_inputs_is_told_so_if_no_member_has_them(inputs: Invitation, tmp_path: Path) -> None:
    (tmp_path / "first/notes.jsonl").unlink()
    with pytest.raises(ValueError, match="no host can send the data of the run"):
        members.get_inputs(inputs, INPUTS)
    with pytest.raises(ValueError, match="no host of run run answers"):
        members.get_inputs(dataclasses.replace(inputs, endpoints=("127.0.0.1:1",), mesh="false"), INPUTS)
    for other in ({"run": "other"}, {"secret": "of former days"}):
        address = inputs.endpoints[0]
        text = f"{address} is of another run, or the secret has been replaced); get the invitation that acsgd host pri"
        with pytest.raises(ValueError, match=re.escape(text)):
            members.get_inputs(dataclasses.replace(inputs, **other), INPUTS)  # type: ignore[arg-type]
