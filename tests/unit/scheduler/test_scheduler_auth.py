import pytest

from opentinker.errors import AuthenticationError
from opentinker.scheduler.auth import key_digest, new_api_key, new_server_secret, owner_of, policy_token
from opentinker.scheduler.records import ApiKey

SECRET = new_server_secret()


def test_a_key_is_known_by_its_digest_alone() -> None:
    key, other = new_api_key(), new_api_key()
    stored = [ApiKey("a", "ann", key_digest(SECRET, key)), ApiKey("b", "bob", key_digest(SECRET, other))]
    assert owner_of(SECRET, key, stored) == "ann"
    assert owner_of(SECRET, other, stored) == "bob"
    assert key not in repr(stored)


def test_every_wrong_key_gets_the_same_answer() -> None:
    key = new_api_key()
    stored = [ApiKey("a", "ann", key_digest(SECRET, key))]
    messages = set()
    for wrong in ("", "ot-", key[:-1], key + "x", "ключ", "\udcff", new_api_key()):
        with pytest.raises(AuthenticationError) as caught:
            owner_of(SECRET, wrong, stored)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_digest_is_useless_as_a_key_and_under_another_secret() -> None:
    key = new_api_key()
    stored = [ApiKey("a", "ann", key_digest(SECRET, key))]
    with pytest.raises(AuthenticationError):
        owner_of(SECRET, stored[0].digest, stored)
    with pytest.raises(AuthenticationError):
        owner_of(new_server_secret(), key, stored)


def test_keys_and_tokens_hold_256_bits_and_differ() -> None:
    assert len({new_api_key() for _ in range(100)}) == 100
    assert len(new_api_key()) == len("ot-") + 43
    assert len(policy_token(SECRET, "pol-1")) == len("otp-") + 43
    assert policy_token(SECRET, "pol-1") == policy_token(SECRET, "pol-1")
    assert len({policy_token(SECRET, "pol-1"), policy_token(SECRET, "pol-2"), policy_token(new_server_secret(), "pol-1")}) == 3
