"""Generation in two stages against one process that has the whole model, on the same two cores:

    .venv/bin/python -m benchmarks.models.generation [--rounds 5] [--json runs/benchmarks/generation.json]

Both generate greedily for the same prompts with random weights of GPT-2's size, in batches of 8: `acsgd generate` with
two processes of one thread each, and transformers with accelerate's device_map in one of the processes, with two
threads. The sides alternate (common/compare.py); loading is not timed. Also reported: parameters in memory per process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from acsgd.commands.generation.command import open_generator
from acsgd.commands.generation.options import Decoding
from acsgd.commands.generation.ranks import StageRanks
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.topology import Topology
from benchmarks.common.compare import RankRounds, alternate, on_ranks, setting, summarise

STAGES = 2
BATCH = 8


def run(
    rank: int, store: str, model: str, prompts: Sequence[list[int]], new_tokens: int, rounds: int
) -> tuple[RankRounds, int]:
    """Alternate on one rank; return its rounds, and the number of parameters that it keeps for its stage."""
    launch = Launch(rank=rank, local_rank=rank, world_size=STAGES, local_world_size=STAGES)
    topology, file_store = Topology.of(rank, STAGES, STAGES), dist.FileStore(store, STAGES)
    batches = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
    with connect(topology, timeout=timedelta(minutes=30), store=file_store) as groups, contextlib.ExitStack() as stack:
        ranks = StageRanks(groups, launch, stack, timeout_s=1800.0)
        decoding = Decoding(batch=BATCH, max_new_tokens=new_tokens)
        generator = open_generator(model, decoding, dtype="float32", device="cpu", ranks=ranks)
        whole: Any = AutoModelForCausalLM.from_pretrained(model, device_map={"": "cpu"}) if rank == 0 else None

        def ours(step: int) -> float:
            torch.set_num_threads(1)
            for _ in ranks.map(lambda batch: generator.generate(batch, index=0), batches):
                pass
            return float(len(prompts)) * (rank == 0)

        def theirs(step: int) -> float:
            if whole is None:
                return 0.0
            torch.set_num_threads(STAGES)
            options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            with torch.inference_mode():
                for batch in batches:
                    ids = torch.tensor(batch)
                    whole.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            return float(len(prompts))

        def barrier() -> None:
            groups.waits.wait(groups.world.all_reduce(torch.zeros(1)))

        result = alternate(ours, theirs, warmup=1, rounds=rounds, steps=1, barrier=barrier)
        return result, sum(param.numel() for _, param in generator.loaded.own_parameters())


def save_model(directory: Path, options: dict[str, int]) -> None:
    """Write a GPT-2 with random weights, and a tokenizer, of which no text is used."""
    from tokenizers import Tokenizer, models

    config = GPT2Config(**options, bos_token_id=None, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    vocabulary = {f"<{id_}>": id_ for id_ in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>").save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=json.loads, default={}, help="options of GPT2Config, a JSON object")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/generation.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model", arguments.model)
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(1, 500, (arguments.prompts, arguments.length), generator=draw).tolist()
        parts = (f"{name}/store", f"{name}/model", prompts, arguments.new_tokens, arguments.rounds)
        rounds, parameters = zip(*on_ranks(STAGES, run, *parts, timeout_s=3600.0), strict=True)
    compared = summarise(rounds, steps=1)
    tokens = arguments.prompts * arguments.new_tokens
    table = Table("", "tokens/s", "M parameters per process")
    millions = [f"{count / 1e6:.1f}" for count in parameters]
    table.add_row("acsgd generate, 2 stages", f"{tokens / compared.ours_s:.1f}", ", ".join(millions))
    table.add_row("transformers, 1 process", f"{tokens / compared.theirs_s:.1f}", "all")
    Console().print(table)
    low, high = compared.quartiles
    print(f"time relative to one process: median {compared.median:.3f}, quartiles {low:.3f} to {high:.3f}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    result = {**setting("cpu"), **compared._asdict(), "parameters": parameters, "tokens": tokens}
    arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
