"""Failed logins: whoever guesses is slowed down, whoever knows is not."""

from hypothesis import given
from hypothesis import strategies as st

from opentinker.scheduler import limits
from opentinker.scheduler.limits import (
    GLOBAL_BURST,
    PER_ADDRESS_BURST,
    LoginLimiter,
    TokenBucket,
    network_of,
)

STEPS = st.lists(st.tuples(st.floats(-5.0, 20.0), st.booleans()), max_size=100)


@given(burst=st.integers(1, 20), per_s=st.floats(0.05, 5.0), steps=STEPS)
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate(burst: int, per_s: float, steps: list[tuple[float, bool]]) -> None:
    bucket = TokenBucket(burst, per_s, burst, 0.0)
    now, forward, taken = 0.0, 0.0, 0
    for step, _ in steps:
        now += step
        forward += max(0.0, step)  # a clock that goes back gives nothing
        if bucket.wait_s(now) == 0.0:
            bucket.take(now)
            taken += 1
    assert taken <= burst + forward * per_s + 1e-6


@given(st.floats(0.05, 5.0), st.floats(0.0, 1e6))
def test_after_the_time_that_it_names_there_is_a_token(per_s: float, now: float) -> None:
    bucket = TokenBucket(1.0, per_s, 0.0, now)
    assert bucket.wait_s(now + bucket.wait_s(now) * (1 + 1e-9) + 1e-6) == 0.0


def test_an_address_that_fails_often_is_shut_out_and_let_in_again() -> None:
    limiter = LoginLimiter(0.0)
    for _ in range(int(PER_ADDRESS_BURST)):
        assert limiter.wait_s("10.0.0.1", "guess", 0.0) == 0.0
        limiter.failed("10.0.0.1", "guess", 0.0)
    wait_s = limiter.wait_s("10.0.0.1", "guess", 0.0)
    assert wait_s > 0.0
    assert limiter.wait_s("10.0.0.2", "guess", 0.0) == 0.0
    assert limiter.wait_s("10.0.0.1", "guess", wait_s) == 0.0


def test_when_failures_come_from_everywhere_one_is_enough_and_others_still_get_in() -> None:
    limiter = LoginLimiter(0.0)
    few = [limiter.failed(f"10.0.{number // 250}.{number % 250}", "guess", 0.0) for number in range(int(GLOBAL_BURST) + 50)]
    assert few == [True] * int(GLOBAL_BURST) + [False] * 50
    assert limiter.wait_s("10.0.0.0", "guess", 0.0) == 0.0  # it failed once, while that was rare
    last = int(GLOBAL_BURST) + 49
    assert limiter.wait_s(f"10.0.{last // 250}.{last % 250}", "guess", 0.0) > 0.0
    assert limiter.wait_s("192.0.2.1", "guess", 0.0) == 0.0  # somebody who did nothing


def test_a_key_that_got_in_before_is_not_at_a_guessers_mercy() -> None:
    limiter = LoginLimiter(0.0)
    limiter.succeeded("10.0.0.1", "anns")
    for _ in range(20):
        limiter.failed("10.0.0.1", "guess", 0.0)
    assert limiter.wait_s("10.0.0.1", "anns", 0.0) == 0.0
    assert limiter.wait_s("10.0.0.1", "bobs", 0.0) > 0.0
    limiter.failed("10.0.0.1", "anns", 0.0)  # revoked meanwhile
    assert limiter.wait_s("10.0.0.1", "anns", 0.0) > 0.0


def test_the_addresses_of_one_ipv6_client_count_as_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("testclient") == "testclient"


def test_a_flood_from_many_addresses_takes_bounded_memory() -> None:
    limiter = LoginLimiter(0.0)
    for number in range(limits.MAX_ADDRESSES + 500):
        limiter.failed(f"host-{number}", "guess", float(number))
    assert len(limiter._addresses) == limits.MAX_ADDRESSES
