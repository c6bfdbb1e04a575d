"""Law: the host waits for the device once per step, and for each message that it sends through gloo.

Neither micro-batches, layers nor buckets add a wait. The device is a stand-in, whose losses equal those of the CPU.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.cache import with_shared_cache
from lib.forks import save_model
from lib.ordered import ordered_transport
from lib.ranks import on_ranks
from lib.stand_in import StandInStreams, on_stand_in
from lib.training import TIMEOUT, batches_of, losses_of_rank, plain_config
from torch import nn
from torch.utils._pytree import tree_leaves

from acsgd.codecs.identity import DTYPES
from acsgd.config.options import AdapterConfig, Config, ReplicaConfig
from acsgd.dp import MODES
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.optim import OPTIMIZERS
from acsgd.optim.offload import MAX_IN_FLIGHT
from acsgd.pp import SCHEDULES
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.shards import load
from acsgd.train import train_step

ONCE = Counter({"copy to the host": 1})
"""The read of loss and gradient norm at the end of a step."""
HEADERS = Counter({"copy to the host": 1})
"""The read of the headers of all messages that stayed on the device."""
SHAPES = {"small": (2, 3), "large": (3, 2)}
"""Blocks, and sequences of a micro-batch."""
NONE: Mapping[str, Any] = MappingProxyType({})


class Row(NamedTuple):
    """A run."""

    blocks: int = 2
    micro: int = 3
    """Sequences of a micro-batch, of 6 in a step."""
    pp: Mapping[str, Any] = NONE
    dp: Mapping[str, Any] = NONE
    """Two replicas with these options; none = one."""
    optim: Mapping[str, Any] = NONE
    dtype: str = "fp32"
    model: Mapping[str, Any] = NONE
    data: Mapping[str, Any] = NONE
    adapter: str | None = None
    is_tied: bool = False
    """Whether the head is the table of the embedding, of which stages exchange rows."""
    is_ordered: bool = False
    """Whether its messages stay on the device, over the ordered transport; else they travel over gloo."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return 2 if self.pp or self.dp else 1

    def config(self, directory: Path) -> Config:
        """Return the run, with files in a directory of the module."""
        model = directory / f"model-{self.blocks}-{self.is_tied}" / "model"
        if not model.exists():
            save_model(model, blocks=self.blocks, tied=self.is_tied)
        config = plain_config(model, directory / "runs", steps=3, micro=self.micro, **self.pp)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, dtype=self.dtype, **self.model),
            data=dataclasses.replace(config.data, **{"sequence": 16, **self.data}),
            adapter=AdapterConfig(self.adapter),
            dp=ReplicaConfig(**self.dp),
            optim=dataclasses.replace(config.optim, **self.optim),
        )
        return with_shared_cache(config)


TWO = {"stages": 2}
LOSSY = {"stages": 2, "forward": "fixpoint:bits=4", "backward": "fixpoint:bits=4"}
CODECS = ("fixpoint:bits=4", "fixpoint:bits=3,scale=l2,centroids=true", "lloyd:bits=4", "hadamard:bits=4,low=4")
ROWS = {
    "one stage": Row(),
    "two stages over gloo": Row(pp=TWO),
    "two stages": Row(pp=TWO, is_tied=True, is_ordered=True),
}
"""Runs of `make test`."""
SOAKED = {
    "one stage, larger": Row(4, 1),
    "two stages over gloo, larger": Row(4, 1, pp=TWO),
    "lossy over gloo": Row(pp=LOSSY),
    "lossy over gloo, larger": Row(4, 1, pp=LOSSY),
    "two stages, larger": Row(8, 2, pp=TWO, is_tied=True, is_ordered=True),
    "two stages, rows over gloo": Row(pp=TWO, is_tied=True),
    "two stages, entropy-coded rows": Row(pp={**TWO, "tied": "rows:entropy_coding=true"}, is_tied=True),
    "two stages, dense ties": Row(4, 1, pp={**TWO, "tied": "dense"}, is_tied=True, is_ordered=True),
    "two stages, not tied": Row(4, 1, pp=TWO, is_ordered=True),
    "two stages, zb, a codec and LoRA": Row(
        4, 1, pp={**TWO, "schedule": "zb", "forward": "fixpoint:bits=4"}, adapter="lora:r=2,alpha=4", is_ordered=True
    ),
    "two stages, prompt tuning": Row(
        4, 1, pp=TWO, data={"sequence": 14}, adapter="prompt_tuning:tokens=2", is_ordered=True
    ),
    "two stages, padded rows": Row(4, 1, pp=TWO, data={"rows": "single"}, is_ordered=True),
    "two stages, documents apart": Row(4, 1, pp=TWO, data={"rows": "pack", "isolate": True}, is_ordered=True),
    "two stages, frozen blocks": Row(4, 1, pp=TWO, model={"freeze": "*.w?e.*,*.h.0.*"}, is_ordered=True),
    **{
        f"two stages, {spec}": Row(4, 1, pp={**TWO, "forward": spec, "backward": spec}, is_ordered=True)
        for spec in CODECS
    },
    **{
        f"two stages, {name}": Row(4, 1, pp={**TWO, "schedule": name}, is_ordered=True)
        for name in (*SCHEDULES, "1f1b:lead=2,split_last=true")
    },
}
SHARDS = ("optimizer", "gradients", "weights")
SMALL = "bucket_mb=0.002"
"""Option with which most weights have buckets of their own."""
EXCHANGING = {
    "cocktail": ":random=.5",
    "diloco": ":inner=1,bits=8,moment_correction=true",
    "sparseloco": ":inner=1,chunk=16",
    "quantized": ":exact_steps=1",
    "powersgd": ":rank=2,warm_start=false",
}
"""Options of modes, with which they exchange in each step, or after the first."""
SPECS = {name: name + EXCHANGING.get(name, "") for name in MODES}
OF_SHAPE: dict[str, dict[str, Any]] = {
    **{f"optim.name={name}": {"optim": {"name": name}} for name in OPTIMIZERS if name != "adamw8bit"},
    **{f"dp.mode={spec}": {"dp": {"mode": spec}} for spec in SPECS.values()},
    **{f"dp.mode={spec}, ordered": {"dp": {"mode": spec}, "is_ordered": True} for spec in SPECS.values()},
    f"dp.mode=allreduce:{SMALL}, ordered": {"dp": {"mode": f"allreduce:{SMALL}"}, "is_ordered": True},
}
"""Options with which the number of waits of a step does not depend on the shape; adamw8bit needs a GPU."""
FOR_UPDATES = {
    **{"sharded_ps": 2, "central_ps": 2, "quantized": 5, "sparseloco": 6},
    **{"diloco": 5 + 34, "cocktail_grad": 14 + 34, "cocktail": 14 + 34},
}
"""Waits for what two replicas exchange over the ordered transport: for a message, and for second moments."""
OFTEN = ("optim.name=adafactor",)
"""Those of `make test`."""
SHARDED = {
    f"dp.shard={kind}, {micro}": Row(5 - micro, micro, dp={"shard": kind}) for kind in SHARDS for micro in (3, 1)
}
OFFLOADED = {
    f"{offload}, {dtype}": Row(4, 3, optim={"offload": offload}, dtype=dtype)
    for dtype in ("fp32", "bf16")
    for offload in ("none", "cpu")
}
BLOCKS = {"freeze": "*.h.*"}
BLOCK_PARAMETERS = 12 * 16**2 + 13 * 16
FETCHED = {
    "trained": Row(4, 6, optim={"offload": "cpu"}, model={"offload": "cpu"}, dtype="bf16"),
    "read": Row(4, 6, model={"offload": "disk", **BLOCKS}),
    "read in micro-batches": Row(4, 1, model={"offload": "disk", **BLOCKS}),
    "frozen": Row(4, 1, model={"offload": "cpu", **BLOCKS}, dtype="bf16"),
    "trained, fp32": Row(4, 1, optim={"offload": "cpu"}, model={"offload": "cpu"}),
    "two stages": Row(8, 1, pp=TWO, model={"offload": "cpu", **BLOCKS}),
    "interleaved": Row(8, 1, pp={**TWO, "schedule": "interleaved:chunks=2"}, model={"offload": "cpu", **BLOCKS}),
    "zb": Row(8, 1, pp={**TWO, "schedule": "zb"}, model={"offload": "cpu"}, optim={"offload": "cpu"}),
}
"""Runs with model.offload, which are compared with the same without it."""
SAVED = {
    "saved": Row(6, 6, model={"offload_activations": True}),
    "saved, two stages": Row(8, 1, pp=TWO, model={"offload_activations": True}, dtype="bf16"),
    "saved, fetched": Row(8, 6, model={"offload_activations": True, "offload": "cpu", **BLOCKS}),
    "saved, zb": Row(8, 1, pp={**TWO, "schedule": "zb"}, model={"offload_activations": True}),
}
"""Runs with model.offload_activations, the same."""
ON_DEVICE = ", on the device"
"""End of the names of these runs without the options."""


def soaked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.soak) for name in names]


def mode_of(option: str) -> str:
    return option.partition("=")[2].partition(",")[0].partition(":")[0]


class Observed(NamedTuple):
    """What one rank observes of a run."""

    losses: list[float]
    waits: list[Counter[str]]
    """By step."""
    evaluation: Counter[str]
    """Waits of an evaluation between the first two steps, of runs with stages."""
    exchanges: list[int]
    """Messages that it has sent to the other replica so far, by step."""
    buffers: list[int]
    """Host buffers allocated so far, by step."""
    on_device: set[str]
    """Which of masters, their gradients and the optimizer's state are on the device after the last step."""
    live: list[int]
    """Bytes of all tensors of the device, behind each block and when there is a gradient of its output."""
    on_cpu: list[float]
    """Losses of the same run on the CPU over gloo."""


def observe(rank: int, world_size: int, store: Path, runs: Sequence[tuple[Config, bool]]) -> list[Observed]:
    """Train each run on the stand-in, over the ordered transport or gloo, and then on the CPU."""
    torch.set_num_threads(1)
    observed = []
    with on_stand_in() as streams:  # before the first backward: that fixes which devices torch has
        for number, (config, is_ordered) in enumerate(runs):
            job, file_store = prepare(config, Launch(rank, rank, world_size)), dist.FileStore(f"{store}-{number}")
            found, progress = Observed([], [], Counter(), [], [], set(), [], []), Progress()
            with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
                if is_ordered:
                    groups = groups.with_transport(ordered_transport(rank), streams.device, lambda axis, ranks: True)
                session = build_session(job, open_weight_source(job), groups)
                _observe_memory(session, streams, found.live)
                for batch in batches_of(job):
                    if progress.step == 1 and config.pp.stages > 1:
                        streams.waits.clear()
                        session.pipeline.evaluate(batch, progress.step)
                        found.evaluation.update(streams.waits)
                    streams.waits.clear()
                    result = train_step(session, batch, progress)
                    progress = result.progress
                    found.losses.append(result.loss)
                    found.waits.append(Counter(streams.waits))
                    found.exchanges.append(session.peers._exchanges)
                    found.buffers.append(streams.buffers)
                found.on_device.update(_on_device(session))
                session.close()
            del session
            gc.collect()  # the memory of the next run is its own
            observed.append(found)
    configs = [config for number, (config, _) in enumerate(runs) if config not in [each for each, _ in runs[:number]]]
    on_cpu = losses_of_rank(rank, world_size, Path(f"{store}-cpu"), configs)
    return [
        found._replace(on_cpu=on_cpu[configs.index(config)]) for found, (config, _) in zip(observed, runs, strict=True)
    ]


def _observe_memory(session: Session, streams: StandInStreams, sizes: list[int]) -> None:
    """Note the bytes of all tensors of the device behind each block, and when there is a gradient of its output."""

    def note(*_: Any) -> None:
        sizes.append(streams.live_bytes())

    def after(block: nn.Module, args: Any, output: Any) -> None:
        note()
        [leaf, *_] = tree_leaves(output)
        if leaf.requires_grad:
            leaf.register_hook(note)

    composed = next(iter(session.stages.values())).composed
    for block in map(composed.model.get_submodule, session.job.model.description.blocks):
        block.register_forward_hook(after)


def _on_device(session: Session) -> Iterator[str]:
    """Yield the kinds of state of a session that are on the device, and "host parameter" for a parameter that is not"""
    for weight in session.owned.of(session.weights):
        state = {name: by_key[weight.key] for name, by_key in session.optimizer.state_of([weight]).items()}
        found = {"master": weight.master, "gradient": weight.master.grad, **state}
        assert found["gradient"] is not None
        yield from (name for name, x in found.items() if x is not None and x.device.type != "cpu")
        if weight.param.device.type == "cpu":
            yield "host parameter"


Results = dict[str, tuple[Config, list[Observed]]]
"""By name of the row: its run, and what its ranks observe."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, selected: Callable[[str], set[Any]]) -> Results:
    """Results of the rows that are selected.

    Few processes train one row after the other: most of the time would pass in their start.
    """
    directory, rows = tmp_path_factory.mktemp("waits"), ROWS | SOAKED | SHARDED
    rows = {name: rows[name] for name in selected("name")}
    rows |= {name: row for name, row in OFFLOADED.items() if name.rpartition(" ")[2] in selected("dtype")}
    for name in selected("fetched") | selected("saved"):
        row = (FETCHED | SAVED)[name]
        model = {**row.model, "offload": "none", "offload_activations": False}
        rows |= {name: row, f"{name}{ON_DEVICE}": row._replace(model=model)}
    for name in selected("option"):
        rows |= {f"{name}, {each}": Row(*shape, **OF_SHAPE[name]) for each, shape in SHAPES.items()}
    found = Results()
    for ranks in sorted({row.ranks for row in rows.values()}):
        together = {name: row for name, row in rows.items() if row.ranks == ranks}
        runs = [(row.config(directory), row.is_ordered) for row in together.values()]
        by_rank = on_ranks(ranks, observe, directory / f"store-{ranks}", runs)
        found |= {
            name: (config, [*of_ranks])
            for name, (config, _), of_ranks in zip(together, runs, zip(*by_rank, strict=True), strict=True)
        }
    return found


@pytest.mark.parametrize("name", [*ROWS, *soaked(SOAKED)])
def test_a_step_waits_once_and_for_each_message_over_gloo(name: str, observed: Results) -> None:
    """And once for the headers of all messages that stay on the device, which are then compared."""
    row, (config, by_rank) = (ROWS | SOAKED)[name], observed[name]
    expected = ONCE + HEADERS if row.is_ordered else Counter(ONCE)
    if row.ranks > 1 and not row.is_ordered:
        expected["event"] = (1 + row.is_tied) * (config.data.batch // config.pp.micro)
    for each in by_rank:
        assert each.losses == each.on_cpu
        assert all(waits == expected for waits in each.waits[1:]), each.waits
        assert each.evaluation <= expected, "no more in an evaluation"
        assert each.buffers[-1] == each.buffers[-2], "buffers are allocated once"


def look_up(rank: int, world_size: int) -> tuple[bool, Counter[str]]:
    """Look up rows of a table on the stand-in, one of them that of padding, which gets no gradient."""
    with on_stand_in() as streams:
        table = load.LookupTable(torch.Size((8, 2)), torch.float32, streams.device)
        table.reset(torch.tensor([5, 1, 3]))
        table.load(slice(0, 3), streams.load(torch.ones(3, 2)))
        ids = streams.load(torch.tensor([[1, 3, 5]]))
        streams.waits.clear()
        nn.functional.embedding(ids, table, padding_idx=3).sum().backward()
        waits = Counter(streams.waits)
        return table.gradient.cpu().tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]], waits


def test_a_lookup_with_a_row_of_padding_waits_for_nothing() -> None:
    """Which would be a wait per micro-batch."""
    [(is_right, waits)] = on_ranks(1, look_up)
    assert is_right
    assert not waits


@pytest.mark.parametrize("option", [*OFTEN, *soaked(sorted(OF_SHAPE.keys() - OFTEN))])
def test_options_add_waits_that_do_not_depend_on_the_shape(option: str, observed: Results) -> None:
    small, large = (observed[f"{option}, {shape}"][1] for shape in SHAPES)
    for mine, other in zip(small, large, strict=True):
        assert mine.waits[-1] == other.waits[-1], option
        if option.endswith(", ordered"):
            assert (mine.waits[-1] - ONCE).total() == FOR_UPDATES.get(mode_of(option), 0), mine.waits[-1]
        assert mine.losses == mine.on_cpu, option


@pytest.mark.parametrize("name", soaked(SHARDED))
def test_a_step_with_divided_weights_waits_for_each_message_that_it_sends(name: str, observed: Results) -> None:
    """And not for those that it receives, whatever the number of weights in one."""
    for each in observed[name][1]:
        sent = each.exchanges[-1] - each.exchanges[-2]
        assert each.waits[-1] == ONCE + Counter({"copy to the host": sent})
        assert sent > 0
        assert each.losses == each.on_cpu


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
def test_offloaded_state_is_on_the_host_and_a_backward_waits_for_some_of_its_gradients(
    dtype: str, observed: Results
) -> None:
    """Once for each MAX_IN_FLIGHT of them, and at its end. Updated weights are copied to the device without a wait."""
    (plain, (without,)), (_, (offloaded,)) = (observed[f"{offload}, {dtype}"] for offload in ("none", "cpu"))
    micros, weights = plain.data.batch // plain.pp.micro, 4 * 12 + 5
    assert offloaded.losses == without.losses
    assert without.on_device >= {"master", "gradient", "exp_avg", "exp_avg_sq"}
    assert not offloaded.on_device
    for waits in offloaded.waits[1:]:
        assert waits - ONCE <= Counter({"event": micros * (1 + weights // MAX_IN_FLIGHT)}), waits
    assert offloaded.buffers[-1] == offloaded.buffers[-2], "buffers are allocated once"


@pytest.mark.parametrize("fetched", ["trained", "read", *soaked(list(FETCHED)[2:])])
def test_offloaded_parameters_are_on_the_device_while_their_layers_run(fetched: str, observed: Results) -> None:
    """With those of the next layer. They add no wait but for buffers of reads, and change no loss."""
    row, (config, by_rank), (_, plain) = FETCHED[fetched], observed[fetched], observed[f"{fetched}{ON_DEVICE}"]
    blocks, micros = row.blocks // row.ranks, config.data.batch // config.pp.micro
    reads = Counter({"event": 2 * micros * blocks}) if row.model["offload"] == "disk" else Counter[str]()
    for each, other in zip(by_rank, plain, strict=True):
        assert each.losses == other.losses
        for waits, without in zip(each.waits[1:], other.waits[1:], strict=True):
            assert waits - without <= reads
        assert each.buffers[-1] == each.buffers[-2], "buffers are allocated once"
        assert max(each.live) <= max(other.live) - (blocks - 2) * BLOCK_PARAMETERS * DTYPES[row.dtype].itemsize


@pytest.mark.parametrize("saved", ["saved", *soaked(list(SAVED)[1:])])
def test_offloaded_activations_are_on_the_device_while_their_layers_run(saved: str, observed: Results) -> None:
    """With those of the next layer. They add no wait, and change no loss."""
    (_, by_rank), (_, plain) = observed[saved], observed[f"{saved}{ON_DEVICE}"]
    for each, other in zip(by_rank, plain, strict=True):
        assert each.losses == other.losses
        assert each.waits[1:] == other.waits[1:]
        assert each.buffers[-1] == each.buffers[-2], "buffers are allocated once"
        # of two stages, most is state of the optimizer
        assert max(each.live) < (0.7 if SAVED[saved].ranks == 1 else 1.0) * max(other.live)
