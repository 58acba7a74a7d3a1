"""Who may have how much: the settings' word and the users' records."""

from pathlib import Path

from opentinker.scheduler.quotas import policy_of
from opentinker.scheduler.records import Scope, User
from opentinker.scheduler.settings import Quota, Settings


def test_users_records_and_settings_make_one_policy() -> None:
    settings = Settings(
        state_dir=Path("s"), runs_dir=Path("r"), quota=Quota(gpus=8), quotas={"bob": Quota(gpus=2)}, shares={"cat": 5.0}
    )
    users = [
        User("ann", frozenset(Scope), share=3.0, max_jobs=4),
        User("bob", frozenset(Scope), max_jobs=1),
        User("cat", frozenset(Scope), share=2.0),
    ]
    policy = policy_of(settings, users)
    assert policy.shares == {"ann": 3.0, "cat": 2.0}
    assert policy.quota_of("ann") == Quota(gpus=8, jobs=4)
    assert policy.quota_of("bob") == Quota(gpus=2, jobs=1)
    assert policy.quota_of("cat") == policy.quota_of("dan") == Quota(gpus=8)
