import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.scheduler.placement import Allocation, Demand, Node
from opentinker.scheduler.plan import (
    DriverOutcome,
    End,
    FaultKind,
    JobView,
    Restart,
    Run,
    ServerView,
    Snapshot,
    Start,
    Stop,
    Wait,
    plan,
)
from opentinker.scheduler.queueing import Policy
from opentinker.scheduler.settings import Quota
from opentinker.scheduler.states import JobState, ServerState, move_job

SLOT = Demand(cpu_slots=1)
NODES = [Node("n", "n", 0, 1)]
HELD = (Allocation("n", SLOT),)
SERVER = ServerView("s", ServerState.READY, HELD, ("j",))


def job(state: JobState, lease: float | None = None) -> JobView:
    return JobView("j", state, (SLOT,), lease)


def test_a_queued_job_starts_where_a_slot_is_free() -> None:
    assert plan(Snapshot(0.0, NODES, [job(JobState.QUEUED)])) == [Start("j", HELD)]


def test_a_job_runs_once_its_server_is_ready() -> None:
    starting = replace(SERVER, state=ServerState.STARTING)
    assert plan(Snapshot(0.0, NODES, [job(JobState.STARTING)], [starting])) == []
    assert plan(Snapshot(0.0, NODES, [job(JobState.STARTING)], [SERVER])) == [Run("j")]


def test_a_lease_expires_in_every_living_state() -> None:
    for state, servers in ((JobState.QUEUED, []), (JobState.STARTING, [SERVER]), (JobState.RUNNING, [SERVER])):
        assert plan(Snapshot(9.9, NODES, [job(state, lease=10.0)], servers))[:1] != [End]
        (end, *_) = plan(Snapshot(10.0, NODES, [job(state, lease=10.0)], servers))
        assert end == End("j", JobState.CANCELLED, "lease expired: no heartbeat for 30 s")


def test_a_driver_ends_its_job() -> None:
    running = [job(JobState.RUNNING)]
    done = Snapshot(0.0, NODES, running, [SERVER], {"j": DriverOutcome()})
    assert plan(done) == [End("j", JobState.COMPLETED)]
    failed = Snapshot(0.0, NODES, running, [SERVER], {"j": DriverOutcome("no such environment")})
    assert plan(failed) == [End("j", JobState.FAILED, "no such environment")]


def test_the_death_of_the_server_is_the_cause_and_the_drivers_error_its_echo() -> None:
    dead = replace(SERVER, fault="the worker died")
    outcomes = {"j": DriverOutcome("connection refused", "unavailable")}
    assert plan(Snapshot(0.0, NODES, [job(JobState.RUNNING)], [dead], outcomes)) == [
        End("j", JobState.FAILED, "the worker died")
    ]


def test_a_driver_that_finished_has_finished_whatever_happens_to_its_server_then() -> None:
    dead = replace(SERVER, fault="the worker died")
    assert plan(Snapshot(0.0, NODES, [job(JobState.RUNNING)], [dead], {"j": DriverOutcome()})) == [End("j", JobState.COMPLETED)]


def test_a_job_that_reached_its_time_limit_fails_and_says_so() -> None:
    for state in (JobState.STARTING, JobState.RUNNING):
        limited = replace(job(state), time_limit_s=3600.0, holds_since=100.0)
        assert End not in [
            type(d) for d in plan(Snapshot(3699.9, NODES, [limited], [replace(SERVER, state=ServerState.STARTING)]))
        ]
        assert plan(Snapshot(3700.0, NODES, [limited], [SERVER])) == [
            End("j", JobState.FAILED, "reached its time limit of 1 h")
        ]
    finished = Snapshot(3700.0, NODES, [replace(limited)], [SERVER], {"j": DriverOutcome()})
    assert plan(finished) == [End("j", JobState.COMPLETED)]
    dead = Snapshot(3700.0, NODES, [limited], [replace(SERVER, fault="the worker died")])
    assert plan(dead) == [End("j", JobState.FAILED, "the worker died")]


def test_the_last_tenth_of_a_time_limit_is_for_the_checkpoint() -> None:
    limited = replace(job(JobState.RUNNING), time_limit_s=1000.0, holds_since=0.0, saves=True)
    saved = End("j", JobState.FAILED, "reached its time limit of 17 min", save=True)
    assert plan(Snapshot(899.9, NODES, [limited], [SERVER])) == []
    assert plan(Snapshot(900.0, NODES, [limited], [SERVER])) == [saved]
    assert plan(Snapshot(900.0, NODES, [replace(limited, saves=False)], [SERVER])) == []
    assert plan(Snapshot(950.0, NODES, [limited], [SERVER], last_checkpoint_s=40.0)) == []
    assert plan(Snapshot(960.0, NODES, [limited], [SERVER], last_checkpoint_s=40.0)) == [saved]
    assert plan(Snapshot(1000.0, NODES, [limited], [SERVER])) == [replace(saved, save=False)]


def test_a_job_that_was_asked_to_stop_stops_whatever_happens() -> None:
    asked = replace(job(JobState.RUNNING), stopping="stopped by its owner", restarts_left=9, returns_left=9)
    assert plan(Snapshot(0.0, NODES, [asked], [SERVER])) == [End("j", JobState.CANCELLED, "stopped by its owner", save=True)]
    assert plan(Snapshot(0.0, NODES, [asked], [SERVER], {"j": DriverOutcome()})) == [End("j", JobState.COMPLETED)]
    late = replace(asked, time_limit_s=10.0, holds_since=0.0)
    assert plan(Snapshot(10.0, NODES, [late], [SERVER])) == [End("j", JobState.CANCELLED, "stopped by its owner")]
    lost = End("j", JobState.CANCELLED, "stopped by its owner; no checkpoint could be written: the worker died")
    assert plan(Snapshot(0.0, NODES, [asked], [replace(SERVER, fault="the worker died")])) == [lost]
    assert plan(Snapshot(0.0, NODES, [asked], [SERVER], {"j": DriverOutcome("the worker died", lost=True)})) == [lost]


def test_what_would_fail_again_is_not_tried_again_and_what_had_no_place_is_not_counted() -> None:
    starting = replace(job(JobState.STARTING), restarts_left=1, returns_left=1)
    server = replace(SERVER, state=ServerState.STARTING, fault="why")
    for kind, decision in (
        (FaultKind.REFUSED, End("j", JobState.FAILED, "why")),
        (FaultKind.UNPLACED, Restart("j", "why", counted=False)),
        (FaultKind.LOST, Restart("j", "why")),
    ):
        assert plan(Snapshot(0.0, NODES, [starting], [replace(server, fault_kind=kind)])) == [decision]
    often = replace(starting, returns_left=0, restarts_left=0)
    unplaced = replace(server, fault_kind=FaultKind.UNPLACED)
    assert plan(Snapshot(0.0, NODES, [often], [unplaced])) == [End("j", JobState.FAILED, "why")]


def test_an_idle_server_ends_its_job_in_the_jobs_own_way() -> None:
    limited = replace(job(JobState.RUNNING), idle_limit_s=600.0, idle_end=JobState.COMPLETED)
    assert plan(Snapshot(0.0, NODES, [limited], [replace(SERVER, idle_s=599.9)])) == []
    assert plan(Snapshot(0.0, NODES, [job(JobState.RUNNING)], [replace(SERVER, idle_s=1e9)])) == []
    assert plan(Snapshot(0.0, NODES, [limited], [replace(SERVER, idle_s=600.0)])) == [
        End("j", JobState.COMPLETED, "its server was idle for 10 min, its limit", save=True)
    ]


def test_a_job_with_restarts_left_goes_back_into_the_queue_when_what_ran_it_is_lost() -> None:
    lost = DriverOutcome("the driver process died", lost=True)
    stuck = DriverOutcome("'white' on server 'second' held up the others in update 3 for 31 s", "agent_stuck")
    for restarts, decision in ((1, Restart), (0, End)):
        running = replace(job(JobState.RUNNING), restarts_left=restarts)
        for servers, outcomes, cause in (
            ([], {}, "its server is gone"),
            ([replace(SERVER, fault="the worker died")], {}, "the worker died"),
            ([SERVER], {"j": lost}, "the driver process died"),
            ([SERVER], {"j": stuck}, stuck.cause),
            ([replace(SERVER, fault="the worker died")], {"j": stuck}, "the worker died"),
        ):
            (first, *_) = plan(Snapshot(0.0, NODES, [running], servers, outcomes))
            assert isinstance(first, decision)
            assert first.cause == cause
    for cause, code in (("no such environment", ""), ("the driver of 'white' is lost: it left", "agent_lost")):
        failed = {"j": DriverOutcome(cause, code)}
        assert plan(Snapshot(0.0, NODES, [replace(running, restarts_left=9)], [SERVER], failed)) == [
            End("j", JobState.FAILED, cause)
        ]


def test_a_restarted_job_waits_until_nothing_is_left_of_its_earlier_server() -> None:
    nodes = [Node("n", "n", 0, 2)]
    again = job(JobState.QUEUED)
    assert plan(Snapshot(0.0, nodes, [again], [SERVER])) == [Wait("j", "its earlier server to be gone"), Stop("s")]
    assert plan(Snapshot(0.0, nodes, [again])) == [Start("j", HELD)]


def test_a_queued_job_has_no_time_limit_yet() -> None:
    limited = replace(job(JobState.QUEUED), time_limit_s=1.0)
    assert plan(Snapshot(1e9, NODES, [limited])) == [Start("j", HELD)]


def test_running_jobs_count_into_usage_and_quota() -> None:
    nodes = [Node("n", "n", 0, 2)]
    running = replace(job(JobState.RUNNING), owner="heavy", holds_since=0.0)
    mine = JobView("mine", JobState.QUEUED, (SLOT,), owner="heavy", submitted_at=50.0)
    theirs = JobView("theirs", JobState.QUEUED, (SLOT,), owner="light", submitted_at=90.0)
    decisions = plan(Snapshot(100.0, nodes, [running, mine, theirs], [SERVER]))
    assert decisions[0] == Start("theirs", HELD)
    policy = Policy(quotas={"heavy": Quota(jobs=1)})
    assert plan(Snapshot(100.0, nodes, [running, mine], [SERVER], policy=policy)) == [
        Wait("mine", "its owner's quota: 1 of 1 job running")
    ]


def test_the_time_of_the_estimate_is_that_of_the_last_job_on_a_shared_server() -> None:
    shared = replace(SERVER, jobs=("i", "j"))
    jobs = [
        JobView(name, JobState.RUNNING, (SLOT,), time_limit_s=limit, holds_since=0.0)
        for name, limit in (("i", 60.0), ("j", 720.0))
    ]
    queued = JobView("q", JobState.QUEUED, (SLOT,))
    assert plan(Snapshot(0.0, NODES, [*jobs, queued], [shared])) == [
        Wait("q", "needs 1 CPU slot; no CPU slot is free; estimated after i (in 12 min)")
    ]


def test_a_server_goes_with_the_last_job_that_uses_it() -> None:
    shared = replace(SERVER, jobs=("i", "j"))
    assert plan(Snapshot(0.0, NODES, [job(JobState.RUNNING)], [shared])) == []
    assert plan(Snapshot(0.0, NODES, [], [shared])) == [Stop("s")]


def test_a_slot_is_taken_until_its_server_is_gone() -> None:
    stopping = ServerView("s", ServerState.STOPPING, HELD, ("earlier",))
    assert plan(Snapshot(0.0, NODES, [job(JobState.QUEUED)], [stopping])) == [
        Stop("s"),
        Wait("j", "needs 1 CPU slot; no CPU slot is free; estimated after earlier (in 0 s)"),
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 10))
def test_whatever_happens_every_job_ends_and_everything_comes_back(seed: int, slots: int, count: int) -> None:
    """Obey the plan in a world where servers start, break and stop, and drivers end, at random."""
    draw = random.Random(seed)
    nodes = [Node("n", "n", 0, slots)]
    jobs = {
        f"j{i}": JobView(f"j{i}", JobState.QUEUED, (SLOT,), draw.choice([None, 40.0]), restarts_left=draw.choice([0, 2]))
        for i in range(count)
    }
    servers: dict[str, ServerView] = {}
    outcomes: dict[str, DriverOutcome] = {}
    started: list[str] = []
    for now in range(1000):
        live = [view for view in jobs.values() if not view.state.ended]
        if not live and not servers:
            break
        for decision in plan(Snapshot(float(now), nodes, live, list(servers.values()), outcomes)):
            match decision:
                case Start(job_id, where):
                    assert job_id not in servers
                    outcomes.pop(job_id, None)
                    jobs[job_id] = replace(jobs[job_id], state=move_job(jobs[job_id].state, JobState.STARTING))
                    servers[job_id] = ServerView(job_id, ServerState.STARTING, where, (job_id,))
                    started.append(job_id)
                case Run(job_id):
                    jobs[job_id] = replace(jobs[job_id], state=move_job(jobs[job_id].state, JobState.RUNNING))
                case Restart(job_id):
                    left = jobs[job_id].restarts_left - 1
                    jobs[job_id] = replace(
                        jobs[job_id], state=move_job(jobs[job_id].state, JobState.QUEUED), restarts_left=left
                    )
                    assert left >= 0
                case End(job_id, state):
                    jobs[job_id] = replace(jobs[job_id], state=move_job(jobs[job_id].state, state))
                case Stop(server_id):
                    servers[server_id] = replace(servers[server_id], state=ServerState.STOPPING)
        assert len(servers) <= slots
        for server in list(servers.values()):
            if server.state is ServerState.STOPPING and draw.random() < 0.5:
                del servers[server.id]
            elif server.state is ServerState.STARTING and draw.random() < 0.5:
                servers[server.id] = replace(server, state=ServerState.READY)
            elif draw.random() < 0.05:
                servers[server.id] = replace(server, fault="it died")
            elif jobs[server.id].state is JobState.RUNNING and draw.random() < 0.3:
                outcomes[server.id] = draw.choice(
                    [DriverOutcome(), DriverOutcome("it failed"), DriverOutcome("it died", lost=True)]
                )
    assert all(view.state.ended for view in jobs.values())
    assert not servers
    firsts = list(dict.fromkeys(started))
    assert firsts == sorted(firsts, key=list(jobs).index)
