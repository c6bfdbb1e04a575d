"""Laws of the levels in which second moments travel."""

from __future__ import annotations

import pytest
import torch

from acsgd.dp.moments import LOWEST, LogLevels, is_due


@pytest.mark.parametrize("n", [0, 1, 7, 1000, 100_000])
def test_moments_of_any_size_are_told_within_a_quarter_octave(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator).square() * torch.logspace(-24, 2, n)
    message = LogLevels().encode(x)
    assert len(message) <= LogLevels().max_bytes(n)
    ratio = LogLevels().decode(message, n) / x
    told = x > 2.0**LOWEST
    assert ((ratio[told].log2().abs()) <= 0.25 + 1e-4).all()


def test_zero_stays_zero_and_ordinary_moments_take_less_than_six_bits() -> None:
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(0)).square() * 1e-6
    x[::3] = 0.0
    message = LogLevels().encode(x)
    assert 8 * len(message) < 6 * len(x)
    assert torch.equal(LogLevels().decode(message, len(x)) == 0, x == 0)


def test_damaged_messages_are_refused() -> None:
    message = LogLevels().encode(torch.ones(1000))
    with pytest.raises(ValueError, match=r"decode|entropy coder"):
        LogLevels().decode(message[:-2], 1000)


def test_moments_are_averaged_after_powers_of_two() -> None:
    assert [steps for steps in range(-1, 40) if is_due(steps)] == [1, 2, 4, 8, 16, 32]
