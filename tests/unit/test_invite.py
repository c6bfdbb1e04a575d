"""An invitation holds what a host needs to join, and is never used if it is not whole."""

from __future__ import annotations

import dataclasses
import socket
import stat
from pathlib import Path

import pytest

from acsgd.commands.invitation import VERSION, Invitation
from acsgd.config.run_file import parse
from tests.lib import commands
from tests.lib.commands import started
from tests.lib.ports import free_port

RUN_FILE = """
[model]
name = "m"
[data]
sources = "demo"
sequence = 8
batch = 2
[optim]
lr = 1
steps = 3
[log]
dir = "runs/x"
"""
INVITATION = Invitation("run-1", "s3cret", ("10.0.0.1:29400", "[fd00::1]:29400"), "1:8", "auto", RUN_FILE, "0.1.0")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "m").mkdir()  # else acsgd join gets the model from members
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path


def test_an_invitation_is_read_as_it_was_written() -> None:
    text = INVITATION.encode()
    assert Invitation.decode(text) == INVITATION
    assert Invitation.decode("\n".join(text[i : i + 40] for i in range(0, len(text), 40)) + "\n") == INVITATION
    assert len(text) < 400


def test_an_invitation_that_is_not_whole_is_refused() -> None:
    text = INVITATION.encode()
    for place in range(len("acsgd1-"), len(text), 7):
        for damaged in (text[:place], text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]):
            with pytest.raises(ValueError, match="the invitation is damaged or not whole; copy all"):
                Invitation.decode(damaged)
    with pytest.raises(ValueError, match="the invitation is damaged"):
        Invitation.decode(dataclasses.replace(INVITATION, run="../run").encode())
    with pytest.raises(ValueError, match=r"acsgd2-abc\.\.\. is of another version of acsgd"):
        Invitation.decode("acsgd2-abc")
    with pytest.raises(ValueError, match='"hello" is neither an invitation nor a file'):
        Invitation.decode("hello")


def test_host_and_join_start_torchrun_alike_and_show_no_secret(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    options = ("--nproc", 2, "--port", port, "--address", "127.0.0.1")
    words = started("host", "run.toml", *options)
    [file] = (run_dir / "home/.acsgd").glob("*.secret")
    secret, run = file.read_text(), words[words.index("--rdzv-id") + 1]
    assert words[words.index("--rdzv-conf") + 1] == f"secret={file}"
    assert started("host", "run.toml", *options) == words
    assert file.read_text() == secret
    assert run.startswith("x-")
    config = parse([words[-1]])
    assert config.log.dir == str(run_dir / "runs/x")
    assert (config.optim.steps, config.data.sources) == (3, "demo")
    text = Invitation(run, secret, (f"127.0.0.1:{port}",), "1:8", "auto", Path(words[-1]).read_text(), VERSION).encode()
    file.unlink()
    hidden = started("join", text, "--nproc", 2)
    joined = started(*hidden[3:])
    assert (joined, file.read_text()) == (words, secret)
    fetch = started("fetch", text, "--step", 7, "--state", "--to", "a b", "--from", "c", "--from", "d")
    assert Path(fetch[4]).read_text() == text
    assert fetch[5:] == ["--step", "7", "--to", "a b", "--state", "--from", "c", "--from", "d"]
    for line in (words, hidden, joined, fetch):
        assert secret not in " ".join(line)
        assert text not in line
    for path in (run_dir / "home/.acsgd", *(run_dir / "home/.acsgd").iterdir()):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


def test_a_secret_that_was_replaced_stays_until_another_invitation_comes(run_dir: Path) -> None:
    private = run_dir / "home/.acsgd"
    (run_dir / "first").write_text(INVITATION.encode())
    started("join", run_dir / "first")
    (private / "run-1.secret").write_text("replaced\n")
    started("join", run_dir / "first")
    started("join", INVITATION.encode())
    assert (private / "run-1.secret").read_text() == "replaced\n"
    started("join", dataclasses.replace(INVITATION, secret="newer").encode())
    assert (private / "run-1.secret").read_text() == "newer"
    port = free_port()
    started("host", "run.toml", "--address", "127.0.0.1", "--port", port)
    [file] = private.glob("x-*.secret")
    file.write_text("replaced\n")
    started("host", "run.toml", "--address", "127.0.0.1", "--port", port)
    assert file.read_text() == "replaced\n"


def test_only_the_host_itself_gets_elastic_force(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invited: list[Invitation] = []
    monkeypatch.setattr(Invitation, "encode", lambda self: invited.append(self) or "")
    (run_dir / "run.toml").write_text(f"{RUN_FILE}[elastic]\nforce = true\n")
    port = free_port()
    words = started("host", "run.toml", "--port", port, "--address", "127.0.0.1")
    assert parse([words[-1]]).elastic.force
    assert [invitation.options for invitation in invited] == [
        Path(words[-1]).read_text().replace("[elastic]\nforce = true\n", "[elastic]\n")
    ]


def test_a_host_behind_a_mapped_port_invites_into_a_mesh(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    words = started("host", "run.toml", "--address", "127.0.0.1", "--port", port, "--announce", "198.51.100.7:41")
    assert words[words.index("--rdzv-endpoint") + 1] == "198.51.100.7:41"
    run = words[words.index("--rdzv-id") + 1]
    assert words[words.index("--rdzv-conf") + 1] == (
        f"mesh=true,announce=198.51.100.7:41,listen=127.0.0.1:{port},secret={run_dir / 'home/.acsgd' / run}.secret"
    )
    options = (run_dir / "home/.acsgd" / f"{run}.toml").read_text()
    text = Invitation(run, "s", ("198.51.100.7:41",), "1:8", "true", options, VERSION).encode()
    hidden = started("join", text, "--announce", "none")
    joined = started(*hidden[3:])
    assert joined[joined.index("--rdzv-conf") + 1].startswith("mesh=true,announce=none,secret=")
    hidden = started("join", text, "--announce", "198.51.100.8:41", "--port", port)
    joined = started(*hidden[3:])
    place = f"mesh=true,announce=198.51.100.8:41,listen=[::]:{port},secret="  # a mapped port may enter by any interface
    assert joined[joined.index("--rdzv-conf") + 1].startswith(place)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        failed = commands.acsgd("join", text, "--announce", "198.51.100.8:41", "--port", port)[1]
    assert f"[::]:{port} cannot be listened on (Address already in use); give another --port, or end" in failed
    assert (
        "--announce none is of a host without a port"
        in commands.acsgd("join", text, "--announce", "none", "--port", port)[1]
    )


def test_mistakes_are_named_before_torchrun_starts(run_dir: Path) -> None:
    other = Invitation("r", "s", ("h:1",), "1:8", "auto", "", "9.9").encode()
    version = f"the run has acsgd 9.9, this host {VERSION}; install the same version"
    assert commands.acsgd("join", other) == (2, f"error: {version}\n")
    plain = Invitation("r", "s", ("10.0.0.1:1",), "1:8", "auto", "", VERSION).encode()
    assert commands.acsgd("join", plain, "--announce", "none")[1].startswith(
        "error: --announce none is of a mesh, which"
    )
    assert commands.acsgd("join", plain, "--port", 5)[1].startswith("error: --port 5 is of a mesh, which")
    (run_dir / "notes").write_text("hello")
    assert commands.acsgd("join", "notes")[1].startswith('error: "hello" is neither an invitation')
    (run_dir / "empty").touch()
    for line, message in (
        ("join empty", "empty holds no invitation; give what"),
        ("join ./nowhere", '"./nowhere" is neither an invitation nor a file with one; copy'),
        ("join hello --nproc 0", "--nproc=0 must be a number of processes, or one of auto, "),
        ("join hello --announce here", "--announce here: here is not host:port; give the address"),
        ("host run.toml --announce here", "--announce here: here is not host:port; give the address"),
        ("host run.toml --nproc some", "--nproc=some must be a number of processes, or one of auto, "),
        ("host run.toml --port 99999", "--port=99999 must be at least 1, at most 65535"),
        ("host run.toml --restarts=-1", "--restarts=-1 must be at least 0, "),
        *((f"host run.toml --hosts {each}", f"--hosts={each} must be a number of") for each in ("x", "0", "3:2", ":2")),
    ):
        code, printed = commands.acsgd(*line.split())
        assert (code, printed.count("\n")) == (2, 1)
        assert printed.startswith(f"error: {message}"), printed
    assert "run file no.toml cannot be read" in commands.acsgd("host", "no.toml")[1]
    code, printed = commands.acsgd("host", "run.toml", "--address", "192.0.2.77")
    assert (code, printed.count("\n")) == (2, 1)
    assert "192.0.2.77:29400 cannot be listened on" in printed
