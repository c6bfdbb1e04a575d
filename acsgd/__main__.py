"""`torchrun ... -m acsgd RUN.toml`: train, without a checkout of the project."""

from __future__ import annotations

import os
import signal
import sys

from acsgd.launch import Launch
from acsgd.run.signals import end_with_torchrun
from acsgd.run.stdio import protect_streams


def main(argv: list[str], *, prog: str) -> None:
    """Import the training code, which takes seconds, and run it. prog: name of the command in its help."""
    protect_streams()
    launch = Launch.from_env()
    if launch.under_torchrun:
        end_with_torchrun(os.getppid(), is_main=launch.local_rank == 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends without a traceback

    from acsgd.config.checks import check
    from acsgd.config.run_file import parse
    from acsgd.run.error_report import report_startup_error

    if launch.rank == 0 and launch.is_one_host:  # torchrun then ends the other ranks
        with report_startup_error(launch):  # before the imports; `acsgd.main` does it again, on all ranks of all hosts
            check(parse(argv, prog=prog))

    from acsgd import main as training

    training.main(argv, launch, prog=prog)


if __name__ == "__main__":
    main(sys.argv[1:], prog="python -m acsgd")
