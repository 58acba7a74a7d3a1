"""What commands show of a job holds no token, however many servers it has."""

from opentinker.cli.common import without_token


def test_no_server_of_a_job_shows_its_token() -> None:
    server = {"endpoint": "http://127.0.0.1:1", "policy": "p", "token": "otp-secret"}
    job = {"id": "j", "server": server, "servers": {"second": {**server, "token": "otp-other"}}}
    shown = without_token(job)
    assert "otp-" not in str(shown)
    assert shown["servers"] == {"second": {"endpoint": "http://127.0.0.1:1", "policy": "p"}}
    assert job["servers"]["second"]["token"] == "otp-other", "of a copy"
    assert without_token({"id": "j", "server": None}) == {"id": "j", "server": None}
