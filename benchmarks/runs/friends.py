"""Type the commands of docs/howto/three-friends.md on three hosts, and print what they print:

    .venv/bin/python -m benchmarks.runs.friends

The run file and the commands are read from that page. Hosts are network and host name namespaces, 20 to 35 ms apart at
100 Mbit/s, each with a home and a directory of its own; the container is behind a router that maps one port, the home
behind one that maps none. The model is a GPT-2 of 1.1 M parameters with new weights. Needs root, iproute2, nftables and
conntrack; a minute on two idle cores.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import netlab
from benchmarks.common.small_model import save_blank
from benchmarks.common.tuning import read
from tests.lib.patience import wait_until

PAGE = Path(__file__).parents[2] / "docs/howto/three-friends.md"
PLACES = ("lab", "container", "home")
DELAYS_S = (0.0075, 0.0125, 0.0225)
"""Of each place to the switch between them."""
MBIT = 100
LIMIT_S = 300.0


class Friend:
    """One host, and the commands that run on it. Their output is in files of its directory.

    directory: its disk; at: where all hosts see that of their own.
    """

    def __init__(self, name: str, namespace: str, directory: Path, at: Path) -> None:
        self.name = name
        self.namespace = namespace
        self.directory = directory
        self._at = at
        (directory / "tmp").mkdir(parents=True)

    def type(self, line: str) -> subprocess.Popen[bytes]:
        """Start a command line in a process group of its own, as a shell does."""
        # no name server is reached from here, and the first connection of each process asks one for a name
        mounts = f"mount --bind /dev/null /etc/resolv.conf && mount --bind {self.directory} {self._at}"
        inside = f'hostname {self.name} && {mounts} && cd {self._at} && exec "$0" "$@"'
        program = str(Path(sys.executable).with_name("acsgd"))
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "sh", "-c", inside]
        command += [program, *line.split()[1:]]
        home = {"HOME": str(self._at), "TMPDIR": str(self._at / "tmp")}
        with self.output(line).open("wb") as file:
            return subprocess.Popen(
                command,
                env={**os.environ, **home, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self, line: str) -> Path:
        """Return the file with the output of a command line."""
        return self.directory / f"{line.split()[1]}.log"

    def wait_for(self, line: str, pattern: str) -> None:
        """Wait until a command has printed what matches a pattern."""
        file = self.output(line)

        def describe() -> str:
            return f"{self.name} has not printed {pattern}: {file.read_text()[-2000:]}"

        wait_until(lambda: re.search(pattern, file.read_text(), re.DOTALL), LIMIT_S, describe=describe)

    def end_for_ever(self) -> None:
        """Kill all processes of this host, and empty its disk, except for what they have printed."""
        for pid in netlab.run(f"ip netns pids {self.namespace}").split():
            os.kill(int(pid), signal.SIGKILL)
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != ".log":
                path.unlink()


def run(directory: Path, stack: ExitStack) -> None:
    """Let the three hosts do what the page tells; print what they have printed."""
    run_file, (host, *joins, fetch) = page()
    friends = lab, container, home = hosts(directory, stack)
    write_inputs(lab.directory, run_file)
    lab.type(host)
    lab.wait_for(host, "saved .*step-00000020")
    (invitation,) = re.findall("acsgd join (acsgd1-.*)", lab.output(host).read_text())
    for friend in (container, home):
        (friend.directory / "invitation").write_text(invitation)
    joined = []
    for friend, line in zip((container, home), joins, strict=True):
        joined.append(friend.type(line))
        friend.wait_for(line, "first step")
    at_container, _ = joins
    lab.wait_for(host, r"a directory of its own on 3 hosts")
    end(home.type(fetch))
    lab.end_for_ever()
    container.wait_for(at_container, "view 4:.*saved ")
    interrupt(joined[1])
    container.wait_for(at_container, "view 5:.*saved ")
    interrupt(joined[0])
    for friend in friends:
        for line in (host, *joins, fetch):
            if friend.output(line).exists():
                printed = friend.output(line).read_text().replace(f"{directory / 'disk'}/", "")
                print(f"--- {friend.name}$ {line}\n{printed}")


def page() -> tuple[str, list[str]]:
    """Return the run file and the commands of the page that start with acsgd."""
    text = PAGE.read_text()
    (run_file,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return run_file, re.findall(r"^```\n(acsgd .*)\n```$", text, re.MULTILINE)


def hosts(directory: Path, stack: ExitStack) -> tuple[Friend, Friend, Friend]:
    """Make the network, in which the first host has an open port, the second a mapped one, the third none."""
    network = stack.enter_context(netlab.lab(hosts=len(PLACES), delay_s=DELAYS_S))
    network.limit(MBIT)
    mapped = stack.enter_context(netlab.behind_router(network, 1, {41000: 29400}))
    hidden = stack.enter_context(netlab.behind_router(network, 2))
    netlab.run(f"ip -n {network.namespaces[0]} route add default dev eth0")
    namespaces = (network.namespaces[0], mapped.namespace, hidden.namespace)
    (at := directory / "disk").mkdir()
    lab, container, home = (
        Friend(name, namespace, directory / name, at) for name, namespace in zip(PLACES, namespaces, strict=True)
    )
    for friend in (lab, container, home):
        stack.callback(friend.end_for_ever)
    return lab, container, home


def write_inputs(directory: Path, run_file: str) -> None:
    """Write the run file and the model and text that it names."""
    text = read("demo")
    (directory / "run.toml").write_text(run_file)
    (directory / "notes.txt").write_text(text)
    model = directory / "small-gpt"
    save_blank(model, text, vocabulary=2048, sequence=64, hidden=128, blocks=4, heads=4)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Press Ctrl-C and wait for the end."""
    os.killpg(process.pid, signal.SIGINT)
    end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a command. Raises subprocess.TimeoutExpired."""
    process.wait(LIMIT_S)


def main() -> None:
    """Check this machine, run, print."""
    netlab.check(needs_tun=True, needs_nat=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that namespaces are removed
    with tempfile.TemporaryDirectory(prefix="friends-") as scratch, ExitStack() as stack:
        run(Path(scratch), stack)


if __name__ == "__main__":
    main()
