"""1-bit Adam on tokens that its exact steps have not seen: as published, as in acsgd, and all-reduce.

    torchrun --nproc-per-node 2 -m benchmarks.replicas.rare_tokens

Trains a GPT-2 of one layer on tokens with Zipf frequencies, whose successors are half the time a fixed permutation, on
one replica per process. "rare" are the tokens that no replica has had in the exact steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from acsgd.config.options import OptimConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.peers import Peers
from acsgd.groups import connect, open_store
from acsgd.launch import Launch
from acsgd.optim.adamw import AdamWOptimizer
from acsgd.optim.base import PLAIN_STEP
from acsgd.optim.gradient_scale import clip_factor, scale_gradients_, squared_norm
from acsgd.shards.weights import Weight
from acsgd.topology import Topology

BATCH, TOKENS, VOCABULARY, WIDTH = 2, 64, 3000, 32
HELD_OUT = 10**6
"""Number of the first held-out batch."""
AS_PUBLISHED = 10**9
"""Number of replicas with which second moments never grow."""


class Result(NamedTuple):
    """Losses and norms of a training run."""

    held_out: float
    highest: float
    """Highest training loss after the exact steps."""
    rare_norm: float
    """Largest norm of the embedding of a rare token."""


def batch(number: int) -> Tensor:
    """Return a batch of sequences [BATCH, TOKENS]."""
    draw = torch.Generator().manual_seed(number)
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    frequencies = 1 / torch.arange(1.0, VOCABULARY + 1)
    tokens = torch.multinomial(frequencies, BATCH * TOKENS, True, generator=draw).view(BATCH, TOKENS)
    follows = torch.rand(BATCH, TOKENS, generator=draw) < 0.5
    for i in range(1, TOKENS):
        tokens[:, i] = torch.where(follows[:, i], successor[tokens[:, i - 1]], tokens[:, i])
    return tokens


def train(peers: Peers, spec: str, config: OptimConfig, exact_steps: int, *, published: bool, tied: bool) -> Result:
    """Train a new model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0)).eval()
    weights = [Weight(name, param, param) for name, param in model.named_parameters()]
    sync, optimizer = from_spec(spec, MODES, key="dp.mode").open(weights, peers), AdamWOptimizer(weights, config)
    losses = []
    for step in range(config.steps):
        tokens, how = batch(step * peers.size + peers.replica), sync.local_step(step)
        sync.begin_step(step)
        loss = model(tokens, labels=tokens).loss
        (loss if how is not None else loss / peers.size).backward()
        for weight in weights:
            sync.grad_ready(weight, is_final=True)
        sync.reduce()
        sync.wait()
        sync.commit()
        scale_gradients_(weights, clip_factor(float(squared_norm(weights)) ** 0.5, config.clip))
        if how is not None and published:
            how = how._replace(replicas=AS_PUBLISHED)
        optimizer.step(step, how or PLAIN_STEP)
        moments = optimizer.second_moments(weights)
        sync.exchange(step, moments)
        sync.after_step(step, moments)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / peers.size)
    with torch.no_grad():
        held_out = [float(model(tokens, labels=tokens).loss) for tokens in map(batch, range(HELD_OUT, HELD_OUT + 30))]
        norms = model.transformer.wte.weight[rare_tokens(exact_steps, peers.size)].norm(dim=1)
    return Result(sum(held_out) / len(held_out), max(losses[exact_steps:]), float(norms.max()))


def rare_tokens(exact_steps: int, replicas: int) -> Tensor:
    """Return the ids of the tokens that no replica has in the exact steps."""
    seen = torch.cat([batch(number).flatten() for number in range(exact_steps * replicas)])
    return (torch.bincount(seen, minlength=VOCABULARY) == 0).nonzero().flatten()


def compare(peers: Peers, config: OptimConfig, exact_steps: Sequence[int], *, tied: bool) -> None:
    """Train with every method, and print a table row each on the first replica."""
    for steps in exact_steps:
        quantized = [f"quantized:bits={bits},exact_steps={steps}" for bits in (4, 1)]
        runs = [("allreduce", False), *((spec, published) for spec in quantized for published in (True, False))]
        for spec, published in runs:
            started = time.perf_counter()
            result = train(peers, spec, config, steps, published=published, tied=tied)
            if peers.replica == 0:
                name = f"{spec}{', as published' if published else ''}"
                print(
                    f"{'tied' if tied else 'untied':6} {name:47} held-out loss {result.held_out:9.4f}, highest "
                    f"{result.highest:10.3f}, norm of a rare row up to {result.rare_norm:10.3f}, "
                    f"{time.perf_counter() - started:.0f} s",
                    flush=True,
                )


def main() -> None:
    """Run on all processes that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--exact-steps", type=int, nargs="+", default=[2, 20])
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    launch = Launch.from_env()
    config = OptimConfig(lr=options.lr, steps=options.steps, warmup=options.steps // 20)
    topology = Topology.of(launch.rank, launch.world_size, 1)
    with connect(topology, timeout=timedelta(seconds=300), store=open_store(launch)) as groups:
        for tied in (True, False):
            compare(Peers(groups.dp, groups.waits), config, options.exact_steps, tied=tied)
        dist.barrier()


if __name__ == "__main__":
    main()
