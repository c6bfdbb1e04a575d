"""Laws of the data-parallel modes with local steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lib.ranks import gather_states, on_ranks
from lib.replicas import (
    LOCAL_SPECS,
    LR,
    STEPS,
    TIMEOUT,
    LocalRun,
    copied,
    count_sent,
    gradients,
    make_step,
    make_weights,
    on_replicas,
)
from torch import Tensor

from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.groups import connect
from acsgd.shards.weights import WeightState
from acsgd.topology import Topology

CONSERVING = [
    "cocktail",
    "cocktail:random=0.4,topk=0.3,bits=2,group=16,sampling=shuffled",
    "sparseloco:inner=2,chunk=16,topk=0.25,decay=1",
    "cocktail_grad:topk=0.1",
    "quantized:bits=2,group=16,exact_steps=2",
]
"""Specs whose updates are neither scaled nor decayed."""
SPECS = [*LOCAL_SPECS, *(spec for spec in CONSERVING if spec not in LOCAL_SPECS)]
LOSSLESS = {
    "cocktail:random=1,topk=1,bits=8": 1,
    "diloco:inner=1,outer_lr=1,momentum=0": 0,
    "sparseloco:inner=1,topk=1,chunk=0,bits=8,outer_lr=1": 0,
    "cocktail_grad:topk=1,bits=8": 0,
    "quantized:exact_steps=1,bits=8": 0,
    "sparseloco:inner=1,topk=1,chunk=0,bits=8,outer_lr=1,redundant_steps=5": 0,
}
"""Specs that exchange nearly all of every update, with the number of steps until it is applied."""
CARRIED = {"local_weights", "residual", "server_residual", "outer_momentum", "sent_update"}
"""Names of states that change weights later."""


class Trained(NamedTuple):
    """Results of one replica in one mode."""

    models: list[dict[str, Tensor]]
    """Global weights after each step."""
    state: WeightState
    metered: int
    """Bytes sent, according to the meter."""
    sent: int
    """Bytes given to torch.distributed."""
    resumed_equal: bool
    """Whether a run that was stopped after 4 steps, or 1 of three replicas, ends as this one."""


def train(rank: int, peers: Peers, spec: str) -> Trained:
    run, models, stopped = LocalRun(spec, peers), [], {}
    with pytest.MonkeyPatch.context() as patch:
        sent = count_sent(patch)
        for step in range(STEPS):
            if step == (4 if peers.size == 2 else 1):
                stopped[step] = models[-1], gather_states(copied(run.sync.state_dict()), peers.group)
            run.train(rank, range(step, step + 1))
            before = len(sent)
            models.append(run.model())
            if spec == "local":  # averages where weights are read, not in training
                del sent[before:]
        total, metered = sum(sent), run.sync.meter.sent_bytes
    ends = [_end(run)]
    for step, (model, states) in stopped.items():
        resumed = LocalRun(spec, peers)
        resumed.restore(model, states)
        resumed.train(rank, range(step, STEPS))
        ends.append(_end(resumed))
    equal = all(torch.equal(end[key], ends[0][key]) for end in ends[1:] for key in end)
    return Trained(models, copied(run.sync.state_dict()), metered, total, equal)


def _end(run: LocalRun) -> dict[str, Tensor]:
    return {**run.model(), **{f"local {weight.key}": weight.master.detach() for weight in run.weights}}


def train_all(rank: int, peers: Peers) -> dict[str, Trained]:
    return {spec: train(rank, peers, spec) for spec in (SPECS if peers.size == 2 else CONSERVING)}


@pytest.fixture(scope="module")
def trained_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, list[dict[str, Trained]]]]:
    """Return a function that trains on a number of replicas, once: on two with SPECS, on three with CONSERVING."""
    directory = tmp_path_factory.mktemp("trained")
    return cache(lambda replicas: {replicas: on_replicas(replicas, train_all, directory / f"store-{replicas}")})


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.soak)])
def trained(
    request: pytest.FixtureRequest, trained_on: Callable[[int], dict[int, list[dict[str, Trained]]]]
) -> dict[int, list[dict[str, Trained]]]:
    """The results of each replica, by number of replicas."""
    return trained_on(request.param)


def test_global_weights_change_and_are_equal_on_all_replicas(trained: dict[int, list[dict[str, Trained]]]) -> None:
    for replicas, results in trained.items():
        for spec in results[0]:
            first, *others = (result[spec].models for result in results)
            assert any(tensor.any() for tensor in first[-1].values()), (spec, replicas)
            for other in others:
                for ours, theirs in zip(first, other, strict=True):
                    assert all(torch.equal(ours[key], theirs[key]) for key in ours), (spec, replicas)


def test_a_resumed_run_equals_an_uninterrupted_one(trained: dict[int, list[dict[str, Trained]]]) -> None:
    failed = [(spec, n) for n, results in trained.items() for r in results for spec in r if not r[spec].resumed_equal]
    assert not failed


def test_the_meter_counts_all_bytes_sent(trained: dict[int, list[dict[str, Trained]]]) -> None:
    for results in trained.values():
        for result in results:
            for spec, of_spec in result.items():
                assert of_spec.metered == of_spec.sent, spec
                assert (of_spec.sent == 0) == (spec == "local"), spec


def restore_all(
    rank: int, peers: Peers, saved: dict[str, tuple[dict[str, Tensor], list[WeightState]]]
) -> dict[str, WeightState]:
    states = {}
    for spec, (model, of_replicas) in saved.items():
        run = LocalRun(spec, peers)
        run.restore(model, of_replicas)
        states[spec] = copied(run.sync.state_dict())
    return states


def carried(model: dict[str, Tensor], states: Sequence[WeightState], name: str, *, mean: bool) -> dict[str, Tensor]:
    """Return the sum or mean over the replicas of a state; of local weights, their difference from the model."""
    base = model if name == "local_weights" else dict.fromkeys(model, torch.zeros(()))
    sums = {k: sum((s[name][k].double() - base[k].double() for s in states), torch.zeros(())) for k in model}
    return {key: total / len(states) if mean else total for key, total in sums.items()}


def test_state_is_conserved_when_the_number_of_replicas_changes(
    trained_on: Callable[[int], dict[int, list[dict[str, Trained]]]], tmp_path: Path
) -> None:
    """From 2 to 3; tests/unit/test_carry_over.py and test_gradient_runs.py have other numbers."""
    specs = [spec for spec in LOCAL_SPECS if spec != "local"]
    results, replicas = trained_on(2)[2], 3
    saved = {spec: (results[0][spec].models[-1], [result[spec].state for result in results]) for spec in specs}
    restored = on_replicas(replicas, restore_all, tmp_path / "store", saved)
    for spec, (model, states) in saved.items():
        for name in CARRIED & states[0].keys():
            after = [of_replica[spec] for of_replica in restored]
            before, now = (carried(model, each, name, mean=name != "server_residual") for each in (states, after))
            may_be_zero = "topk=1" in spec or name in ("local_weights", "sent_update")
            assert may_be_zero or any(tensor.any() for tensor in before.values()), (spec, name)
            for key, total in before.items():
                magnitude = max(float(state[name][key].abs().max()) for state in states)
                assert (now[key] - total).abs().max() <= 4 * 2.0**-24 * magnitude, (spec, name, key)


def test_weights_and_residuals_add_up_to_all_updates(trained: dict[int, list[dict[str, Trained]]]) -> None:
    """Local weights in the mean, with the residuals, are the sum of all updates, if these are not scaled or decayed.

    A step adds to each of these at most 8 times a value no larger than the largest of them, rounding each time.
    """
    for replicas, results in trained.items():
        for spec in CONSERVING:
            states, models = [r[spec].state for r in results], [r[spec].models[-1] for r in results]
            for index, key in enumerate(models[0]):
                zero = torch.zeros_like(models[0][key]).double()
                local = [s.get("local_weights", model)[key].double() for s, model in zip(states, models, strict=True)]
                server = sum((s.get("server_residual", {}).get(key, zero).double() for s in states), zero)
                residual = sum((s.get("residual", {}).get(key, zero).double() for s in states), zero)
                made = [gradients(rank, step)[index].double() for rank in range(replicas) for step in range(STEPS)]
                expected = -LR * torch.stack(made).sum(0) / replicas
                largest = LR * float(torch.stack(made).abs().sum(0).max())
                missing = torch.stack(local).mean(0) + server + residual / replicas - expected
                assert missing.abs().max() <= 8 * STEPS * 2.0**-24 * largest, (spec, replicas, key)
                assert (server + residual).any() or zero.numel() < 8, (spec, replicas, key)


def train_on_equal_data(rank: int, peers: Peers) -> dict[str, list[dict[str, Tensor]]]:
    models: dict[str, list[dict[str, Tensor]]] = {}
    for spec in LOSSLESS:
        run, models[spec] = LocalRun(spec, peers), []
        for step in range(STEPS):
            run.train(0, range(step, step + 1))
            models[spec].append(run.model())
    return models


def test_with_equal_data_the_model_is_that_of_one_process(tmp_path: Path) -> None:
    """The mean of the updates, not their sum. 8 bits leave less than a hundredth of the norm of an update.

    That remains in the residuals of both ends, beside the next update.
    """
    for spec, models in on_replicas(2, train_on_equal_data, tmp_path / "store")[0].items():
        delay, expected, largest = LOSSLESS[spec], [torch.zeros_like(weight.master) for weight in make_weights()], 0.0
        for step in range(STEPS - delay):
            update = [LR * grad for grad in gradients(0, step)]
            largest = max(largest, norm(update))
            expected = [value - each for value, each in zip(expected, update, strict=True)]
            model = [models[step + delay][weight.key] for weight in make_weights()]
            missing = [ours - value for ours, value in zip(model, expected, strict=True)]
            assert norm(missing) <= 2 * 0.01 * 1.02 * largest, spec


def train_diloco(rank: int, peers: Peers) -> dict[str, Tensor]:
    run = LocalRun("diloco:inner=2,outer_lr=0.7,momentum=0.9", peers)
    run.train(rank, range(STEPS))
    return run.model()


def test_the_outer_step_of_diloco_is_that_of_sgd_with_nesterov_momentum(tmp_path: Path) -> None:
    """On the mean over the replicas of what their inner steps have changed."""
    found = on_replicas(2, train_diloco, tmp_path / "store")[0]
    expected = [torch.zeros_like(weight.master) for weight in make_weights()]
    outer = torch.optim.SGD(expected, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, STEPS, 2):
        for index, shared in enumerate(expected):
            changes = [LR * gradients(rank, inner)[index] for rank in range(2) for inner in (step - 1, step)]
            shared.grad = torch.stack(changes).sum(0) / 2
        outer.step()
    for weight, value in zip(make_weights(), expected, strict=True):
        assert torch.allclose(found[weight.key], value, rtol=1e-5, atol=1e-6), weight.key


REDUNDANT = {
    "diloco:inner=3,redundant_steps=4": 4,
    "diloco:inner=2,fragments=2,redundant_steps=1": 1,
    "sparseloco:inner=2,chunk=16,redundant_steps=4": 4,
}
"""Specs with redundant steps, and their number."""


class Redundant(NamedTuple):
    """Results of the redundant steps of one replica."""

    local: dict[str, Tensor]
    """Its weights before the end of the last one."""
    after: dict[str, Tensor]
    shared: dict[str, Tensor]
    """The global ones."""
    sent: list[int]
    """Bytes of each step."""


def train_redundantly(rank: int, peers: Peers, rounding: float) -> dict[str, Redundant]:
    """Make the redundant steps. rounding: relative difference of the gradients of a replica from those of the one
    before it."""
    results = {}
    for spec, steps in REDUNDANT.items():
        run, local, sent = LocalRun(spec, peers), dict[str, Tensor](), list[int]()

        def keep(run: LocalRun = run, local: dict[str, Tensor] = local) -> None:
            local |= {w.key: (w.master.detach() - LR * w.master.grad).clone() for w in run.weights}

        for step in range(steps):
            grads = [grad * (1 + rounding * rank) for grad in gradients(0, step)]
            make_step(run.sync, run.weights, step, grads, before_commit=keep)
            sent.append(run.sync.meter.sent_bytes)
            run.sync.meter.reset()
        after = {weight.key: weight.master.detach().clone() for weight in run.weights}
        results[spec] = Redundant(local, after, run.model(), sent)
    return results


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_replicas_end_redundant_steps_with_equal_weights_and_send_them_only_if_they_differ(
    rounding: float, tmp_path: Path
) -> None:
    """Where hosts round differently, the weights are the mean of theirs."""
    first, second = on_replicas(2, train_redundantly, tmp_path / "store", rounding)
    numel = sum(weight.master.numel() for weight in make_weights())
    for spec in REDUNDANT:
        one, other = first[spec], second[spec]
        differ = any(not torch.equal(one.local[key], other.local[key]) for key in one.local)
        assert differ == (rounding > 0), spec
        for key, mine in one.local.items():
            mean = (mine + other.local[key]) / 2
            assert torch.equal(one.after[key], mean), spec
            assert all(torch.equal(x[key], mean) for x in (one.shared, other.after, other.shared)), spec
        *before, last = one.sent
        assert not any(before), spec
        assert last > 4 * numel if differ else 0 < last < 100, (spec, last)


def restore_in_redundant_steps(rank: int, peers: Peers) -> list[dict[str, Tensor]]:
    """Make local steps, and go on in a run that has more redundant ones; return the global and the local weights."""
    run = LocalRun("diloco:inner=4", peers)
    run.train(rank, range(3))
    states, resumed = gather_states(copied(run.sync.state_dict()), peers.group), LocalRun(REDUNDANT_TO_5, peers)
    resumed.restore(run.model(), states)
    resumed.train(0, range(3, 4))
    return [run.model(), resumed.model(), {w.key: w.master.detach().clone() for w in resumed.weights}]


REDUNDANT_TO_5 = "diloco:inner=4,redundant_steps=5"


def test_redundant_steps_begin_with_the_global_weights(tmp_path: Path) -> None:
    """Also if local steps come before them: a run is resumed with more of them."""
    grads = gradients(0, 3)
    for before, shared, local in on_replicas(2, restore_in_redundant_steps, tmp_path / "store"):
        for weight, grad in zip(make_weights(), grads, strict=True):
            expected = before[weight.key] - LR * grad
            assert torch.equal(shared[weight.key], expected)
            assert torch.equal(local[weight.key], expected)


def stop_in_a_redundant_step(rank: int, peers: Peers) -> dict[str, Tensor]:
    """Hand over the state between the update of a redundant step and its end; return the weights."""
    run = LocalRun(REDUNDANT_TO_5, peers)
    run.sync.begin_step(0)
    with torch.no_grad():
        for weight, grad in zip(run.weights, gradients(0, 0), strict=True):
            weight.master.sub_(LR * grad)
    run.sync.take_state()
    return {weight.key: weight.master.detach().clone() for weight in run.weights}


def test_a_redundant_step_is_not_lost_when_replicas_change_before_its_end(tmp_path: Path) -> None:
    for weights in on_replicas(2, stop_in_a_redundant_step, tmp_path / "store"):
        for weight, grad in zip(make_weights(), gradients(0, 0), strict=True):
            assert torch.equal(weights[weight.key], -LR * grad)


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def lose(rank: int, world_size: int, store: Path, spec: str) -> tuple[int, ...] | None:
    """Train until replica 1 ends before its fourth step; return the ranks that the error of the other names."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    with connect(Topology.of(rank, world_size, 1), timeout=TIMEOUT, store=file_store) as groups:
        run = LocalRun(spec, Peers(groups.dp, groups.waits))
        run.train(rank, range(3))
        dist.barrier()
        if rank == 1:
            return None  # its connections close
        with pytest.raises(RunError, match="exchanging updates with replica 1, rank 1") as failed:
            run.train(rank, range(3, STEPS))
        return failed.value.awaited


@pytest.mark.parametrize("spec", ["cocktail", "diloco:inner=4", "sparseloco:inner=4"])
def test_the_error_names_a_replica_that_ended(spec: str, tmp_path: Path) -> None:
    assert on_ranks(2, lose, tmp_path / "store", spec) == [(1,), None]


CHANGES = [
    ("local", "cocktail", ""),
    ("local", "sparseloco:inner=2", ""),
    ("local", "diloco:inner=2", ""),
    ("cocktail", "diloco:inner=2", "['server_residual']"),
    ("diloco:inner=2", "local", "['outer_momentum']"),
    (
        "cocktail",
        "allreduce",
        "['local_weights', 'second_moment_means', 'second_moment_ratios', 'server_residual']",
    ),
]
"""Mode that saved, mode that resumes, names in the error; "" = it resumes."""


def change_modes(rank: int, peers: Peers) -> list[str]:
    """Return the error of each change of the mode, or ""."""
    errors = []
    for before, after, _ in CHANGES:
        run, other = LocalRun(before, peers), LocalRun(after, peers)
        run.train(rank, range(4))
        states = gather_states(copied(run.sync.state_dict()), peers.group)
        try:
            other.restore(run.model(), states)
            other.train(rank, range(4, STEPS))
            errors.append("")
        except RunError as error:
            errors.append(str(error))
    return errors


def test_another_mode_resumes_unless_it_would_discard_state(tmp_path: Path) -> None:
    for errors in on_replicas(2, change_modes, tmp_path / "store"):
        for (before, after, names), error in zip(CHANGES, errors, strict=True):
            expected = f"the checkpoint holds {names} of another data-parallel mode" if names else ""
            assert error.startswith(expected), (before, after)
            assert bool(error) == bool(names), (before, after)
