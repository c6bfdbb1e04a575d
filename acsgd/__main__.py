"""`torchrun ... -m acsgd RUN.toml` trains without a checkout of the project; `torchrun ... -m acsgd eval` evaluates."""

from __future__ import annotations

import os
import signal
import sys

from acsgd.launch import Launch
from acsgd.run.signals import end_with_torchrun
from acsgd.run.stdio import protect_streams

EVAL = "eval"
"""Name of the command that evaluates."""


def main(argv: list[str], *, prog: str) -> None:
    """Import the code of a command, which takes seconds, and run it. prog: name of the command in its help."""
    protect_streams()
    launch = Launch.from_env()
    if launch.under_torchrun:
        end_with_torchrun(os.getppid(), is_main=launch.local_rank == 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends without a traceback

    from acsgd.run.error_report import report_startup_error

    is_eval = argv[:1] == [EVAL]
    if is_eval:
        argv, prog = argv[1:], f"{prog} {EVAL}"
    if launch.rank == 0 and launch.is_one_host:  # torchrun then ends the other ranks
        with report_startup_error(launch):  # before the imports; the commands do it again, on all ranks of all hosts
            _check(argv, launch, prog=prog, is_eval=is_eval)
    if is_eval:
        from acsgd.evaluation import command as evaluation

        evaluation.main(argv, launch, prog=prog)
    else:
        from acsgd import main as training

        training.main(argv, launch, prog=prog)


def _check(argv: list[str], launch: Launch, *, prog: str, is_eval: bool) -> None:
    """Raise ValueError if the options of a command are invalid."""
    from acsgd.config.checks import check
    from acsgd.config.run_file import parse, parse_flags
    from acsgd.evaluation.options import EvalOptions

    if is_eval:
        parse_flags(EvalOptions, argv, prog=prog).check(launch.world_size)
    else:
        check(parse(argv, prog=prog))


if __name__ == "__main__":
    main(sys.argv[1:], prog="python -m acsgd")
