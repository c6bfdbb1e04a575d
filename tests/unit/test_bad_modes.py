"""Options of data-parallel modes: invalid ones are refused with the spec and the reason; what modes declare is so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.peers import Peers
from acsgd.shards.weights import Weight

INVALID = [
    ("powersgd:rank=0", "rank=0 must be 1 or more"),
    ("powersgd:exact_steps=-1", "exact_steps=-1 must be 0 or more steps"),
    ("powersgd:bucket_mb=0", "bucket_mb=0.0 must be greater than 0"),
    ("cocktail:random=0", "random=0.0 must lie in (0, 1]; 0.1 and 0.2 are usual"),
    ("cocktail:topk=1.5", "topk=1.5 must lie in (0, 1]; 0.1 and 0.2 are usual"),
    ("cocktail_grad:topk=0", "a fraction of 0.0 must lie in (0, 1]; 0.02 is usual"),
    ("cocktail_grad:bits=9", "bits=9 is outside 1 to 8"),
    ("cocktail_grad:exact_steps=-1", "exact_steps=-1 must be 0 or more"),
    ("sparseloco:topk=2", "a fraction of 2.0 must lie in (0, 1]; 0.02 is usual"),
    ("sparseloco:inner=0", "inner=0 must be 1 or more steps"),
    ("quantized:bits=0", "bits=0 is outside 1 to 8"),
    ("cocktail:outer_lr=0", "outer_lr=0.0 must be greater than 0"),
    ("cocktail:group=0", "group=0 must be 1 or more values that share a scale"),
    ("quantized:group=-1", "group=-1 must be 1 or more values that share a scale"),
    ("cocktail:gain=2", 'option "gain" is now called "outer_lr"'),
    ("sparseloco:moments=true", 'option "moments" is now called "moment_correction"'),
    ("quantized:exact_steps=0", "exact_steps=0 must be 1 or more"),
    ("diloco:inner=5,fragments=2", "inner=5 must be a multiple of fragments=2"),
    ("allreduce:dtype=fp8", 'dtype="fp8" is not one of fp32, bf16, fp16'),
    ("sharded_ps:dtype=int8", 'dtype="int8" is not one of fp32, bf16, fp16'),
    ("central_ps:bucket_mb=-1", "bucket_mb=-1.0 must be greater than 0"),
]
"""Spec and the beginning of the error."""


def test_invalid_options_are_refused() -> None:
    for spec, message in INVALID:
        with pytest.raises(ValueError) as error:
            from_spec(spec, MODES, key="dp.mode")
        assert f'dp.mode="{spec}": {message}' in str(error.value)


@pytest.mark.parametrize("name", MODES)
def test_a_mode_declares_whether_replicas_make_steps_of_their_own(name: str) -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, ranks=[0, 1], device=torch.device("cpu"), updates=None)
    mode = from_spec(name, MODES, key="dp.mode")
    master = nn.Parameter(torch.zeros(4, 4))
    sync = mode.open([Weight("weight", master, master)], Peers(group, waits=group))
    assert (mode.exchanges != "gradients") == (sync.local_step(10**6) is not None)
