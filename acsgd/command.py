"""The `acsgd` command before its imports, which take a third of a second: a stop signal among them is reported."""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the `acsgd` command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback among the imports of the next line
    from acsgd.failures.signals import starting

    with starting():
        from acsgd import cli
    cli.main()
