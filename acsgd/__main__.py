"""`torchrun ... -m acsgd RUN.toml` trains without a checkout; `-m acsgd eval` and `-m acsgd generate` run commands."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from acsgd.errors import BEFORE_TRAINING, ReportedError
from acsgd.failures.signals import end_with_torchrun, starting
from acsgd.failures.stdio import protect_streams
from acsgd.launch import Launch, forbid_restart, set_variables

TRAIN, EVAL, GENERATE = "train", "eval", "generate"
"""Names of the commands that run on several ranks, too."""


def main(argv: list[str], *, prog: str) -> None:
    """Run a command, and end the process if it fails. prog: name of the command in its help."""
    try:
        run(argv, prog=prog)
    except SystemExit as error:
        if error.code == BEFORE_TRAINING:
            forbid_restart()
        if isinstance(error, ReportedError):
            end_process(error.exit_code)
        raise


def end_process(code: int) -> NoReturn:
    """End the process at once, from any thread: others may wait in gloo or in the store, and cannot be ended."""
    os._exit(code)


def run(argv: list[str], *, prog: str) -> None:
    """Import the code of a command, which takes seconds, and run it. Raises ReportedError after a failure."""
    protect_streams()
    set_variables()
    launch = Launch.from_env()
    if launch.under_torchrun:
        end_with_torchrun(os.getppid(), is_main=launch.local_rank == 0, end=end_process)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before and after the contexts that handle it, without a traceback
    command = argv[0] if argv[:1] in ([EVAL], [GENERATE]) else ""
    if command:
        argv, prog = argv[1:], f"{prog} {command}"
    # torchrun of an elastic run sends SIGTERM to start its workers again: nothing is reported then
    with contextlib.nullcontext() if launch.daemon else starting(launch, end_process):
        main_of_command = _import(argv, launch, prog=prog, command=command)
    main_of_command(argv, launch, prog=prog, end=end_process)


def _import(argv: list[str], launch: Launch, *, prog: str, command: str) -> Callable[..., None]:
    """Return the main function of a command, once its options are checked. Arguments: see `_check`."""
    from acsgd.failures.report import report_startup_error

    if launch.rank == 0 and launch.is_one_host:  # torchrun then ends the other ranks
        with report_startup_error(launch):  # before the imports; the commands do it again, on all ranks of all hosts
            _check(argv, launch, prog=prog, command=command)
    match command:
        case "eval":
            from acsgd.commands.evaluation.command import main
        case "generate":
            from acsgd.commands.generation.command import main
        case _:
            from acsgd.main import main
    return main


def _check(argv: list[str], launch: Launch, *, prog: str, command: str) -> None:
    """Raise ValueError if the options of a command are invalid, or name a model that does not exist.

    command: EVAL, GENERATE, or empty for training.
    """
    from acsgd.commands.evaluation.options import EvalOptions
    from acsgd.commands.generation.options import GenerateOptions
    from acsgd.config.checks import check
    from acsgd.config.run_file import parse, parse_flags

    if not command:
        check(parse(argv, prog=prog))
        return
    kind: type[EvalOptions | GenerateOptions] = EvalOptions if command == EVAL else GenerateOptions
    options = parse_flags(kind, argv, prog=prog)
    options.check(launch.world_size)
    options.check_model()


def without_train(argv: list[str]) -> list[str]:
    """Return arguments without the command of `acsgd train`, which may be typed here, too, unless it is a run file."""
    return argv[1:] if argv[:1] == [TRAIN] and not os.path.isfile(TRAIN) else argv


if __name__ == "__main__":
    main(without_train(sys.argv[1:]), prog="python -m acsgd")
