"""A worker whose trainer has lost a rank: the command says so, and the server counts as lost."""

from pathlib import Path
from typing import cast

import pytest

from opentinker.client.messages import PolicySpec
from opentinker.errors import ServerLostError, from_problem
from opentinker.server.engine.base import RolloutEngine
from opentinker.server.protocol import CommandWork
from opentinker.server.state import Parts
from opentinker.server.trainer.base import Trainer
from opentinker.server.trainer.rank_process import RanksLostError
from opentinker.server.worker import Worker


class LosingTrainer:
    """Loses a rank over its first policy."""

    def __init__(self) -> None:
        self.closed = False

    def create_policy(self, policy: str, spec: PolicySpec) -> None:
        raise RanksLostError("rank 1 of 2 was killed", hint="the last checkpoint holds")

    def close(self) -> None:
        self.closed = True


class IdleEngine:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_lost_rank_ends_its_command_with_the_cause_and_then_the_worker() -> None:
    engine, trainer = IdleEngine(), LosingTrainer()
    worker = Worker(lambda: Parts(cast(RolloutEngine, engine), cast(Trainer, trainer), Path("m"), Path("unused")))
    worker.start(30)
    worker.submit([CommandWork("create", "p", "create")])
    (completion,) = worker.collect(30)
    assert completion.problem is not None
    error = from_problem(completion.problem)
    assert isinstance(error, ServerLostError)
    assert "rank 1 of 2 was killed" in error.detail
    with pytest.raises(ServerLostError, match="rank 1 of 2 was killed"):
        worker.collect(30)
    with pytest.raises(ServerLostError, match="rank 1 of 2 was killed"):
        worker.submit([CommandWork("again", "p", "create")])
    worker.stop(30)
    assert engine.closed
    assert trainer.closed
