"""Model and text of tuning.py: a small GPT-2, its tokenizer, and text truncated to a number of sequences."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

from acsgd.io.files.cache import open_cached

END = "<|endoftext|>"


def save_blank(
    directory: Path, text: str, *, vocabulary: int, sequence: int, hidden: int, blocks: int, heads: int
) -> None:
    """Write the config of a GPT-2 without dropout, and a byte-level BPE tokenizer trained on a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)
    tokenizer.save_pretrained(directory)
    GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=sequence,
        n_embd=hidden,
        n_layer=blocks,
        n_head=heads,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **_dropouts(0.0),
    ).save_pretrained(directory)


def with_dropout(model: Path, share: float) -> Path:
    """Return a copy of a model, beside it, with dropout in its config; the model itself if `share` is 0."""
    if not share:
        return model

    def build(target: Path) -> None:
        shutil.copytree(model, target)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **_dropouts(share)}, indent=2))

    return open_cached(model.with_name(f"{model.name}-dropout-{share:g}"), build, Path)


def cut(text: str, model: Path, *, sequences: int, sequence: int) -> str:
    """Return the beginning of a text that gives `sequences` sequences. Raises ValueError if the text is too short."""
    # half a sequence more: truncation may change a token or two
    wanted = sequences * sequence + sequence // 2
    tokenizer = AutoTokenizer.from_pretrained(model)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(offsets) <= wanted:
        raise ValueError(
            f"the text to fine-tune on has {len(offsets)} tokens, too few for {sequences} sequences of {sequence}; "
            "give a longer one"
        )
    return text[: offsets[wanted][0]]


def written(directory: Path, text: str) -> Path:
    """Write a text to a file named by its hash, unless it exists; return the path."""
    return open_cached(directory / f"{digest(text)}.txt", lambda path: path.write_text(text, newline=""), Path)


def digest(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _dropouts(share: float) -> dict[str, float]:
    """Return GPT-2's dropout options, all with the same probability."""
    return {"resid_pdrop": share, "embd_pdrop": share, "attn_pdrop": share}
