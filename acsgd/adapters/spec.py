"""Kinds of adapters, as chosen by adapter.spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from acsgd.config.ranges import Range
from acsgd.config.spec import from_spec

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): two factors per matrix, whose product is added to it."""

    r: Annotated[int, Range(1, 2**16)] = 16
    """Rank of the factors."""
    alpha: Annotated[float, Range(0, 2**20, above=True)] = 32.0
    """Numerator of the factor alpha / r by which the product is scaled."""
    dropout: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Probability with which an input of the factors is dropped in training."""
    targets: str = ALL_LINEAR
    """Modules that are adapted: "all-linear", which are all linear layers but the head, or the ends of their names,
    "q_proj+v_proj"."""
    modules_to_save: str = ""
    """Further modules that are trained as a whole, by the ends of their names, "embed_tokens+lm_head"."""
    rslora: bool = False
    """Whether the product is scaled by alpha / sqrt(r) instead (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Whether the norm of each column is trained by itself (Liu et al. 2024, arXiv:2402.09353)."""


Adapter = LoRA
ADAPTERS: dict[str, type[Adapter]] = {"lora": LoRA}


def parse_adapter(spec: str | None) -> Adapter | None:
    """Parse adapter.spec; None = no adapter. Raises ValueError."""
    return None if spec is None else from_spec(spec, ADAPTERS, key="adapter.spec")


def names_in(text: str) -> list[str]:
    """Return the names in a list that is separated by "+"."""
    return [name.strip() for name in text.split("+") if name.strip()]
