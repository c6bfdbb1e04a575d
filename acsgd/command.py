"""The `acsgd` command before its imports, which take a third of a second: Ctrl-C among them prints no traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point of the `acsgd` command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from acsgd import cli

    cli.main()
