"""Laws of a rank that gets its state in the background: it ends with the state of the others, whose losses stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.corpora import write_records
from lib.ranks import on_ranks
from lib.training import RELATIVE, make_config
from lib.views import Return, Script, ScriptedView, Trained, train_in_views

from acsgd.config.options import Config, ElasticConfig, ReplicaConfig
from acsgd.elastic.state import handover

STEPS = 10
"""Enough for the 3 layers of the model, of which at least one arrives in each step but the first, twice."""
JOINED = 8
"""Number of steps after which a newcomer has all of them."""
JOINS = [ScriptedView((0, 1), 2), ScriptedView((0, 1, 2), STEPS)]
"""Process 2 joins, with state from process 0."""
INTERRUPTED = ScriptedView((0, 1, 2), 4, late=(0, 1, 2))
"""Step 5 is not applied anywhere; process 2 has some layers, and another one is on its way."""
SCRIPTS: dict[str, Script] = {
    "calm": [ScriptedView((0, 1), STEPS)],
    "joins": JOINS,
    "newcomer ends": [JOINS[0], INTERRUPTED, ScriptedView((0, 1), STEPS)],
    "source ends": [JOINS[0], INTERRUPTED, ScriptedView((1, 2), STEPS)],
    "only the newcomer is late": [JOINS[0], ScriptedView((0, 1, 2), 4, late=(2,)), ScriptedView((0, 1, 2), STEPS)],
    "only the newcomer applies a step": [
        JOINS[0],
        ScriptedView((0, 1, 2), 4, late=(0, 1)),
        ScriptedView((0, 1, 2), STEPS),
    ],
    "returns to a step": [JOINS[0], ScriptedView((0, 1, 2), STEPS, returns=Return(after=5, to=3))],
    "another one joins": [ScriptedView((1,), 2), ScriptedView((1, 2), 4), ScriptedView((1, 2, 0), STEPS)],
    "all others end": [ScriptedView((0,), 2), ScriptedView((0, 2), 4), ScriptedView((2,), STEPS)],
}
"""When the run returns to a step, process 2 has not requested the last layer yet, however fast the others arrive.
In the last script, it continues from the snapshot that process 0 has sent it after step 4."""
SKIPPED = 4
OTHER_RUNS = ("skipped step", "sharded_ps", "powersgd:rank=1", "frozen", "cpu", "disk", "streamed", "tied rows")
OFFLOADED = "offloaded cocktail"
UPDATE_RUNS = (
    "quantized:bits=4,exact_steps=1",
    "quantized:bits=4,exact_steps=5",
    "cocktail_grad",
    "cocktail:random=0.5,topk=0.5",
    "diloco:inner=3,mix=0.3",
    "diloco:inner=4,fragments=2,delay=1,bits=8,moment_correction=true",
    "sparseloco:inner=3,topk=0.2",
    "delta",
    OFFLOADED,
)
"""Modes in which replicas have their own weights. What follows when the newcomer takes part depends on its updates, and
with `delta` on which activations it caches."""
COCKTAIL = "cocktail:random=0.5,topk=0.5,moment_correction=false"
UPDATE_SCRIPTS: dict[str, Script] = {
    "updates, newcomer ends": SCRIPTS["newcomer ends"],
    "updates, only the newcomer is late": SCRIPTS["only the newcomer is late"],
    "updates, all others end": [JOINS[0], ScriptedView((0, 1, 2), 9, ahead=STEPS), ScriptedView((2,), STEPS)],
    "updates, two join": [ScriptedView((0, 1), 1), ScriptedView((0, 1, 2, 3), STEPS, delay=(3, 5))],
    "updates, two of a host join": [
        ScriptedView((0, 1), 1),
        ScriptedView((0, 1, 2, 3), STEPS, delay=(3, 4), one_host=(2, 3)),
    ],
}
"""Without an exchange after the step, in which a late rank does not take part. Of two that join together, process 3
gets its first layer when process 2 has all. When all others end, process 2 has all, and is still an observer."""
ONE_OTHER: Script = [ScriptedView((0,), 2), ScriptedView((0, 2), STEPS)]
EQUAL_RUNS: dict[str, tuple[str, Script]] = {
    f"one other, {mode}": (mode, ONE_OTHER) for mode in (COCKTAIL, UPDATE_RUNS[1], *UPDATE_RUNS[5:7])
} | {
    "one other, newcomer ends": (
        COCKTAIL,
        [ONE_OTHER[0], ScriptedView((0, 2), 4, late=(0, 2)), ScriptedView((0,), STEPS)],
    ),
    "one other, another one joins": (COCKTAIL, [ONE_OTHER[0], ScriptedView((0, 2), 4), ScriptedView((0, 2, 1), STEPS)]),
    "two of a host join, returns to a step": (
        COCKTAIL,
        [
            ScriptedView((0, 1), 1),
            ScriptedView((0, 1, 2, 3), STEPS, returns=Return(after=5, to=3), delay=(3, 4), one_host=(2, 3)),
        ],
    ),
    "updates, returns to a step": (
        COCKTAIL,
        [JOINS[0], ScriptedView((0, 1, 2), STEPS, returns=Return(after=5, to=3))],
    ),
    "half a replica": (COCKTAIL, [ScriptedView((0, 1, 3, 4), 2), ScriptedView((0, 1, 3, 2), STEPS)]),
}
"""Runs that are not compared with others, by mode: a single replica that an observer joins sends its updates, also to
itself. In the last one, of 2 stages, process 3 keeps its state, and follows the others until process 2 has its own."""
LOCAL = "local"
RUNS = (*list(SCRIPTS)[1:], *OTHER_RUNS, *UPDATE_RUNS, *UPDATE_SCRIPTS)
SOAK = {
    *("joins", "source ends", "only the newcomer is late", "only the newcomer applies a step", "another one joins"),
    *OTHER_RUNS,
    *(mode for mode in UPDATE_RUNS if mode != UPDATE_RUNS[5]),
    *(
        "updates, newcomer ends",
        "updates, only the newcomer is late",
        "updates, two join",
        "updates, two of a host join",
    ),
    *EQUAL_RUNS,
}
"""Runs whose parts are in others, or in `test_handover`, too."""

Runs = list[dict[str, Trained]]


@pytest.fixture(scope="module")
def runs(
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    selected: Callable[[str], set[str]],
) -> Runs:
    """What each process has done, by name of the run, for those that are selected."""
    path = tmp_path_factory.mktemp("views")
    config = make_config(tiny_model(n_layer=1), path, steps=STEPS, micro=2)
    config = dataclasses.replace(config, elastic=ElasticConfig(join_budget=0, snapshot="2"))
    scripts: dict[str, tuple[Config, Script]] = {name: (config, script) for name, script in SCRIPTS.items()}
    write_records(path / "a.jsonl")
    stream = f"stream:{path / 'a.jsonl'}:0.5,demo:0.5"
    two_stages = dataclasses.replace(config.pp, stages=2, tied="rows")
    frozen = dataclasses.replace(config.model, freeze="*.wte.*,*.h.0.*")
    offloading = dataclasses.replace(config.optim, offload="cpu")
    others = {
        "skipped step": config,
        "sharded_ps": dataclasses.replace(config, dp=ReplicaConfig("sharded_ps")),
        "powersgd:rank=1": dataclasses.replace(config, dp=ReplicaConfig("powersgd:rank=1")),
        "frozen": dataclasses.replace(config, model=frozen),
        "cpu": dataclasses.replace(
            config,
            model=dataclasses.replace(frozen, offload="cpu"),
            optim=offloading,
        ),
        "disk": dataclasses.replace(config, model=dataclasses.replace(frozen, offload="disk")),
        "streamed": dataclasses.replace(config, data=dataclasses.replace(config.data, sources=stream, window=4)),
        "tied rows": dataclasses.replace(config, pp=two_stages),
        "delta": dataclasses.replace(config, pp=dataclasses.replace(two_stages, forward="delta:bits=4")),
    }
    four_micros = dataclasses.replace(config, pp=dataclasses.replace(config.pp, micro=1))  # one for each of 4 replicas
    updates = dataclasses.replace(four_micros, dp=ReplicaConfig(COCKTAIL))
    scripts["updates, calm"] = updates, [ScriptedView((0, 1), JOINED)]
    scripts |= {name: (updates, script) for name, script in UPDATE_SCRIPTS.items()}
    for name, (mode, script) in EQUAL_RUNS.items():
        pp = two_stages if name == "half a replica" else four_micros.pp
        scripts[name] = dataclasses.replace(config, dp=ReplicaConfig(mode), pp=pp), script
    scripts[LOCAL] = dataclasses.replace(config, dp=ReplicaConfig(LOCAL)), JOINS
    others[OFFLOADED] = dataclasses.replace(
        config, dp=ReplicaConfig(COCKTAIL), model=dataclasses.replace(config.model, offload="cpu"), optim=offloading
    )
    others |= {mode: dataclasses.replace(config, dp=ReplicaConfig(mode)) for mode in UPDATE_RUNS if mode not in others}
    for name, other in others.items():
        members = ((0, 1), (0, 1, 2, 3)) if other.pp.stages == 2 else ((0, 1), (0, 1, 2))
        skipped = SKIPPED if name == "skipped step" else None
        calm = [ScriptedView(members[0], JOINED if name in UPDATE_RUNS else STEPS, skipped=skipped)]
        joins = [ScriptedView(members[0], 2), ScriptedView(members[1], STEPS, skipped=skipped)]
        for script_name, script in {calm_of(name): calm, name: joins}.items():
            log = dataclasses.replace(config.log, dir=str(path / script_name))  # with streamed segments of its own
            scripts.setdefault(script_name, (dataclasses.replace(other, log=log), script))
    names = selected("name") | {"updates, all others end"}
    names |= {calm_of(name) for name in names}
    four = {*OTHER_RUNS, *UPDATE_RUNS, *(name for name in names if "two join" in name or "two of a host" in name)}
    processes = 5 if "half a replica" in names else 4 if names & four else 3
    return on_ranks(processes, _train, path / "store", {name: each for name, each in scripts.items() if name in names})


def _train(rank: int, world_size: int, path: Path, runs: dict[str, tuple[Config, Script]]) -> dict[str, Trained]:
    """Train without memory for the gradients of more than one step, so that each layer arrives one step later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "memory_for_joins", lambda _: 0)
        return train_in_views(rank, world_size, path, runs)


def rows(*names: str) -> list[Any]:
    """Return the rows of a table."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in SOAK)) for name in names]


def calm_of(name: str) -> str:
    """Return the name of the run that nobody joins, with the same options or those that do not change the losses."""
    if name in UPDATE_SCRIPTS:
        return "updates, calm"
    return "calm" if name in SCRIPTS or name in ("sharded_ps", "tied rows") else f"{name}, calm"


def merged(runs: Runs, name: str, steps: int = STEPS) -> dict[int, float]:
    """Return the losses of a run of a number of steps.

    Checks that all ranks with all of their state have the same losses and state after each step.
    """
    losses: dict[int, float] = {}
    processes = [process[name] for process in runs]
    for process in processes:
        for step, loss in process.losses.items():
            assert losses.setdefault(step, loss) == pytest.approx(loss, rel=RELATIVE), step
    assert sorted(losses) == list(range(1, steps + 1))
    for step in losses:
        digests = {process.digests[step] for process in processes if step in process.digests}
        assert len(digests) == len({stage for stage, _ in digests}), step
    return losses


@pytest.mark.parametrize("name", rows(*RUNS))
def test_the_losses_are_those_of_a_run_that_nobody_joins(runs: Runs, name: str) -> None:
    losses = merged(runs, name)
    if name in (*UPDATE_RUNS, *UPDATE_SCRIPTS):
        first = min(runs[2][name].digests, default=JOINED)
        calm = {step: loss for step, loss in merged(runs, calm_of(name), JOINED).items() if step <= first}
        assert len(calm) > min(runs[2][name].joining), "it had no state, or a part of it, in some of these steps"
    else:
        calm = merged(runs, calm_of(name))
    assert {step: losses[step] for step in calm} == pytest.approx(calm, rel=RELATIVE)


@pytest.mark.parametrize("name", rows(*RUNS, *EQUAL_RUNS, LOCAL))
def test_a_rank_joins_when_it_has_the_state_of_the_others_bit_for_bit(runs: Runs, name: str) -> None:
    """The state of ranks is compared in `merged`; with `local`, it is that of another rank some steps before."""
    newcomer = runs[2][name]
    if "two" in name:
        assert newcomer.digests[STEPS] == runs[3][name].digests[STEPS]
    joining = {step: list(replicas) for step, replicas in newcomer.joining.items()}
    first = min(joining)
    assert joining[first], "it joins in the background"
    assert not any(newcomer.received_bytes)
    if name == LOCAL:
        assert newcomer.digests[min(newcomer.digests)] in runs[0][name].digests.values()
    else:
        merged(runs, name)
        assert joining[first + 1], "layers arrive one by one"
    if name.endswith("newcomer ends"):
        assert not newcomer.digests
    else:
        assert not joining[STEPS]
        assert STEPS in newcomer.digests
    if name == "all others end":
        assert newcomer.origins == ["memory", "snapshot"]
    elif not name.endswith("newcomer ends"):
        assert min(newcomer.digests) >= first  # a small state may arrive within the step


def test_a_rank_that_was_still_an_observer_when_all_others_ended_trains(runs: Runs) -> None:
    digests = runs[2]["updates, all others end"].digests
    assert min(digests) < 9, "it had all of its state"
    assert len(set(digests.values())) == len(digests), "its weights change in each step"
