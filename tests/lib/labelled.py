"""Small models and tokenizers for tasks with labelled examples and target sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from acsgd.model_classes import MODEL_CLASSES

BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "deberta-v2": {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "bart": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "feed_forward_proj": "gated-gelu"},
}


def with_special_tokens(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes "<s> a </s>" and "<s> a </s> b </s>", and pads with "<pad>"."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    copy = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **special)
    ids = [(token, copy.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    copy.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ids
    )
    return copy


def save_model(directory: Path, tokenizer: PreTrainedTokenizerFast, family: str, task: str, **options: Any) -> Path:
    """Write a model of SIZES with new weights and without dropout, and its tokenizer."""
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SIZES[family] | options,
    )
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    MODEL_CLASSES[task].auto_class.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
