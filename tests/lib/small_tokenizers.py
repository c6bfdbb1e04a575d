"""Small tokenizers of every kind: where they put blanks, and how they report characters, differs."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

CHARACTERS = "<|im_start|>user\nhas <|im_end|> and<|im_start|>system x é<|im_end|>\n<|im_start|>assistant\n ok"
"""Characters that they know, besides those of CHATML."""


def byte_level(**options: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "a"), ("ha", "s"), ("|", "i"), ("|i", "m"), ("|im", "_"), ("e", "n"), ("|", ">"), ("Ġ", "<")]
    vocabulary = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    return tokenizer


def unigram(*more: str) -> Tokenizer:
    """Return a tokenizer of characters whose first piece alone gets a blank before it. more: other pieces."""
    characters = sorted({*CHARACTERS.replace(" ", "▁"), "▁", "-"})
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in [*characters, "▁has", "im", *more])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def prepended() -> Tokenizer:
    """Return a tokenizer that puts a blank before each text between special tokens, as that of Llama 2."""
    tokenizer = unigram()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def word_piece() -> Tokenizer:
    characters = sorted({*CHARACTERS.lower(), *"e-_"} - {" ", "\n"})
    words = ["[UNK]", *characters, *(f"##{char}" for char in characters), "user", "im", "has"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


MAKE_TOKENIZER: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: byte_level(add_prefix_space=False),
    "byte-level with a prefix": lambda: byte_level(add_prefix_space=True),
    "unigram": unigram,
    "prepended": prepended,
    "WordPiece": word_piece,
}
