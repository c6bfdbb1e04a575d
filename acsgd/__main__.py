"""`torchrun ... -m acsgd RUN.toml`: train, without a checkout of the project."""

from __future__ import annotations

import os
import signal
import sys


def main(argv: list[str], *, prog: str) -> None:
    """Import the training code and run it. prog: name of the command in its help."""
    parent = os.getppid()  # before the imports, which take seconds: torchrun may end meanwhile
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends without a traceback

    from acsgd import train

    train.main(argv, parent, prog=prog)


if __name__ == "__main__":
    main(sys.argv[1:], prog="python -m acsgd")
