"""Train from a checkout: `torchrun train.py RUN.toml` runs acsgd/train.py, as `torchrun -m acsgd RUN.toml` does."""

import sys

from acsgd.__main__ import main

if __name__ == "__main__":
    main(sys.argv[1:], prog="train.py")
