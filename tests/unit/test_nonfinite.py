"""Law: of all non-finite tensors of a step, the origin of the others is found."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from acsgd.pp.nan_probe import NonFiniteTensor, first_non_finite

IN_ORDER = [
    NonFiniteTensor("weight", 1, None, "weight a", "inf"),
    NonFiniteTensor("weight", 3, None, "weight b", "nan"),
    NonFiniteTensor("forward", 2, 0, "output of c", "nan"),
    NonFiniteTensor("forward", 1, 4, "output of d", "inf"),
    NonFiniteTensor("forward", 2, 4, "input of e", "nan"),
    NonFiniteTensor("backward", 0, 3, "gradient of f", "nan"),
    NonFiniteTensor("backward", 3, 5, "gradient of g", "nan"),
    NonFiniteTensor("backward", 2, 5, "gradient of h", "nan"),
    NonFiniteTensor("reduce", 0, None, "gradient summed over replicas of i", "inf"),
]
"""Weights, then forwards by micro-batch and ascending stage, then backwards by micro-batch and descending stage."""


@pytest.mark.parametrize("start", range(len(IN_ORDER)))
def test_the_origin_is_found_in_any_order_of_ranks(start: int) -> None:
    found = IN_ORDER[start:]
    random.Random(start).shuffle(found)
    assert first_non_finite(found) == IN_ORDER[start]


def test_the_origin_of_all_is_among_the_origins_of_the_ranks() -> None:
    """So ranks need to exchange only one each."""
    rng = random.Random(0)
    for _ in range(100):
        shuffled = rng.sample(IN_ORDER, rng.randint(1, len(IN_ORDER)))
        cuts = sorted({0, len(shuffled), *(rng.randrange(len(shuffled)) for _ in range(3))})
        ranks = [shuffled[a:b] for a, b in pairwise(cuts)]
        assert first_non_finite([first_non_finite(rank) for rank in ranks]) == first_non_finite(shuffled)


@pytest.mark.parametrize("tensor", IN_ORDER, ids=str)
def test_json_round_trip(tensor: NonFiniteTensor) -> None:
    assert NonFiniteTensor.from_dict(json.loads(json.dumps(tensor.to_dict()))) == tensor


def test_text() -> None:
    assert str(IN_ORDER[3]) == "output of d (inf; forward, stage 1, micro-batch 4)"
    assert str(IN_ORDER[0]) == "weight a (inf; weight, stage 1)"
