"""Whether padded batches generate what each prompt generates alone, for all causal types of the installed transformers:

    .venv/bin/python -m benchmarks.models.padding [--types llama rwkv] [--json runs/benchmarks/padding.json]

For each type, a small model of the kinds of layers of its default config continues prompts of several lengths greedily,
in one batch padded on the left and one by one. Also reported: whether the trial with which `acsgd generate` decides if
it may pad says the same. Results are kept in the JSON file after every type.
"""

from __future__ import annotations

import argparse
import json
import signal
import warnings
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from acsgd.commands.generation.decode import Generator, pad
from acsgd.commands.generation.model import LoadedModel
from acsgd.commands.generation.options import Decoding
from acsgd.commands.generation.prompts import PromptEncoder
from acsgd.layers.small_config import small_configs
from acsgd.layers.verify import fill_with_random
from acsgd.model_classes import MODEL_CLASSES

BOUNDS = (2**21, 2**23, 2**25)
"""Bounds for the parameters of a model; small ones are quick."""
LENGTHS = (3, 9, 14, 6, 20)
"""Lengths of the prompts, tokens."""
NEW_TOKENS = 12
LIMIT_S = 120
"""Time limit per type, seconds."""


class TimeLimit(BaseException):
    """A type takes longer than LIMIT_S."""


def small_model(model_type: str) -> PreTrainedModel:
    """Return a small model of a type with random weights. Raises what transformers does if there is none."""
    build = MODEL_CLASSES["lm"].build
    config = CONFIG_MAPPING[model_type]()
    configs = list(small_configs(config, build(config)))
    problem: Exception = ValueError(f"each small model has more than {max(BOUNDS):,} parameters")
    for bound in BOUNDS:
        for small in configs:
            try:
                model = build(small)
                if model.num_parameters() > bound or not model.can_generate():
                    continue
                model = fill_with_random(model).eval()
                new_tokens(model, [[5, 6, 7]])
                return model
            except Exception as error:  # raised in transformers' code, by sizes that do not go together
                problem = error
    raise problem


@torch.inference_mode()
def new_tokens(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens after prompts, none of which ends a text."""
    ids, mask = pad(prompts, 0, on_left=True)
    generate: Any = model.generate
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    output = generate(input_ids=ids, attention_mask=mask, **options)
    return output[:, ids.shape[1] :].tolist()


def result_of(model_type: str) -> dict[str, Any]:
    """Return what becomes a row of the table."""
    signal.alarm(LIMIT_S)
    try:
        model = small_model(model_type)
        size = model.config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, size, (length,), generator=draw).tolist() for length in LENGTHS]
        alone = [new_tokens(model, [prompt])[0] for prompt in prompts]
        encoder = PromptEncoder(None, [], [], [], 0, None, is_encoder_decoder=False)  # type: ignore[arg-type]
        loaded = LoadedModel(Path(), model, None)  # type: ignore[arg-type]
        trial = Generator(loaded, encoder, Decoding()).pads_exactly()
        return {"status": "equal" if new_tokens(model, prompts) == alone else "differ", "trial": trial}
    except TimeLimit:
        return {"status": "not run", "reason": f"more than {LIMIT_S} s"}
    except Exception as error:  # raised in transformers' code
        return {"status": "not run", "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    finally:
        signal.alarm(0)


def end(number: int, frame: FrameType | None) -> None:
    raise TimeLimit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/padding.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, end)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for model_type in arguments.types:
        if model_type not in results:
            results[model_type] = result_of(model_type)
            arguments.json.write_text(json.dumps(results, indent=1))
    groups = defaultdict(list)
    for model_type in arguments.types:
        result = results[model_type]
        groups[result["status"], str(result.get("trial", "-"))].append(model_type)
    table = Table("padded and alone", "trial passes", "types", "")
    for (status, trial), types in sorted(groups.items()):
        table.add_row(status, trial, str(len(types)), " ".join(types) if len(types) < 50 else "")
    Console().print(table)


if __name__ == "__main__":
    main()
