"""The supervisor's decisions: its state machine case by case, and against a simulated cluster of 4,096 ranks."""

import math

import pytest

from meshwright.errors import ConfigError
from meshwright.launch.events import (
    Asked,
    Ended,
    Ending,
    FindVerified,
    Finish,
    Say,
    Silent,
    Start,
    Stop,
    Tick,
    Verified,
)
from meshwright.launch.supervisor import Policy, Supervisor

from .simulated_cluster import Cluster, Rates

KILLED, DONE, RESUME, LOST = Ending(signal=9), Ending(code=0), Ending(code=75), Ending(code=76)


def started(places=2, sizes=None, **policy):
    supervisor = Supervisor([f"node{i}" for i in range(places)], sizes or [places], policy=Policy(**policy))
    supervisor.begin()
    return supervisor


def fail(supervisor, now, *, rank=1, step=None, verified=None, ending=KILLED):
    """Lets a rank die, and returns the text and the actions after the check."""
    assert supervisor.handle(Ended({rank: ending}, step), now) == [Stop(force=True)]
    others = {other: KILLED for other in range(supervisor.num_places) if other != rank}
    assert supervisor.handle(Ended(others), now + 0.1) == [FindVerified()]
    said, *rest = supervisor.handle(Verified(verified), now + 0.2)
    return said.text, rest


def restart(supervisor):
    [start] = supervisor.handle(Tick(), supervisor.wakes_at)
    assert isinstance(start, Start)
    return start


def test_a_run_whose_ranks_all_finish_is_done():
    supervisor = started()
    assert supervisor.handle(Ended({0: DONE}), 1.0) == []
    assert supervisor.handle(Ended({1: DONE}), 2.0) == [Finish(0)]
    assert supervisor.handle(Ended({1: KILLED}), 3.0) == []  # over


def test_the_rank_that_failed_is_named_not_the_one_that_lost_it():
    supervisor = started()
    assert supervisor.handle(Ended({0: LOST}, step=8), 1.0) == []
    assert supervisor.handle(Ended({1: Ending(code=1, message="OSError: disk gone")}), 1.5) == [FindVerified()]
    [said] = supervisor.handle(Verified(5), 1.6)
    assert said.text.startswith(
        "rank 1 on node1 failed with exit code 1 at step 8; the other rank was stopped. Its last"
    )
    assert (
        '"OSError: disk gone". Step 5 is the newest verified checkpoint; steps 6 to 8 are computed again.' in said.text
    )


def test_if_all_ranks_lost_each_other_the_run_restarts():
    supervisor = started()
    supervisor.handle(Ended({0: LOST}, step=8), 1.0)
    assert supervisor.handle(Tick(), 2.9) == []
    assert supervisor.handle(Tick(), 3.0) == [Stop(force=True)]
    supervisor.handle(Ended({1: KILLED}), 3.1)
    [said] = supervisor.handle(Verified(5), 3.2)
    assert "rank 0 on node0 lost contact with another rank at step 8" in said.text


def test_a_silent_rank_is_stopped_and_its_host_left_out_while_it_cannot_be_reached():
    supervisor = started(3, [2])
    assert supervisor.handle(Silent((1,), 61.0, step=4), 100.0) == [Stop(force=True)]
    assert supervisor.handle(Ended({0: KILLED}), 100.1) == []
    assert supervisor.handle(Tick(), 129.0) == []
    assert supervisor.handle(Tick(), 130.0) == [FindVerified()]  # rank 1 never ended
    [said] = supervisor.handle(Verified(None), 130.0)
    assert "rank 1 on node1 has given no sign of life for 61 s" in said.text
    assert restart(supervisor).places == ("node0", "node2")


def test_failures_without_progress_end_the_run_and_progress_refills_the_budget():
    supervisor = started(max_failures=2)
    pauses = []
    for now, verified in ((10, None), (20, None), (30, 5), (40, 5)):
        text, rest = fail(supervisor, now, step=9, verified=verified)
        assert rest == []
        pauses.append(supervisor.wakes_at - now - 0.2)
        assert restart(supervisor).step == verified
    assert pauses == pytest.approx([1, 2, 1, 2])
    text, rest = fail(supervisor, 50, step=9, verified=5)
    assert rest == [Finish(1)]
    assert "not restarted: this was failure 3 without a new checkpoint" in text


def test_a_newer_snapshot_is_progress_too():
    supervisor = started(max_failures=1)

    def die(now, snapshot):
        supervisor.handle(Ended({0: KILLED, 1: KILLED}, step=9), now)
        return supervisor.handle(Verified(2, snapshot), now)

    for now, snapshot in ((10, 3), (20, 6)):
        [said] = die(now, snapshot)
        assert f"verified checkpoint, step {snapshot} is in host memory; steps {snapshot + 1} to 9 are" in said.text
        assert "(failure 1 of at most 1" in said.text
        assert restart(supervisor).step == 2
    assert die(30, 6)[-1] == Finish(1)


def test_preemptions_have_their_own_budget():
    supervisor = started(max_failures=0, max_preemptions=2)
    for now in (1, 2):
        supervisor.handle(Ended({0: RESUME, 1: RESUME}, step=3), now)
        [said] = supervisor.handle(Verified(None), now)
        assert "the run was preempted at step 3 and saved." in said.text
        assert f"(preemption {now} of at most 2 without" in said.text
        restart(supervisor)
    supervisor.handle(Ended({0: RESUME, 1: RESUME}), 3)
    assert supervisor.handle(Verified(None), 3)[-1] == Finish(1)


def test_a_rank_that_does_not_end_with_the_others_is_killed():
    supervisor = started(grace_seconds=10)
    supervisor.handle(Ended({0: DONE}, step=9), 1.0)
    assert supervisor.handle(Tick(), 11.0) == [Stop(force=True)]
    assert supervisor.handle(Ended({1: KILLED}), 11.1) == [FindVerified()]
    [said] = supervisor.handle(Verified(9), 11.2)
    assert "rank 1 on node1 hung" in said.text


@pytest.mark.parametrize(
    ("ending", "text"), [(Ending(code=2), "wrong"), (Ending(code=1, message="no such file"), "no such")]
)
def test_an_error_before_the_first_step_is_not_repeated(ending, text):
    supervisor = started()
    said, rest = fail(supervisor, 1.0, ending=ending)
    assert rest == [Finish(1)]
    assert "failed before its first step, so it is not restarted" in said
    supervisor = started()  # but a rank that was killed may start again
    assert fail(supervisor, 1.0)[1] == []


def test_a_request_to_stop_saves_and_a_second_one_kills():
    supervisor = started()
    said, stop = supervisor.handle(Asked(), 1.0)
    assert (type(said), stop) == (Say, Stop(force=False))
    supervisor.handle(Ended({0: RESUME, 1: RESUME}, step=7), 2.0)
    said, finish = supervisor.handle(Verified(7), 2.0)
    assert "stopped on request at step 7" in said.text
    assert finish == Finish(75)
    supervisor = started()
    supervisor.handle(Asked(), 1.0)
    assert supervisor.handle(Asked(), 1.1) == [Stop(force=True), Finish(130)]
    supervisor = started(grace_seconds=5)  # ranks that do not react are killed
    supervisor.handle(Asked(), 1.0)
    assert supervisor.handle(Tick(), 6.0) == [Stop(force=True)]
    supervisor.handle(Ended({0: KILLED, 1: KILLED}), 6.1)
    assert supervisor.handle(Verified(None), 6.2)[-1] == Finish(75)
    supervisor = started()
    fail(supervisor, 1.0, step=3)
    assert supervisor.handle(Asked(), 1.5) == [Finish(75)]  # between two attempts


def test_a_host_that_fails_repeatedly_is_left_out():
    supervisor = started(3, [2], quarantine_after=3, max_failures=9)
    for now in (10, 20):
        assert "not used" not in fail(supervisor, now)[0]
        assert restart(supervisor).places == ("node0", "node1")
    assert "node1 failed 3 times within 24 h and is not used for 24 h." in fail(supervisor, 30)[0]
    assert restart(supervisor).places == ("node0", "node2")
    fail(supervisor, 40 + 86400, rank=0)
    assert restart(supervisor).places == ("node0", "node2")  # back, as a spare
    # Without a spare, the host stays.
    supervisor = started(quarantine_after=1, max_failures=9)
    assert "not used" not in fail(supervisor, 10)[0]
    assert restart(supervisor).places == ("node0", "node1")


def test_a_run_continues_on_fewer_hosts_if_it_may():
    supervisor = started(4, [4, 2, 1], quarantine_after=1)
    supervisor.allow(lambda size: size != 1)
    text, _ = fail(supervisor, 1.0, rank=3, step=6, verified=5)
    assert "restarts on 2 ranks instead of 4" in text
    assert restart(supervisor).places == ("node0", "node1")
    fail(supervisor, 10.0, rank=1, step=8, verified=5)
    assert restart(supervisor).places == ("node0", "node2")
    fail(supervisor, 20.0, rank=0, step=8, verified=5)  # one host alone is not allowed, so it stays
    assert restart(supervisor).places == ("node0", "node2")


def test_with_too_few_hosts_it_waits_for_the_lost_ones():
    supervisor = started(lost_seconds=100)
    supervisor.handle(Silent((1,), 60.0), 1000.0)
    supervisor.handle(Ended({0: KILLED}), 1000.0)
    supervisor.handle(Tick(), 1030.0)
    [said] = supervisor.handle(Verified(None), 1030.0)
    assert "restarts in 100 s" in said.text
    assert restart(supervisor).places == ("node0", "node1")


def test_impossible_sizes_and_policies_are_refused():
    with pytest.raises(ConfigError, match=r"of 1 hosts is impossible"):
        Supervisor(["a"], [2])
    with pytest.raises(ConfigError, match=r"`backoff` must be at least 0; got -1"):
        Policy(backoff=-1)


@pytest.mark.parametrize("seed", [0, 1])
def test_4096_ranks_over_10000_hours(seed):
    """Never a deadlock, never an unverified step, and as much work done as the closed form allows."""
    rates, hosts, per_host = Rates(), 512, 8
    places = [f"node{i}" for i in range(hosts + 16)]
    policy = Policy(max_failures=20)
    supervisor = Supervisor(places, [hosts], ranks_per_place=per_host, policy=policy)
    cluster = Cluster(supervisor, rates, hosts * per_host, per_host, seed=seed).run(hours=10_000)
    assert cluster.code is None  # still running
    assert min(cluster.counts[kind] for kind in ("death", "hang", "partition", "preemption")) > 20
    goodput = max(cluster.verified) * rates.step / cluster.now
    assert goodput == pytest.approx(expected_goodput(rates, policy), rel=0.05)


def expected_goodput(rates, policy):
    """Daly's closed form: failures at a constant rate, saves at a constant interval, failures also during a start."""
    means = {"death": rates.death, "hang": rates.hang, "partition": rates.partition}
    rate = sum(1 / mean for mean in means.values())
    interval = rates.step * rates.steps_per_save
    stopping = {"death": 0.5, "hang": rates.silent + 0.5, "partition": rates.silent + policy.stop_seconds}
    down = sum(stopping[kind] / means[kind] for kind in means) / rate + policy.backoff
    down += rates.verify_lag + rates.damaged * interval  # work since an older save, computed again
    per_interval = (1 / rate + down) * math.exp(rate * rates.start) * math.expm1(rate * interval)
    preempted = 1 + (rates.start + policy.backoff) / rates.preemption
    return interval / per_interval / preempted
