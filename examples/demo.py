"""Train a small language model on this machine, save it, export it and generate text with it.

    python examples/demo.py            (or `make demo`, which sets up .venv first)

Nothing is downloaded: the text is Python's own help topics, the tokenizer is trained on it, and the model is
initialized from a config. Four processes under torchrun train it, as two pipeline stages x two replicas.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

RUN = Path("runs/demo")
PROCESSES = 4
VOCABULARY = 2048
END = "<|endoftext|>"
PROMPT = "The for statement is used to"

GENERATE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
directory, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
tokens = tokenizer(prompt, return_tensors="pt")
set_seed(0)
out = model.generate(**tokens, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=40)
print(" ".join(tokenizer.decode(out[0]).split()))
"""


def main() -> None:
    """Run the demo, from the root of the project. Exits with the status of the first command that fails."""
    console = Console(soft_wrap=True)
    started = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    console.rule("1  model: a GPT-2 config and a tokenizer trained on pydoc_data.topics")
    make_model(RUN / "model")
    console.rule(f"2  training: torchrun with {PROCESSES} processes, 2 stages x 2 replicas")
    run([torchrun(), "--nproc-per-node", str(PROCESSES), "train.py", "examples/demo.toml"])
    checkpoint = max((RUN / "checkpoints").glob("step-*"))
    console.rule("3  export to Hugging Face format")
    run([sys.executable, "-m", "acsgd.cli", "convert", "to-hf", str(checkpoint), str(RUN / "hf")])
    console.print(f"wrote {RUN / 'hf'}")
    console.rule("4  text generation by transformers alone: AutoModelForCausalLM.from_pretrained")
    text = run([sys.executable, "-c", GENERATE, str(RUN / "hf"), PROMPT], capture=True)
    console.print(text.strip(), markup=False, highlight=False)
    console.print(closing_table(checkpoint, time.monotonic() - started))


def make_model(directory: Path) -> None:
    """Write config.json and a byte-level BPE tokenizer into `directory`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)
    tokenizer.save_pretrained(directory)
    end = tokenizer.eos_token_id
    config = GPT2Config(
        n_embd=256,
        n_layer=4,
        n_head=8,
        n_positions=128,
        vocab_size=len(tokenizer),
        bos_token_id=end,
        eos_token_id=end,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(directory)


def torchrun() -> str:
    """Return the path of torchrun in this Python's environment."""
    return str(Path(sys.executable).with_name("torchrun"))


def run(command: Sequence[str], *, capture: bool = False) -> str:
    """Run a command and return its output if `capture`. Exits if the command fails."""
    # one thread per process: four processes with a thread per core each would slow each other down
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def closing_table(checkpoint: Path, seconds: float) -> Table:
    """Summarize the run from its metrics.jsonl."""
    records = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    first, last = records[0], records[-1]
    training_s = sum(record["step_s"] for record in records)
    table = Table(title=f"demo: {seconds:.0f} s in total", show_header=False, title_justify="left")
    table.add_row("train loss, first -> last step", f"{first['loss']:.3f} -> {last['loss']:.3f}")
    table.add_row("held-out loss, last step", f"{last['eval_loss']:.3f}")
    table.add_row("target tokens", f"{last['tokens']:,}")
    table.add_row("target tokens per second", f"{last['tokens'] / training_s:,.0f}")
    table.add_row("bytes per step between stages, activations", f"{last['pp_forward_bytes']:,}")
    table.add_row("bytes per step between stages, gradients", f"{last['pp_backward_bytes']:,}")
    table.add_row("bytes per step between replicas", f"{last['dp_bytes']:,}")
    table.add_row("checkpoint (layer shards)", str(checkpoint))
    table.add_row("Hugging Face model", str(RUN / "hf"))
    table.add_row("metrics, configuration", f"{RUN / 'metrics.jsonl'}, {RUN / 'config.toml'}")
    return table


if __name__ == "__main__":
    main()
