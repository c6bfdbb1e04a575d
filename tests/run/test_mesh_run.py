"""A run whose hosts have one port each, in a mesh: hosts end and join, and the losses are those of a calm run."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from acsgd.config.run_file import parse
from acsgd.mesh.mesh import rotate
from benchmarks.common import netlab
from tests.lib.corpora import write_records
from tests.lib.forks import finish
from tests.lib.hosts import LIMIT_S, Hosts
from tests.lib.injection import Pace
from tests.lib.patience import NO_LIMIT_S, stretched

STEPS = 60
PACE = Pace(stretched(0.15))
"""So that the secret is replaced, and a host ends, before the last step."""
SECRET = "a secret of these hosts alone"
PORT = 29400


def test_a_run_in_a_mesh_of_which_hosts_end_and_join_and_the_secret_is_replaced_is_the_calm_run(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host has no port. Between hosts, there are no connections but those to the ports of the mesh."""
    write_records(tmp_path / "a.jsonl")
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""
        model.name = "{tiny_model(n_layer=2)}"
        data = {{ sources = "demo", window = 32, sequence = 32, batch = 8 }}
        pp.micro = 1
        optim = {{ lr = 1e-3, steps = {STEPS} }}
        run.timeout = {NO_LIMIT_S}
        log.to = "jsonl,print"
        """
    )
    with ExitStack() as stack:
        try:
            lab = stack.enter_context(netlab.lab(hosts=3))
        except (RuntimeError, OSError) as error:
            pytest.skip(f"no network namespaces: {error}")
        endpoints = [f"{netlab.address(host)}:{PORT}" for host in range(2)]
        flags = ("--elastic.min_replicas", "2", "--elastic.join_budget", "0")
        hosts = Hosts(tmp_path, run_file, stack, 1, flags, endpoints=endpoints)
        files = {name: tmp_path / f"secret-{name}" for name in "abc"}
        for file in files.values():
            file.touch(0o600)
            file.write_text(SECRET)
        confs = {name: f"mesh=true,secret={file}" for name, file in files.items()}
        sockets = stack.enter_context(TemporaryDirectory())  # other runs of this name may be on this machine
        agent = partial(_use_directory, sockets)
        a, b = (
            hosts.start(name, min_hosts=2, namespace=namespace, conf=confs[name], agent=agent, worker=PACE)
            for name, namespace in zip("ab", lab.namespaces, strict=False)
        )
        hosts.wait_for_step(b, 3)
        conf = f"{confs['c']},announce=none"
        c = hosts.start("c", namespace=lab.namespaces[2], conf=conf, agent=agent, worker=PACE)
        hosts.wait_for_replicas(c, 3)
        views = len(hosts.events())
        monkeypatch.setattr(tempfile, "tempdir", sockets)
        rotate("test")
        assert len({file.read_text() for file in files.values()} - {SECRET}) == 1
        c.wait_until(lambda: len(hosts.events()) > views and hosts.events()[-1]["replicas"] == 3, LIMIT_S)
        hosts.wait_for_step(c, hosts.steps()[-1]["step"] + 2)
        assert _ports_between_hosts(lab.namespaces[1]) == {PORT}
        a.kill()
        assert b.wait(LIMIT_S) == c.wait(LIMIT_S) == 0
        assert len(hosts.hosts_that("left")) == 1
    finish(parse([str(run_file), "--log.dir", str(tmp_path / "calm"), "--log.to", "jsonl"]), 1)
    calm = [json.loads(line) for line in (tmp_path / "calm/metrics.jsonl").read_text().splitlines()]
    losses, expected = (torch.tensor([line["loss"] for line in each]) for each in (hosts.steps(), calm))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def _use_directory(directory: str) -> None:
    """Make temporary directories of this process in a directory."""
    tempfile.tempdir = directory


def _ports_between_hosts(namespace: str) -> set[int]:
    """Return one port of each TCP connection to another host: that of the end that has accepted it."""
    read = ["ip", "netns", "exec", namespace, "cat", "/proc/net/tcp"]
    rows = [
        line.split() for line in subprocess.run(read, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    inside = bytes(reversed([10, 77])).hex().upper()
    ends = [(row[1], row[2]) for row in rows[1:] if row[2].partition(":")[0].endswith(inside)]
    return {min((int(end.partition(":")[2], 16) for end in each), key=lambda port: abs(port - PORT)) for each in ends}
