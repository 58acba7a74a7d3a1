import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import ConflictError
from opentinker.scheduler.states import JOB_MOVES, SERVER_MOVES, JobState, ServerState, move_job, move_server


@given(st.lists(st.sampled_from(JobState), max_size=12))
def test_no_sequence_of_moves_leaves_an_end_state_or_skips_a_step(wishes: list[JobState]) -> None:
    state, path = JobState.QUEUED, [JobState.QUEUED]
    for wish in wishes:
        try:
            state = move_job(state, wish)
        except ConflictError:
            assert wish not in JOB_MOVES[state]
            continue
        assert not path[-1].ended
        path.append(state)
    order = [JobState.QUEUED, JobState.STARTING, JobState.RUNNING]
    living = [s for s in path if not s.ended]
    for earlier, later in itertools.pairwise(living):
        assert later is JobState.QUEUED or order.index(later) == order.index(earlier) + 1
    assert JobState.COMPLETED not in path or living[-3:] == order


@given(st.sampled_from(JobState))
def test_every_living_job_can_fail_and_be_cancelled(state: JobState) -> None:
    if not state.ended:
        assert move_job(state, JobState.FAILED).ended
        assert move_job(state, JobState.CANCELLED).ended


@given(st.sampled_from(ServerState))
def test_a_server_is_never_stopped_without_stopping(state: ServerState) -> None:
    assert (ServerState.STOPPED in SERVER_MOVES[state]) == (state is ServerState.STOPPING)


def test_an_illegal_move_names_both_states() -> None:
    with pytest.raises(ConflictError, match="COMPLETED cannot become RUNNING"):
        move_job(JobState.COMPLETED, JobState.RUNNING)
    with pytest.raises(ConflictError, match="STOPPED cannot become READY"):
        move_server(ServerState.STOPPED, ServerState.READY)
