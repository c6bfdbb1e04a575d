"""Generate with transformers: batches of padded prompts, and one prompt whose text is streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from acsgd.commands.generation.model import LoadedModel
from acsgd.commands.generation.options import Decoding
from acsgd.commands.generation.prompts import PromptEncoder
from acsgd.commands.generation.ranks import SINGLE_PROCESS, Ranks
from acsgd.streams import mix_seed, seed_generators

Ids = list[int]


@dataclass(frozen=True)
class Generator:
    """A model with its tokens and how the next token is chosen."""

    loaded: LoadedModel
    prompts: PromptEncoder
    decoding: Decoding
    ranks: Ranks = SINGLE_PROCESS
    """Which generate together: all call the same methods, within `Ranks.map`."""

    def limit(self, prompt: Ids) -> int:
        """Return the maximum number of new tokens after a prompt."""
        return min(self.decoding.max_new_tokens, self.prompts.max_new_tokens(len(prompt)))

    def generate(self, prompts: Sequence[Ids], *, index: int) -> list[str]:
        """Return the texts after some prompts that have the same limit.

        index: position of the first one among all prompts; part of the seed.
        """
        output = self._generate(prompts, self.limit(prompts[0]), index)
        return [self.prompts.decode(ids) for ids in output]

    def stream(self, prompt: Ids, *, index: int, is_stopped: Callable[[], bool] = lambda: False) -> str:
        """Print the text after a prompt on standard output while it is generated, and return it.

        is_stopped: called after each token; ends the text.
        """
        streamer = None
        if self.decoding.num_beams == 1 and self.ranks.is_main:
            streamer = TextStreamer(self.loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        criteria = StoppingCriteriaList([_StopCriterion(is_stopped)])
        output = self._generate([prompt], self.limit(prompt), index, streamer=streamer, stopping_criteria=criteria)
        text = self.prompts.decode(output[0])
        if streamer is None and self.ranks.is_main:
            print(text, flush=True)
        return text

    def pads_exactly(self) -> bool:
        """Return whether padding leaves the text of a prompt unchanged, by a trial with a few tokens.

        It does if the model takes positions from the mask, or uses none. Not so in some recurrent models, and where an
        indexer chooses a fixed number of tokens to attend to, of which padding takes some. Nor if texts end at strings
        alone: transformers pads one that ended earlier than others of its batch only if there are ids that end texts.
        """
        generation = self.loaded.model.generation_config
        assert generation is not None
        if generation.stop_strings and not self.prompts.ends:
            return False
        config = self.loaded.model.config.get_text_config()
        if getattr(config, "index_topk", None) is not None:
            return False
        long, short = [[(token + 3) % config.vocab_size for token in range(length)] for length in (11, 4)]
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 1, "output_logits": True}
        alone, padded = (
            self._call(prompts, return_dict_in_generate=True, **options) for prompts in ([short], [short, long])
        )
        tolerance = torch.finfo(self.loaded.model.dtype).eps ** 0.5
        for one, two in zip(alone.logits, padded.logits, strict=True):
            one, two = one[0], two[0]
            finite = one.isfinite()  # some models give -inf to ids without a token
            if not finite.any():  # this rank has no head; its answer does not count
                return False
            if (one - two)[finite].abs().max() > tolerance * one[finite].abs().max():
                return False
            if one.argmax() != two.argmax():  # equal up to rounding; later tokens may differ
                break
        return True

    def _generate(self, prompts: Sequence[Ids], limit: int, index: int, **options: Any) -> list[Ids]:
        """Return the new ids after each prompt, up to the first one that ends a text."""
        decoding = self.decoding
        seed_generators(mix_seed(decoding.seed, index))
        sampling = {"temperature": decoding.temperature, "top_k": decoding.top_k, "top_p": decoding.top_p}
        output = self._call(
            prompts,
            max_new_tokens=limit,
            num_beams=decoding.num_beams,
            do_sample=decoding.temperature > 0,
            return_dict_in_generate=False,
            **(sampling if decoding.temperature else {}),
            **options,
        )
        start = 1 if self.prompts.is_encoder_decoder else max(map(len, prompts))
        return [self._cut(ids) for ids in output[:, start:].tolist()]

    def _cut(self, ids: Ids) -> Ids:
        """Return ids without the padding after a text that ended earlier than others of its batch."""
        ended = next((place for place, id_ in enumerate(ids, start=1) if id_ in self.prompts.ends), len(ids))
        return ids[:ended]

    @torch.inference_mode()
    def _call(self, prompts: Sequence[Ids], **options: Any) -> Any:
        """Call transformers' generate with padded prompts. Other fields of generation_config.json hold."""
        ids, mask = pad(prompts, self.prompts.padding, on_left=not self.prompts.is_encoder_decoder)
        model = self.loaded.model
        generate: Any = model.generate
        for name, value in self.ranks.arguments().items():
            options[name] = [*options.get(name, ()), *value] if isinstance(value, list) else value
        try:
            return generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                pad_token_id=self.prompts.padding,
                eos_token_id=self.prompts.ends or None,
                tokenizer=self.loaded.tokenizer,  # for stop_strings of generation_config.json
                num_return_sequences=1,
                **options,
            )
        except ValueError as error:
            raise ValueError(
                f"transformers cannot generate with {type(model).__name__} and its generation_config.json: "
                f"{' '.join(str(error).split())}"
            ) from None


def pad(prompts: Sequence[Ids], padding: int, *, on_left: bool) -> tuple[Tensor, Tensor]:
    """Return the ids of prompts as a matrix, and the mask of the ids that are not padding, both [B, T]."""
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), padding), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        columns = slice(width - len(prompt), width) if on_left else slice(len(prompt))
        ids[row, columns] = torch.tensor(prompt)
        mask[row, columns] = 1
    return ids, mask


class _StopCriterion(StoppingCriteria):
    """Ends a text when a function says so."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self._is_stopped(), device=input_ids.device)
