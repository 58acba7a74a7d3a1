import pytest

from opentinker.errors import AuthenticationError
from opentinker.scheduler.auth import find_key, key_digest, new_api_key, new_server_secret, policy_token
from opentinker.scheduler.records import ApiKey, Scope

SECRET = new_server_secret()


class Keys(dict[str, ApiKey]):
    """Stored keys by their digest."""

    def add(self, owner: str, key: str, revoked_at: float | None = None) -> None:
        digest = key_digest(SECRET, key)
        self[digest] = ApiKey(owner, owner, "laptop", frozenset({Scope.SUBMIT}), digest, revoked_at=revoked_at)


def test_a_key_is_known_by_its_digest_alone() -> None:
    key, other, stored = new_api_key(), new_api_key(), Keys()
    stored.add("ann", key)
    stored.add("bob", other)
    assert find_key(SECRET, key, stored.get).owner == "ann"
    assert find_key(SECRET, other, stored.get).owner == "bob"
    assert key not in repr(stored)


def test_a_digest_is_not_shown_with_its_key() -> None:
    key = ApiKey("k", "ann", "laptop", frozenset({Scope.SUBMIT}), "00ff")
    assert "00ff" not in repr(key)


def test_every_wrong_or_revoked_key_gets_the_same_answer() -> None:
    key, revoked, stored = new_api_key(), new_api_key(), Keys()
    stored.add("ann", key)
    stored.add("bob", revoked, revoked_at=1.0)
    messages = set()
    for wrong in ("", "ot-", key[:-1], key + "x", "ключ", "\udcff", new_api_key(), revoked):
        with pytest.raises(AuthenticationError) as caught:
            find_key(SECRET, wrong, stored.get)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_digest_is_useless_as_a_key_and_under_another_secret() -> None:
    key, stored = new_api_key(), Keys()
    stored.add("ann", key)
    with pytest.raises(AuthenticationError):
        find_key(SECRET, next(iter(stored)), stored.get)
    with pytest.raises(AuthenticationError):
        find_key(new_server_secret(), key, stored.get)


def test_a_look_up_that_finds_the_wrong_key_is_not_believed() -> None:
    stored = Keys()
    stored.add("ann", new_api_key())
    with pytest.raises(AuthenticationError):
        find_key(SECRET, new_api_key(), lambda digest: next(iter(stored.values())))


def test_keys_and_tokens_hold_256_bits_and_differ() -> None:
    assert len({new_api_key() for _ in range(100)}) == 100
    assert len(new_api_key()) == len("ot-") + 43
    assert len(policy_token(SECRET, "pol-1")) == len("otp-") + 43
    assert policy_token(SECRET, "pol-1") == policy_token(SECRET, "pol-1")
    assert len({policy_token(SECRET, "pol-1"), policy_token(SECRET, "pol-2"), policy_token(new_server_secret(), "pol-1")}) == 3
