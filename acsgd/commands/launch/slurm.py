"""Submit a run to Slurm, with the scripts of slurm/, which save it before its time limit and submit it again."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from acsgd.config.options import Config
from acsgd.io.checkpoint.directory import CHECKPOINTS
from acsgd.launch import environment_with
from acsgd.notes import print_note


def submission(
    config: Config, partition: str, *, nodes: int, grace_s: float, save_s: float, elastic: bool, sbatch: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command that submits a run, before its own arguments, and the variables of the script.

    grace_s: seconds before the time limit at which the run is stopped; save_s: seconds that it has then; sbatch:
    command that submits, with further options.
    """
    run_dir = Path(config.log.dir)
    script = Path(__file__).with_name("elastic.sbatch" if elastic else "train.sbatch")
    checkpoints = Path(config.checkpoint.dir or run_dir / CHECKPOINTS)
    command = [*shlex.split(sbatch), "--parsable", "--partition", partition, "--nodes", str(nodes)]
    command += ["--job-name", run_dir.name, "--output", str(run_dir.absolute() / "logs/slurm-%j.log")]
    signal = f"B:USR1@{grace_s:g}"
    command += ["--signal", signal, str(script)]
    variables = {"checkpoints": str(checkpoints.absolute()), "shutdown_s": f"{save_s:g}"}
    if elastic:  # the script submits itself again for nodes that are lost
        variables["submit"] = shlex.join([*shlex.split(sbatch), "--signal", signal])
    return command, variables


def submit(command: Sequence[str], variables: dict[str, str], logs: Path) -> None:
    """Submit a job, and print how to follow and to end it. Raises ValueError if Slurm does not take it."""
    if shutil.which(command[0]) is None:
        raise ValueError(f"this host has no {command[0]}; type the line on a host from which jobs are submitted")
    logs.mkdir(parents=True, exist_ok=True)  # Slurm makes no directories
    print_note(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)]))
    done = subprocess.run(command, env=environment_with(variables), capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise ValueError(f"Slurm does not take the job: {reason}")
    job = done.stdout.strip().partition(";")[0]
    print(f"submitted job {job}; follow it with\n\n    tail -F {shlex.quote(str(logs / f'slurm-{job}.log'))}\n")
    print(f"and end it, after it has saved, with\n\n    scancel --signal=TERM {job}\n")
