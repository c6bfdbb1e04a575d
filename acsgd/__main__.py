"""`torchrun ... -m acsgd RUN.toml`: train, without a checkout of the project."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds: until training starts, Ctrl-C ends quietly

    from acsgd.train import main

    main(sys.argv[1:])
