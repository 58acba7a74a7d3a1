"""Requirements and secrets of an environment: what can be named, and what this machine lacks."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.job import RLJobConfig, parse_job
from opentinker.config.requirements import (
    MAX_REQUIREMENT,
    MAX_REQUIREMENTS,
    check_requirements,
    check_secrets,
    missing_requirements,
    missing_variables,
    parse_requirements,
)
from opentinker.errors import ConfigError


def config(**environment: object) -> RLJobConfig:
    parsed = parse_job({"kind": "rl", "base_model": "m", "environment": {"name": "arithmetic", **environment}})
    assert isinstance(parsed, RLJobConfig)
    return parsed


def test_pep_508_is_a_requirement() -> None:
    lines = [
        "sympy",
        "sympy >=1.13,<2",
        "a[b,c]; python_version > '3'",
        "x @ file:///w/x-1-py3-none-any.whl",
        "g @ git+https://h/r",
    ]
    assert config(requirements=lines).environment.requirements == tuple(lines)
    assert config().environment.requirements is None
    assert config(requirements=[]).environment.requirements == ()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "-r other.txt",
        "--index-url https://evil",
        " -e .",
        "./folder",
        "/abs/x.whl",
        "sympy\n--index-url=x",
        "a b",
        "https://host/x.whl",
        "sympy; rm -rf",
        "x" * (MAX_REQUIREMENT + 1),
        "sympy --hash=sha256:0",
        "x @ file:///a\u2028b.whl",
    ],
)
def test_what_is_no_requirement_is_refused_with_the_field_named(line: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.requirements"):
        config(requirements=[line])


SECRET = "s3cr3t-t0ken"


@pytest.mark.parametrize(
    "line",
    [
        f"x @ https://user:{SECRET}@h/x.whl",
        f"x @ https://{SECRET}@h/x.whl",
        f"x @ git+https://{SECRET}@h/r@main",
        f"x @ git+ssh://git:{SECRET}@h/r",
        f"https://user:{SECRET}@h/x.whl",
        f"--index-url https://user:{SECRET}@h/simple",
        f"x @ https://{SECRET}@h/{'x' * MAX_REQUIREMENT}",
        f"x @ https://{SECRET}@h/\u2028b.whl",
        f"x @ https://{SECRET}@[h/x.whl",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(line: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.requirements") as caught:
        config(requirements=[line])
    assert SECRET not in caught.value.detail + caught.value.hint
    with pytest.raises(ConfigError) as caught:
        parse_requirements(line)
    assert SECRET not in caught.value.detail + caught.value.hint


def test_the_refusal_of_credentials_says_where_they_belong_and_an_at_sign_elsewhere_is_none() -> None:
    with pytest.raises(ConfigError, match=r"cluster's pip.conf or .netrc"):
        config(requirements=["x @ https://ann:pw@h/x.whl"])
    fine = ("x @ git+https://h/r@v1.0", "x @ git+ssh://git@h/r@v1.0", "x @ https://h/a@b.whl")
    assert check_requirements(fine) == fine


def test_too_many_are_refused() -> None:
    assert len(check_requirements(["x"] * MAX_REQUIREMENTS)) == MAX_REQUIREMENTS
    with pytest.raises(ConfigError, match="requirements"):
        config(requirements=["x"] * (MAX_REQUIREMENTS + 1))


@given(st.lists(st.text(max_size=30), max_size=5))
def test_no_accepted_requirement_can_be_taken_for_an_option_or_two(lines: list[str]) -> None:
    try:
        accepted = check_requirements(lines)
    except ValueError:
        return
    for line in accepted:
        assert re.match(r"[A-Za-z0-9]", line)
        assert len(line.splitlines()) == 1


def test_a_requirements_file_may_have_comments_and_continued_lines() -> None:
    text = "# tools\nsympy>=1.13   # algebra\n\nnumpy \\\n  >=2\nx @ https://h/x.whl#sha256=0\n"
    assert parse_requirements(text) == ("sympy>=1.13", "numpy    >=2", "x @ https://h/x.whl#sha256=0")
    for bad in ("-r more.txt", "--extra-index-url https://evil", "-e ."):
        with pytest.raises(ConfigError, match=r"requirements\.txt: .* is an option of pip") as caught:
            parse_requirements(f"sympy\n{bad}\n")
        assert "environment.requirements" in caught.value.hint


def test_what_is_missing_here_is_named() -> None:
    there = ["pydantic", "Pydantic>=2", "nobody-has-this; python_version < '3'"]
    assert missing_requirements(there) == []
    found = missing_requirements(["nobody-has-this>1", "pydantic<1"])
    assert found[0] == "nobody-has-this>1"
    assert found[1].startswith("pydantic<1 (here: 2")


def test_secrets_are_named_and_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config(secrets={"OPENAI_API_KEY": "openai"}).environment.secrets == {"OPENAI_API_KEY": "openai"}
    value = "sk-proj/abc+def=="
    with pytest.raises(ConfigError, match="write the name here") as caught:
        config(secrets={"OPENAI_API_KEY": value})
    assert value not in str(caught.value)
    for variable in ("A B", "1A", "A=B", "", "PATH", "LD_PRELOAD", "RAY_ADDRESS", "OPENTINKER_JOB", "PYTHONPATH"):
        with pytest.raises(ConfigError, match=r"environment\.secrets"):
            config(secrets={variable: "openai"})
    assert config(secrets={"OPENTINKER_ENV_TOKEN": "env-token"}).environment.secrets == {"OPENTINKER_ENV_TOKEN": "env-token"}
    with pytest.raises(ValueError, match="at most 10"):
        check_secrets({f"V{number}": "s" for number in range(11)})
    monkeypatch.setenv("IS_SET", "x")
    monkeypatch.delenv("IS_NOT", raising=False)
    assert missing_variables({"IS_SET": "a", "IS_NOT": "b"}) == ["IS_NOT"]
