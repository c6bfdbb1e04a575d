"""Kinds of adapters, as chosen by adapter.spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from acsgd.config.ranges import Range
from acsgd.config.spec import from_spec

ALL_LINEAR = "all-linear"
NAME = "default"
"""Name that PEFT gives an adapter which is the only one; part of the names of its parameters."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): two factors per matrix, whose product is added to it."""

    virtual_tokens: ClassVar[int] = 0
    """Number of tokens of each sequence that stand for trained embeddings."""

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
    """Modules that are trained as a whole, and not adapted, by the ends of their names, "embed_tokens+lm_head"."""
    rslora: bool = False
    """Whether the product is scaled by alpha / sqrt(r) instead (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Whether the norm of each column is trained by itself (Liu et al. 2024, arXiv:2402.09353)."""


@dataclass(frozen=True)
class IA3:
    """IA3 (Liu et al. 2022, arXiv:2205.05638): vectors scale outputs of modules, or inputs of feed-forward ones."""

    dropout: ClassVar[float] = 0.0
    virtual_tokens: ClassVar[int] = 0

    targets: str = ""
    """Modules that are adapted, by the ends of their names: "k_proj+v_proj+down_proj". Default: those that PEFT chooses
    for the type of the model."""
    feedforward: str = ""
    """Those of the targets whose inputs are scaled: "down_proj". Default: as PEFT chooses; with targets, none."""
    modules_to_save: str = ""
    """Modules that are trained as a whole, and not adapted, by the ends of their names, "embed_tokens+lm_head"."""


@dataclass(frozen=True)
class PromptTuning:
    """Prompt tuning (Lester et al. 2021, arXiv:2104.08691): embeddings of virtual tokens before each sequence.

    Before the inputs of the encoder, in an encoder-decoder.
    """

    dropout: ClassVar[float] = 0.0
    modules_to_save: ClassVar[str] = ""
    FREE_TEXT: ClassVar[str] = "text"

    tokens: Annotated[int, Range(1, 2**16)] = 20
    """Number of virtual tokens. They count towards data.sequence."""
    init: Literal["random", "text"] = "random"
    """Initial embeddings: drawn from the standard normal distribution, or those of a text."""
    text: str = ""
    """Text of init=text; repeated or cut to the number of tokens."""

    def __post_init__(self) -> None:
        if (self.init == "text") != bool(self.text):
            raise ValueError("init=text and text=TEXT belong together; give both, or none")

    @property
    def virtual_tokens(self) -> int:
        """Number of tokens of each sequence that stand for trained embeddings."""
        return self.tokens


@dataclass(frozen=True)
class PrefixTuning:
    """Prefix tuning (Li and Liang 2021, arXiv:2101.00190): keys and values of virtual tokens in each attention."""

    dropout: ClassVar[float] = 0.0
    modules_to_save: ClassVar[str] = ""

    tokens: Annotated[int, Range(1, 2**16)] = 20
    """Number of virtual tokens. They count towards data.sequence."""

    @property
    def virtual_tokens(self) -> int:
        """Number of tokens of each sequence that stand for trained keys and values."""
        return self.tokens


VirtualTokens = PromptTuning | PrefixTuning
Adapter = LoRA | IA3 | VirtualTokens
ADAPTERS: dict[str, type[Adapter]] = {
    "lora": LoRA,
    "ia3": IA3,
    "prompt_tuning": PromptTuning,
    "prefix_tuning": PrefixTuning,
}


def parse_adapter(spec: str | None) -> Adapter | None:
    """Parse adapter.spec; None = no adapter. Raises ValueError."""
    return None if spec is None else from_spec(spec, ADAPTERS, key="adapter.spec")


def names_in(text: str) -> list[str]:
    """Return the names in a list that is separated by "+"."""
    return [name.strip() for name in text.split("+") if name.strip()]
