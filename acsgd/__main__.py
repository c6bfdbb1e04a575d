"""`torchrun ... -m acsgd RUN.toml`: train, without a checkout of the project."""

from __future__ import annotations

import signal
import sys


def main(argv: list[str], *, prog: str) -> None:
    """Import the training code and run it. prog: name of the command in its help."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds: until training starts, Ctrl-C ends quietly

    from acsgd import train

    train.main(argv, prog=prog)


if __name__ == "__main__":
    main(sys.argv[1:], prog="python -m acsgd")
