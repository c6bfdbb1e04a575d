"""Laws of a table that is both embedding and head, when these are on different ranks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.models import DROPOUT, blocks_of
from lib.ranks import on_ranks
from lib.training import RELATIVE, TIMEOUT, make_config, mask, oracle_losses, train
from lib.views import ScriptedView, train_in_views
from torch import Tensor

from acsgd.config.options import Config, ReplicaConfig
from acsgd.groups import connect
from acsgd.io.data.batches import Dataset
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.pp.tied.rows import RowTransfer
from acsgd.pp.tied.ties import Ties
from acsgd.pp.wire.coder import CodecIndices
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.pp.wire.mailbox import _Encoding
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.report import DP_BYTES, TIED_BYTES
from acsgd.run.session import StepResult
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_data
from acsgd.train import train_step

TinyModel = Callable[..., Path]
STEPS = 5
TABLES = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}


class Trained(NamedTuple):
    """What one rank has after training."""

    losses: list[float]
    table: dict[str, Tensor]
    """The table and its moments by name; empty on ranks without them."""
    is_copy: bool
    tied_bytes: list[int]
    """Of all ranks, per step."""
    blocking_requests: int
    """Number of times that a step waited for rows that were requested when it began."""
    dp_bytes: list[int]
    """Of all ranks, per step."""
    grad_norms: list[float]
    evaluation: dict[str, float]
    """Metrics of the first batch after training."""


def train_on(rank: int, world_size: int, store: Path, configs: Sequence[Config], masked: bool = False) -> list[Trained]:
    """Train each config on batches that are read ahead. masked: whether some labels are ignored."""
    torch.set_num_threads(1)
    return [
        _train(rank, world_size, Path(f"{store}-{number}"), config, masked) for number, config in enumerate(configs)
    ]


def _train(rank: int, world_size: int, store: Path, config: Config, masked: bool) -> Trained:
    job, results, fetched = prepare(config, Launch(rank, rank, world_size)), list[StepResult](), list[int]()
    fetch = Ties._fetch

    def counted(ties: Ties, batch: Batch, step: int, codecs: CodecIndices) -> list[RowTransfer]:
        fetched.append(step)
        return fetch(ties, batch, step, codecs)

    with (
        connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(Ties, "_fetch", counted)
        patch.setattr("lib.training.train_step", _recording(results))
        session = build_session(job, open_weight_source(job), groups)
        batches = Dataset(open_data(job).reader, range(config.optim.num_steps))
        losses = train(session, map(_masked, batches) if masked else batches)
        weights = [weight for weight in session.weights if weight.is_tied]
        table = {weight.key: weight.master.detach() for weight in weights}
        table |= {
            name: tensor for name, by_key in session.optimizer.state_of(weights).items() for tensor in by_key.values()
        }
        blocking = len(fetched)
        patch.setattr(_Encoding, "ready", lambda _: False)  # as on a device that is late; else sends would hide waits
        first = map(_masked, Dataset(open_data(job).reader, range(1)))
        evaluation = session.evaluate(first, config.optim.num_steps)
        return Trained(
            losses,
            table,
            any(weight.is_copy for weight in weights),
            [result.summary[TIED_BYTES] for result in results],
            blocking,
            [result.summary[DP_BYTES] for result in results],
            [result.grad_norm for result in results],
            evaluation,
        )


def _recording(results: list[StepResult]) -> Callable[..., object]:
    def recorded(*args: object, **options: object) -> object:
        results.append(train_step(*args, **options))  # type: ignore[arg-type]
        return results[-1]

    return recorded


def _masked(batch: Batch) -> Batch:
    return mask(batch)


def configs_of(model: Path, run_dir: Path, *, stages: int, how: Sequence[str] = ("rows", "dense")) -> list[Config]:
    schedule = "interleaved:chunks=2" if stages == 2 else "1f1b"
    return [make_config(model, run_dir, steps=STEPS, stages=stages, schedule=schedule, tied=tied) for tied in how]


@pytest.mark.parametrize(
    ("family", "options"), [("gpt2", DROPOUT), ("llama", {"tie_word_embeddings": True, "vocab_size": 520})]
)
def test_steps_are_those_of_one_process_and_so_are_table_and_moments(
    family: str, options: dict[str, object], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """1, 2 and 4 stages, 1 and 2 replicas, with masked targets, clipping, and a last evaluation.

    One of the models has dropout, the other rows in its table that no token has.
    """
    model = tiny_model(family, **options, **blocks_of(family, 2))
    alone = make_config(model, tmp_path, steps=STEPS, micro=1)
    expected = oracle_losses(alone, masked=True)
    [one] = on_ranks(1, train_on, tmp_path / "one", [alone], True)[0]
    assert one.losses == pytest.approx(expected, rel=RELATIVE)
    assert max(one.grad_norms) > alone.optim.clip, "nothing was clipped"
    splits = {2: [alone], 4: configs_of(model, tmp_path, stages=2, how=["rows"])}
    if family == "gpt2":
        splits = {2: [alone], 4: [*splits[4], *configs_of(model, tmp_path, stages=4)]}
    exchanged = {}
    for processes, configs in splits.items():
        by_rank = on_ranks(processes, train_on, tmp_path / f"on-{processes}", configs, True)
        for config, *ranks in zip(configs, *by_rank, strict=True):
            assert_same_training(config, ranks, one)
            exchanged[config.pp.tied, config.pp.stages, len(ranks) // config.pp.stages] = ranks[0].dp_bytes
    assert exchanged["rows", 1, 2] == exchanged["rows", 2, 2], "the replicas did not exchange the table once"


def assert_same_training(config: Config, ranks: Sequence[Trained], one: Trained) -> None:
    """Check what the ranks of a run have against `one` process."""
    stages, tied = config.pp.stages, config.pp.tied
    case = (tied, stages, len(ranks) // stages)
    assert ranks[0].losses == pytest.approx(one.losses, rel=RELATIVE), case
    assert ranks[0].grad_norms == pytest.approx(one.grad_norms, rel=1e-4), case
    last = ranks[stages - 1]
    for name, tensor in one.table.items():
        assert_close(last.table[name], tensor, (*case, name))
    holders = [rank for rank, each in enumerate(ranks[:stages]) if each.table]
    assert holders == ([0, stages - 1] if tied == "dense" else [stages - 1]), case
    assert last.is_copy == (tied == "dense"), case
    for rank, each in enumerate(ranks):
        of_stage = ranks[rank % stages].table
        assert all(torch.equal(each.table[name], of_stage[name]) for name in of_stage), "replicas differ"
        assert each.evaluation == pytest.approx(one.evaluation, rel=RELATIVE), case
        assert each.blocking_requests == 1, case


def assert_close(x: Tensor, expected: Tensor, case: object) -> None:
    """Check that two results of sums in different orders are equal, relative to the largest value."""
    assert float((x - expected).abs().max()) <= 1e-4 * float(expected.abs().max()), case


def test_copies_on_two_ranks_stay_equal_bit_for_bit(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model(n_layer=2)
    cuts = [(2, "interleaved"), (4, "gpipe")]
    configs = [
        make_config(model, tmp_path, steps=4, stages=stages, schedule=schedule, tied="dense")
        for stages, schedule in cuts
    ]
    for (stages, schedule), *ranks in zip(cuts, *on_ranks(4, train_on, tmp_path / "store", configs), strict=True):
        tables = [_digest(each.table) for each in ranks]
        assert tables[0] == tables[stages - 1] != _digest({}), schedule
        assert tables == [tables[rank % stages] for rank in range(4)], f"replicas differ: {schedule}"


def _digest(table: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(x.numpy().tobytes() for _, x in sorted(table.items()))).hexdigest()


def test_rows_travel_once_per_step_each_way_and_with_8_bits_a_quarter(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Per direction not more than fp32 activations in one direction, since a token has at most one row."""
    model = tiny_model("llama", tie_word_embeddings=True, num_hidden_layers=2)
    configs = configs_of(model, tmp_path, stages=2, how=("rows", "rows:bits=8", "dense", "rows:entropy_coding=true"))
    configs = [dataclasses.replace(c, pp=dataclasses.replace(c.pp, schedule="1f1b")) for c in configs]
    exact, quantized, dense, coded = on_ranks(2, train_on, tmp_path / "store", configs)[1]
    width, vocabulary = 32, 512
    job = prepare(dataclasses.replace(configs[0], pp=dataclasses.replace(configs[0].pp, stages=1)), Launch())
    for step, batch in enumerate(Dataset(open_data(job).reader, range(STEPS))):
        tokens = micros_of(batch)
        activations = sum(map(len, tokens)) * width * 4
        rows = len(set().union(*tokens))
        requests = 0 if batch.upcoming is None else request_bytes(micros_of(batch.upcoming))
        requests += request_bytes(tokens) if step == 0 else 0
        headers = HEADER_BYTES * (messages(tokens) + messages(tokens[::-1]))
        assert exact.tied_bytes[step] == requests + headers + 2 * 4 * rows * width
        assert rows * width * 4 <= activations
        scales = 2 * 3 * 16 * len(tokens)  # and padding
        assert quantized.tied_bytes[step] - requests - headers <= 0.3 * 2 * 4 * rows * width + scales
        assert dense.tied_bytes[step] == 2 * (HEADER_BYTES + 4 * vocabulary * width)
    assert quantized.losses == pytest.approx(exact.losses, rel=1e-3)
    assert quantized.losses != exact.losses
    assert coded.losses == exact.losses, "entropy coding is not lossless"
    assert all(ours <= theirs for ours, theirs in zip(coded.tied_bytes, exact.tied_bytes, strict=True))
    assert sum(coded.tied_bytes) < sum(exact.tied_bytes), "messages of 5 kB, of which a tenth is their Huffman codes"


def micros_of(batch: Batch) -> list[list[int]]:
    """Return the tokens of each micro-batch."""
    assert batch.inputs is not None
    return [micro.flatten().tolist() for micro in batch.inputs["input_ids"]]


def messages(tokens: Sequence[Sequence[int]]) -> int:
    """Return how many micro-batches have tokens that none before has."""
    return sum(bool({*micro}.difference(*tokens[:index])) for index, micro in enumerate(tokens))


def request_bytes(tokens: Sequence[Sequence[int]]) -> int:
    """Return the bytes of a request for the rows of a batch."""
    return HEADER_BYTES + _aligned(8 * len(set().union(*tokens)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def test_a_rank_without_weights_of_its_own_only_looks_up_rows(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(
        tiny_model("llama", tie_word_embeddings=True, num_hidden_layers=2), tmp_path, stages=2, layers=(0, 2)
    )
    for trained in on_ranks(2, train_on, tmp_path / "store", [config]):
        assert trained[0].losses == pytest.approx(oracle_losses(config), rel=RELATIVE)


@pytest.mark.parametrize("names", [("joined",), pytest.param(("calm", "interrupted"), marks=pytest.mark.soak)])
def test_a_view_of_other_replicas_continues_with_the_table_of_the_last_stage(
    names: tuple[str, ...], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """2 stages with local weights: a replica joins, or an exchange is run again."""
    config = make_config(tiny_model(n_layer=1), tmp_path, steps=6, stages=2)
    config = dataclasses.replace(config, dp=ReplicaConfig("cocktail_grad:topk=.25"))
    every, last = (0, 1, 2, 3), 6
    scripts = {
        "calm": [ScriptedView(every, last)],
        "interrupted": [ScriptedView(every, 2, late=every), ScriptedView(every, 4, unsynced=every)],
        "joined": [ScriptedView((0, 1), 3), ScriptedView(every, last)],
    }
    scripts["interrupted"].append(ScriptedView(every, last))
    runs = on_ranks(4, train_in_views, tmp_path / "store", {name: (config, scripts[name]) for name in names})
    if "interrupted" in names:
        assert runs[0]["interrupted"].losses == pytest.approx(runs[0]["calm"].losses, rel=RELATIVE)
    for name in names:
        for step in range(4, last + 1):
            digests = {run[name].digests[step] for run in runs}
            assert len(digests) == 2, f"{name}: the replicas of a stage have different weights after step {step}"


def test_on_one_rank_nothing_travels(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model(n_layer=2), tmp_path, steps=3, schedule="interleaved:chunks=2")
    [[trained]] = on_ranks(1, train_on, tmp_path / "store", [config])
    assert {TABLES["gpt2"], "exp_avg", "exp_avg_sq"} <= trained.table.keys()
    assert trained.tied_bytes == [0, 0, 0]
