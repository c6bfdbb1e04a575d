"""Laws of the state of replicas when a view follows another one, for data-parallel modes of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import pytest
from lib.corpora import write_records
from lib.ranks import on_ranks
from lib.training import RELATIVE, make_config
from lib.views import Script, ScriptedView, Trained, train_in_views
from transformers import AutoModelForCausalLM

from acsgd.config.options import AdapterConfig, ReplicaConfig

STEPS = 7
EXCHANGES = ("cocktail_grad:topk=.25", "diloco:inner=4", "sparseloco:inner=2,redundant_steps=4")
"""Modes that exchange weights after step 4."""
OTHERS = (
    "powersgd:rank=1",
    "cocktail:random=.5,topk=.5,moment_correction=false",
    "diloco:inner=4,fragments=2,delay=1",
)
"""Modes that do not, nor after step 6: a replica can complete these steps alone."""
MODES = (*EXCHANGES, *OTHERS)
SOAK = MODES[1:]
"""Modes that exchange as another one, or whose state is also handed over in `test_background_join`."""
ROWS = {mode: pytest.param(mode, marks=[pytest.mark.soak] * (mode in SOAK)) for mode in MODES}
IN_ALL_SCRIPTS = MODES[:-1]
"""Of the last one, one more script is in `test_background_join`."""
MEMBERS = (0, 1, 2)
FROZEN = "transformer.w[tp]e.*,*.h.0.attn.*"
"""Parameters that are not trained."""
ADAPTER = "lora:r=2,dropout=.2"
OFFLOADED: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({"offload": "cpu"}, "allreduce"),
    "cpu, local weights": ({"offload": "cpu"}, EXCHANGES[1]),
    "disk": ({"offload": "disk", "freeze": FROZEN}, "allreduce"),
}
"""Options of the model, and the mode, of runs with parameters in host memory, or frozen ones in files."""
ON_DEVICE = "on the device"
AVERAGES = "schedule_free_adamw"
WITHOUT_MASTERS = "bf16 without masters"
STREAMED = "streamed"
STAGES = "two stages"
ORDERED = "over an ordered transport"
"""What follows the name of a run whose device tensors travel as over NCCL."""
JOIN = [
    ScriptedView((0, 1), 4, late=(1,)),  # step 5, which 1 completes alone
    ScriptedView((0, 1, 2), 6),
    ScriptedView((2,), STEPS),
]
"""A process joins, and is the only one that is left."""


def scripts_of(mode: str) -> dict[str, list[ScriptedView]]:
    """Return what happens to the three processes of a run."""
    interrupted = [
        ScriptedView(MEMBERS, 2),  # between two steps
        ScriptedView((2, 0, 1), 2, is_formed=False),  # in which all would have other places
        ScriptedView(MEMBERS, 3, late=MEMBERS),  # nobody has applied step 4: it is repeated
        ScriptedView(MEMBERS, 3, unsynced=MEMBERS),  # all have, and not its exchange
        ScriptedView(MEMBERS, STEPS),
    ]
    if mode in OTHERS:  # one has not
        interrupted.insert(4, ScriptedView(MEMBERS, 5, late=(1,)))
    changing = [
        ScriptedView(MEMBERS, 3, unsynced=MEMBERS),
        ScriptedView((2, 1), 4),
        ScriptedView((1,), 5),
        ScriptedView((1, 0, 2), STEPS),
    ]
    joining = [ScriptedView((0, 1), 3, unsynced=(0, 1)), ScriptedView(MEMBERS, STEPS)]
    return {
        "calm": [ScriptedView(MEMBERS, STEPS)],
        **({"one joins in the exchange": joining} if mode in EXCHANGES else {}),
        "interrupted": interrupted,
        "one misses the exchange": [ScriptedView(MEMBERS, 3, unsynced=(1,)), ScriptedView(MEMBERS, STEPS)],
        **({"members change": changing} if mode != MODES[-1] else {}),
    }


Runs = list[dict[str, Trained]]
"""What the processes have done, by name of the run."""


@pytest.fixture(scope="module")
def runs(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    selected: Callable[[str], set[str]],
) -> Runs:
    """All scripts with all modes that are selected, in the same processes: starting them takes longer than training."""
    path, all_runs = tmp_path_factory.mktemp("views"), {}
    config = make_config(tiny_model(n_layer=1), path, steps=STEPS, micro=2)
    for mode in (each for each in MODES if each in selected("mode")):
        for name, script in scripts_of(mode).items():
            of_mode = dataclasses.replace(config, dp=ReplicaConfig(mode))
            all_runs[f"{mode}, {name}"] = of_mode, script
            if name == "members change":
                all_runs[f"{mode}, {name} {ORDERED}"] = of_mode, over_ordered(script)
    parts = {
        FROZEN: dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=FROZEN)),
        ADAPTER: dataclasses.replace(config, adapter=AdapterConfig(ADAPTER)),
        AVERAGES: dataclasses.replace(
            config, optim=dataclasses.replace(config.optim, name=AVERAGES, schedule="constant")
        ),
        WITHOUT_MASTERS: dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, dtype="bf16"),
            optim=dataclasses.replace(config.optim, masters="none"),
        ),
    }
    for part in selected("part"):
        for name in ("calm", "members change"):
            all_runs[f"{part}, {name}"] = parts[part], scripts_of("")[name]
    for offload in selected("offload"):
        options, mode = OFFLOADED[offload]
        model, host = dataclasses.replace(config.model, **options), dataclasses.replace(config.optim, offload="cpu")
        of_mode = dataclasses.replace(config, dp=ReplicaConfig(mode), model=dataclasses.replace(model, offload="none"))
        script = scripts_of(mode)["members change"]
        all_runs[f"{offload}, {ON_DEVICE}"] = of_mode, script
        all_runs[f"{offload}, members change"] = dataclasses.replace(of_mode, model=model, optim=host), script
    write_records(path / "a.jsonl")
    sources = f"stream:{path / 'a.jsonl'}:0.5,demo:0.5"
    streamed = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=sources, window=4))
    scripts = {"calm": [ScriptedView(MEMBERS, STEPS)], "one joins": JOIN} if selected("sources") else {}
    for name, script in scripts.items():
        log = dataclasses.replace(config.log, dir=str(path / name))  # without the segments of the other run
        all_runs[f"{STREAMED}, {name}"] = dataclasses.replace(streamed, log=log), script
    if selected("stages"):
        staged = dataclasses.replace(config, pp=dataclasses.replace(config.pp, stages=2, forward="fixpoint:bits=8"))
        all_runs[f"{STAGES}, calm"] = staged, [ScriptedView((0, 1), STEPS)]
        interrupted = [ScriptedView((0, 1), 2, late=(1,)), ScriptedView((0, 1), 5), ScriptedView((0, 1), STEPS)]
        all_runs[f"{STAGES}, interrupted {ORDERED}"] = staged, over_ordered(interrupted)
    return on_ranks(3, train_in_views, path / "store", all_runs)


EACH = (0, 1, 2, 3)
DOMAINS, GROWING = "aabb", "aaaa"
"""Domains of four processes, of which each ends and joins as a whole; one that grows."""


def scripts_of_domains(shard: str, mode: str) -> dict[str, tuple[str, Script]]:
    """Return the domains of four processes that divide their state in them, and what happens to these."""
    is_shared = shard != "weights"  # so that a domain ends the step together
    changing = [
        ScriptedView(EACH, 3, unsynced=EACH),
        ScriptedView((2, 3), 5),
        ScriptedView((3, 2, 1, 0), 6),
        ScriptedView((0, 1), STEPS),
    ]
    growing = [ScriptedView((0, 1), 4, late=(1,), unsynced=(0,)), ScriptedView(EACH, STEPS)]
    interrupted = [
        ScriptedView(EACH, 2),
        ScriptedView((2, 3, 0, 1), 2, is_formed=False),
        ScriptedView(EACH, 3, late=EACH),
        ScriptedView(EACH, 3, unsynced=EACH),
        ScriptedView(EACH, 4, unshared=EACH),  # step 5, which is complete
        *([ScriptedView(EACH, 5, late=(1,), unsynced=(0, 2, 3))] if mode == "allreduce" else []),
        ScriptedView(EACH, STEPS),
    ]
    missing = [ScriptedView(EACH, 3, unsynced=(0, 1) if is_shared else (1,)), ScriptedView(EACH, STEPS)]
    return {
        "calm": (DOMAINS, [ScriptedView(EACH, STEPS)]),
        "interrupted": (DOMAINS, interrupted),
        "some miss the exchange": (DOMAINS, missing),
        "domains change": (DOMAINS, changing),
        "a domain grows": (GROWING, growing),
    }


SENDING = "cocktail_grad:topk=.25"
DIVIDED = {
    row: pytest.param(row, marks=[pytest.mark.soak] * bool(number))
    for number, row in enumerate(
        (
            f"weights, {SENDING}",
            "weights, allreduce",
            "optimizer, allreduce",
            f"optimizer, {SENDING}",
            "gradients, diloco:inner=4",
            "weights, cocktail:random=.5,topk=.5,moment_correction=false",
            "optimizer, allreduce, bf16",
            "weights, allreduce, lora:r=2",
        )
    )
}
"""Values of dp.shard and dp.mode, and of model.dtype or adapter.spec if it is another than usual."""


@pytest.fixture(scope="module")
def divided_runs(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    selected: Callable[[str], set[str]],
) -> Runs:
    """All scripts of replicas that divide their state in domains."""
    path, all_runs = tmp_path_factory.mktemp("domains"), {}
    config = make_config(tiny_model(n_layer=1), path, steps=STEPS, micro=2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=8))
    for name in (each for each in DIVIDED if each in selected("divided")):
        shard, mode, *others = name.split(", ")
        of_row = config
        if "bf16" in others:
            of_row = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bf16"))
        elif others:
            of_row = dataclasses.replace(config, adapter=AdapterConfig(others[0]))
        for script, (domains, views) in scripts_of_domains(shard, mode).items():
            dp = ReplicaConfig(mode, shard=cast(Any, shard), domain=domains)
            all_runs[f"{name}, {script}"] = dataclasses.replace(of_row, dp=dp), views
    return on_ranks(len(EACH), train_in_views, path / "store", all_runs)


def over_ordered(script: Script) -> Script:
    return [view._replace(is_ordered=True) for view in script]


def losses_of(runs: Runs, mode: str, script: str) -> Mapping[int, float]:
    """Return the loss of each step, on which all processes agree.

    Checks that after each step the global weights are equal on all replicas, bit for bit.
    """
    losses: dict[int, float] = {}
    processes = [process[f"{mode}, {script}"] for process in runs]
    for process in processes:
        for step, loss in process.losses.items():
            assert losses.setdefault(step, loss) == loss, step
    assert sorted(losses) == list(range(1, STEPS + 1))
    for step in losses:
        digests = {process.digests[step] for process in processes if step in process.digests}
        assert len(digests) == len({part for part, _ in digests}), (step, digests)
    return losses


@pytest.mark.parametrize("mode", ROWS.values())
def test_a_view_of_the_same_replicas_changes_nothing_wherever_the_one_before_ended(runs: Runs, mode: str) -> None:
    assert losses_of(runs, mode, "interrupted") == pytest.approx(losses_of(runs, mode, "calm"), rel=RELATIVE)


@pytest.mark.parametrize("mode", ROWS.values())
def test_replicas_whose_exchange_ended_differently_continue_from_the_same_weights(runs: Runs, mode: str) -> None:
    losses, calm = (losses_of(runs, mode, script) for script in ("one misses the exchange", "calm"))
    assert [losses[step] for step in range(1, 5)] == [calm[step] for step in range(1, 5)]
    if mode in OTHERS:  # it has missed nothing
        assert losses == pytest.approx(calm, rel=RELATIVE)


@pytest.mark.parametrize("mode", [ROWS[mode] for mode in IN_ALL_SCRIPTS])
def test_replicas_that_are_left_and_that_join_have_the_same_weights(runs: Runs, mode: str) -> None:
    """3 replicas, of which one ends in the exchange after step 4; 2, of which one ends; 1; 3 again."""
    losses, calm = (losses_of(runs, mode, script) for script in ("members change", "calm"))
    assert losses[4] == calm[4]
    assert losses[STEPS] < losses[1]


@pytest.mark.parametrize("mode", [ROWS[mode] for mode in IN_ALL_SCRIPTS])
def test_views_over_an_ordered_transport_train_as_over_gloo(mode: str, runs: Runs) -> None:
    """A view that ends aborts its communicators. gloo sums three gradients in another order."""
    over_ordered, over_gloo = (losses_of(runs, mode, f"members change{each}") for each in (f" {ORDERED}", ""))
    assert over_ordered == pytest.approx(over_gloo, rel=RELATIVE)


@pytest.mark.parametrize("stages", [STAGES])
def test_stages_over_an_ordered_transport_repeat_an_interrupted_step(stages: str, runs: Runs) -> None:
    """Bit for bit."""
    over_ordered, calm = (runs[0][f"{stages}, {each}"].losses for each in (f"interrupted {ORDERED}", "calm"))
    assert over_ordered == calm
    assert len(calm) == STEPS


@pytest.mark.parametrize("mode", [ROWS[mode] for mode in EXCHANGES])
def test_a_replica_that_joins_takes_part_in_an_exchange_that_is_run_again(runs: Runs, mode: str) -> None:
    losses = losses_of(runs, mode, "one joins in the exchange")
    assert 4 in runs[2][f"{mode}, one joins in the exchange"].digests, "it has the weights after that exchange"
    assert losses[STEPS] < losses[1]


@pytest.mark.parametrize("divided", DIVIDED.values())
def test_domains_whose_replicas_divide_their_state_continue_from_it(divided: str, divided_runs: Runs) -> None:
    """From their own memory, or that of another domain. Without compression, the losses are those of the calm run."""
    shard, mode, *others = divided.split(", ")
    scripts = scripts_of_domains(shard, mode)
    losses = {script: losses_of(divided_runs, divided, script) for script in scripts}
    for script, (_, views) in scripts.items():
        origins = divided_runs[0][f"{divided}, {script}"].origins
        assert origins == ["disk", *["memory"] * (sum(0 in view.members for view in views) - 1)], script
    same = ["interrupted", "domains change", "a domain grows"] if mode == "allreduce" else ["interrupted"]
    tolerance = 1e-3 if "bf16" in others else RELATIVE  # sums of another number of replicas are rounded otherwise
    for script in same:
        assert losses[script] == pytest.approx(losses["calm"], rel=tolerance), script
    assert all(of_script[STEPS] < of_script[1] for of_script in losses.values())


PARTS = [ADAPTER, pytest.param(FROZEN, marks=pytest.mark.soak)]
"""What is trained: adapters or all that is not frozen."""


@pytest.mark.parametrize("part", [*PARTS, AVERAGES, pytest.param(WITHOUT_MASTERS, marks=pytest.mark.soak)])
def test_layers_are_handed_over_whatever_is_trained_of_them_and_however(part: str, runs: Runs) -> None:
    """Without optimizer state of what is not, and to replicas that have never loaded them."""
    losses, calm = (losses_of(runs, part, script) for script in ("members change", "calm"))
    # sums of another number of replicas are rounded otherwise
    assert losses == pytest.approx(calm, rel=1e-3 if part == WITHOUT_MASTERS else RELATIVE)
    assert calm[STEPS] < calm[1] or part == FROZEN


@pytest.mark.parametrize("offload", ["cpu", *(pytest.param(each, marks=pytest.mark.soak) for each in [*OFFLOADED][1:])])
def test_offloaded_parameters_are_handed_over_as_those_on_the_device(offload: str, runs: Runs) -> None:
    """Bit for bit, also what a process has that is interrupted, left alone, or joins."""
    losses, expected = (losses_of(runs, offload, script) for script in ("members change", ON_DEVICE))
    assert losses == expected


@pytest.mark.parametrize("part", PARTS)
def test_frozen_parameters_do_not_travel(part: str, runs: Runs, tiny_model: Callable[..., Path]) -> None:
    """Of those that are trained, the weight, the two moments of AdamW and its step do."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(n_layer=1))
    (received,) = runs[0][f"{part}, members change"].received_bytes
    if part == ADAPTER:
        assert 0 < received < 0.25 * sum(x.nbytes for x in model.parameters())
        return
    trained = [x for name, x in model.named_parameters() if not any(fnmatch(name, each) for each in FROZEN.split(","))]
    assert received == sum(3 * x.nbytes + 4 for x in trained)


@pytest.mark.parametrize("sources", [pytest.param(STREAMED, marks=pytest.mark.soak)])
def test_streamed_sources_are_read_on_where_the_view_before_has_ended(sources: str, runs: Runs) -> None:
    """Also by a process that joins, which has none of their segments, and by it alone."""
    assert losses_of(runs, STREAMED, "one joins") == pytest.approx(losses_of(runs, STREAMED, "calm"), rel=RELATIVE)
    views = [process[f"{STREAMED}, one joins"].streams for process in runs]
    assert [sorted(each) for each in views] == [[0, 5], [0, 5], [5, 6]]
    for step in (5, 6):  # of which 3 sequences each are streamed, in windows of 4
        places = [each[step] for each in views if step in each]
        assert places == places[:1] * len(places)
        assert places[0] is not None
        assert places[0].segment == step * 3 // 4
        assert places[0].position.tokens > 0
