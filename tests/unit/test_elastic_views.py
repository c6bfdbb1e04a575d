"""Laws of membership: at most one view trains at any time, and the run continues wherever it can."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from lib.view_simulator import TIMING, SimulatedHost, Simulation, run_history

from acsgd.elastic.membership.effects import KillHung, Send
from acsgd.elastic.membership.messages import Decided, Host, Prepare, is_majority

HISTORIES = 150


@pytest.mark.parametrize("part", range(3))
def test_random_histories(part: int) -> None:
    """Hosts are killed, started again, paused, cut off; messages and records are lost. The simulator has the laws."""
    seeds = range(part * HISTORIES, (part + 1) * HISTORIES)
    steps = [len(run_history(seed, has_own_disks=seed % 2 == 1).steps) for seed in seeds]
    assert min(steps) > 0


def simulation(hosts: int, *, seed: int = 1, **options: int) -> Simulation:
    """Return a run in which all hosts train together."""
    result = Simulation(seed, hosts=hosts, min_hosts=hosts, **options)
    result.run(10)
    assert hosts_of(result) == hosts
    return result


def hosts_of(result: Simulation) -> int:
    """Return the number of hosts of the newest view, which trains."""
    before = len(result.steps)
    result.run(1)
    newest = max(result.register)
    assert len(result.steps) > before, "nothing trains"
    assert result.steps[-1] == newest
    return len(result.register[newest].hosts)


@pytest.mark.parametrize("dead", [[0], [1], [0, 1], [1, 2], [0, 1, 2]])
def test_the_others_train_on_when_any_hosts_end(dead: list[int]) -> None:
    run = simulation(4)
    for number in dead:
        run.kill(run.hosts[number])
    run.run(2)  # a port that refuses is noticed at once
    assert hosts_of(run) == 4 - len(dead)


def test_a_host_that_ends_while_the_next_view_is_formed_is_left_out_as_well() -> None:
    run = simulation(4)
    run.kill(run.hosts[3])
    run.run(0.15)
    run.kill(run.hosts[0])
    run.run(3)
    assert hosts_of(run) == 2


def test_a_host_that_is_started_again_joins() -> None:
    run = simulation(3)
    run.kill(run.hosts[0])
    run.run(3)
    run.restart(run.hosts[0])
    run.run(4)
    assert hosts_of(run) == 3


@pytest.mark.parametrize("seed", range(6))
def test_in_a_partition_the_larger_part_trains_on_and_the_smaller_joins_again_afterwards(seed: int) -> None:
    """Whichever part notices first."""
    run = simulation(5, seed=seed)
    run.partition(run.hosts[:2])
    run.run(4 * TIMING.silence_s)
    assert {host.address for host in run.register[max(run.register)].hosts} == {f"host{n}:1" for n in (2, 3, 4)}
    assert hosts_of(run) == 3
    run.heal()
    run.run(6)
    assert hosts_of(run) == 5


def test_of_two_halves_that_of_the_most_senior_host_trains_on() -> None:
    run = simulation(4)
    senior = run.register[max(run.register)].hosts[0].address
    half = [host for host in run.hosts if host.address == senior][:1]
    half += [host for host in run.hosts if host.address != senior][:1]
    run.partition(half)
    run.run(5 * TIMING.silence_s)
    assert {host.address for host in run.register[max(run.register)].hosts} == {host.address for host in half}
    assert hosts_of(run) == 2


def test_a_host_that_was_paused_joins_again_without_disturbing_the_others() -> None:
    run = simulation(3)
    run.hosts[0].is_paused = True
    run.run(4)
    assert hosts_of(run) == 2
    run.resume(run.hosts[0])
    run.run(4)
    assert hosts_of(run) == 3


def test_a_link_between_two_hosts_that_breaks_leaves_out_one_of_them() -> None:
    run = simulation(3)
    run.cuts.add(frozenset((run.hosts[1].address, run.hosts[2].address)))
    run.run(8)
    epoch = max(run.register)
    run.run(20)
    assert hosts_of(run) == 2
    assert max(run.register) == epoch  # the one that is left out does not come back before the link does
    run.heal()
    run.run(4)
    assert hosts_of(run) == 3


def test_spares_alone_do_not_continue_while_the_ranks_may_train() -> None:
    run = simulation(3, stages=2)  # one pipeline of two hosts, and a spare
    view = run.register[max(run.register)]
    spare = next(host for host in run.hosts if host.me.id not in view.rank_hosts())
    run.partition([spare])
    run.run(60)
    assert hosts_of(run) == 2
    assert spare.running is None or spare.running.epoch == view.epoch


def test_a_spare_does_not_train_while_the_ranks_are_paused_and_may_go_on() -> None:
    run = simulation(2, max_replicas=1)
    view = run.register[max(run.register)]
    (trainer,) = (host for host in run.hosts if host.me.id in view.rank_hosts())
    trainer.is_paused = True
    run.run(60)
    assert max(run.register) == view.epoch
    run.resume(trainer)
    run.run(5)
    assert hosts_of(run) == 2
    run.kill(trainer)  # that it has ended is certain, so the spare continues
    run.run(5)
    assert hosts_of(run) == 1


def test_a_host_that_leaves_is_not_missed_and_the_last_one_stays() -> None:
    run = simulation(2)
    first, last = run.hosts
    first.membership.leave()
    run.run(TIMING.leave_s + 1)
    run.kill(first)
    assert hosts_of(run) == 1
    last.membership.leave()
    run.run(10)
    assert hosts_of(run) == 1


def test_hosts_that_leave_shortly_after_each_other_stay_together_until_all_do() -> None:
    run = simulation(5)
    before = max(run.register)
    for host in run.hosts:
        host.membership.leave()
        run.run(TIMING.leave_s - 2 * TIMING.heartbeat_s)
        assert max(run.register) == before, "one leaves, and the last one will save alone"
    run.run(10)
    assert max(run.register) == before
    assert hosts_of(run) == 5

    run = simulation(3)
    for host in run.hosts[:2]:
        host.membership.leave()
    run.run(TIMING.leave_s + 3)
    assert [host.address for host in run.register[before + 1].hosts] == [run.hosts[2].address], "the last one stays"


@pytest.mark.parametrize(
    ("working_s", "is_killed"),
    [
        ((None, None, TIMING.hang_s - 1), (False, False, False)),
        ((None, None, TIMING.hang_s), (False, False, True)),
        ((None, TIMING.hang_s, TIMING.hang_s), (False, True, True)),
        ((TIMING.hang_s, None, None), (True, False, False)),
        ((None, 1.0, TIMING.hang_s), (False, False, False)),
    ],
)
def test_ranks_that_work_for_too_long_while_all_others_wait_for_them_are_killed(
    working_s: Sequence[float | None], is_killed: Sequence[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """working_s: how long the ranks of each host have worked; None = they wait."""
    run, killed = simulation(3), set[str]()
    carry_out = SimulatedHost.carry_out

    def record(host: SimulatedHost, effect: object) -> None:
        killed.update({host.address} if isinstance(effect, KillHung) else ())
        carry_out(host, effect)

    monkeypatch.setattr(SimulatedHost, "carry_out", record)
    for host, seconds in zip(run.hosts, working_s, strict=True):
        host.membership.working_s = seconds
    run.run(4 * TIMING.heartbeat_s)
    assert [host.address in killed for host in run.hosts] == [*is_killed]


def test_a_request_to_prepare_a_view_that_there_is_already_is_answered_with_it() -> None:
    run = simulation(3)
    first, second, _ = run.hosts
    view = second.running
    assert view is not None
    second.membership.take_effects()
    second.membership.receive(first.me, Prepare(None, view.epoch, at_step_end=True), run.now)
    sent = [effect.message for effect in second.membership.take_effects() if isinstance(effect, Send)]
    assert sent == [Decided(view)]


def test_a_run_starts_again_after_all_of_its_hosts_have_ended_with_a_higher_epoch() -> None:
    run = simulation(3)
    before = max(run.register)
    for host in run.hosts:
        run.kill(host)
    run.run(5)
    run.min_hosts = 1
    for host in run.hosts[:2]:
        run.restart(host)
    run.run(10)
    assert hosts_of(run) == 2
    assert max(run.register) > before


def test_a_run_that_has_stopped_ends_once_the_hosts_without_ranks_leave_as_well() -> None:
    run = simulation(2, max_replicas=1)
    view = run.register[max(run.register)]
    spare, trainer = sorted(run.hosts, key=lambda host: host.me.id in view.rank_hosts())
    for host in run.hosts:
        host.membership.leave()
    trainer.input(trainer.membership.finish_if_all_leave)
    run.run(3)
    assert run.register[max(run.register)].hosts == (), "the run has ended"

    run = simulation(2, max_replicas=1)
    view = run.register[max(run.register)]
    spare, trainer = sorted(run.hosts, key=lambda host: host.me.id in view.rank_hosts())
    trainer.membership.leave()
    trainer.input(trainer.membership.finish_if_all_leave)
    run.run(3)
    assert [host.address for host in run.register[view.epoch + 1].hosts] == [spare.address], "it stays"


@pytest.mark.parametrize(("dead", "trains"), [([2], True), ([1, 2], False), ([0, 1], False)])
def test_with_disks_of_their_own_a_majority_of_the_hosts_trains_on(dead: list[int], trains: bool) -> None:
    run = simulation(3, has_own_disks=True)
    epoch = max(run.register)
    for number in dead:
        run.kill(run.hosts[number])
    run.run(20)
    assert (max(run.register) > epoch) is trains
    run.heal()
    run.run(10)
    assert hosts_of(run) == 3


def test_of_two_hosts_with_disks_of_their_own_the_senior_one_trains_on_alone() -> None:
    run = simulation(2, has_own_disks=True)
    view = run.register[max(run.register)]
    senior, junior = sorted(run.hosts, key=lambda host: host.me.id != view.hosts[0].id)
    run.partition([senior])
    run.run(20)
    assert [host.id for host in run.register[max(run.register)].hosts] == [senior.me.id]
    run.kill(senior)
    run.restart(junior)
    run.heal()
    run.kill(senior)
    before = len(run.steps)
    run.run(60)
    assert len(run.steps) == before, "the junior host, which was cut off, waits for the other one"
    assert "start host" in junior.membership.describe_wait(run.now)
    assert "--elastic.force true" in junior.membership.describe_wait(run.now)


def test_a_run_starts_again_with_a_majority_of_its_disks_or_by_force() -> None:
    run = simulation(5, has_own_disks=True)
    history = run.register[max(run.register)].history
    for host in run.hosts:
        run.kill(host)
    run.run(5)
    run.min_hosts = 1
    before = len(run.steps)
    for host in run.hosts[:2]:
        run.restart(host)
    run.run(30)
    assert len(run.steps) == before, "two of five wait"
    run.restart(run.hosts[4])
    run.run(10)
    assert hosts_of(run) == 3
    for host in run.hosts[1:]:
        run.kill(host)
    run.force = True
    run.kill(run.hosts[0])
    run.restart(run.hosts[0])
    run.run(10)
    assert hosts_of(run) == 1
    assert run.register[max(run.register)].history != history
    run.force = False
    refused = run.hosts[3]  # which has the history that was given up
    run.restart(refused)
    run.run(10)
    assert hosts_of(run) == 1
    assert run.refusals == {refused.me.id: ("history",)}


def test_a_majority_that_is_lost_before_its_view_is_recorded_leaves_a_host_that_waits() -> None:
    run = simulation(3, has_own_disks=True)
    epoch = max(run.register)
    for host in run.hosts:
        run.kill(host)
    run.run(5)
    run.min_hosts, run.register_loss = 1, 1.0
    first, second = run.hosts[:2]
    run.restart(first)
    run.restart(second)
    run.run(10)  # the first requests the view again and again
    run.kill(second)
    run.register_loss = 0.0
    run.run(30)
    assert max(run.register) == epoch, "one of three waits"
    run.restart(second)
    run.run(10)
    assert hosts_of(run) == 2


def test_a_majority_without_ranks_waits_for_one_that_may_train_or_for_force() -> None:
    run = simulation(3, has_own_disks=True, max_replicas=1)
    view = run.register[max(run.register)]
    trainer, *spares = sorted(run.hosts, key=lambda host: host.me.id not in view.rank_hosts())
    run.partition([trainer])
    for spare in spares:
        run.kill(spare)
    run.run(5)
    run.min_hosts = 1
    for spare in spares:
        run.restart(spare)
    run.run(30)
    assert max(run.register) == view.epoch, "the other one trains"
    wait = next(spare.membership.describe_wait(run.now) for spare in spares)
    assert wait.startswith(f"the run may still train on {trainer.address}, ")
    assert "--elastic.force true" in wait
    run.kill(trainer)
    run.force = True
    for spare in spares:
        run.kill(spare)
        run.restart(spare)
    run.run(10)
    assert hosts_of(run) == 2
    assert run.register[max(run.register)].history != view.history


def test_the_first_view_waits_for_the_hosts_of_all_endpoints_for_a_while() -> None:
    run = Simulation(1, hosts=2, has_own_disks=True)
    run.kill(run.hosts[1])
    run.run(4)
    assert not run.register, "the other host may know of a run"
    run.restart(run.hosts[1])
    run.run(3)
    assert len(run.register[1].hosts) == 2

    run = Simulation(1, hosts=2)
    run.kill(run.hosts[1])
    run.run(10)
    assert hosts_of(run) == 1


def test_a_view_of_another_history_does_not_end_this_one() -> None:
    run = simulation(2, has_own_disks=True)
    newest = run.register[max(run.register)]
    stranger = Host("stranger", "elsewhere:1", "elsewhere")
    other = replace(newest, epoch=newest.epoch + 5, hosts=(stranger,), history="other")
    for message in (Decided(other), Prepare(other, other.epoch + 1, at_step_end=True)):
        run.hosts[0].input(lambda message=message: run.hosts[0].membership.receive(stranger, message, run.now))
    run.run(5)
    assert hosts_of(run) == 2
    assert run.hosts[0].membership.newest.history == newest.history


def test_any_two_majorities_have_a_disk_in_common() -> None:
    for count in range(1, 6):
        voters = [str(number) for number in range(count)]
        subsets = [{*chosen} for size in range(count + 1) for chosen in itertools.combinations(voters, size)]
        for chosen in subsets:
            assert is_majority(chosen, voters) != is_majority({*voters} - chosen, voters)
