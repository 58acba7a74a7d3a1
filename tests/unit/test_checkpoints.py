"""What checkpoints are called, and which of a folder's are found."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.checkpoints import CheckpointRef, checkpoints, find, folders, parse_name, parse_ref, versioned
from opentinker.errors import ConfigError, InvalidRequestError

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fullmatch=True)
refs = st.builds(
    CheckpointRef,
    st.none() | st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True),
    st.from_regex(r"job-[0-9a-f]{10}", fullmatch=True),
    names,
    st.none() | st.integers(0, 10**12 - 1),
)


def saved(root: Path, folder: str, created_at: float | None = None, version: int | None = None) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    state = {"kind": "full", "model_type": "llama", "step": 3, "created_at": created_at, "version": version}
    (path / "trainer_state.json").write_text(json.dumps({k: v for k, v in state.items() if v is not None}))
    (path / "manifest.json").write_text(json.dumps({"files": {"a": {"bytes": 5}, "b": {"bytes": 6}}}))
    return path


@given(refs)
def test_an_address_is_read_as_it_is_written(ref: CheckpointRef) -> None:
    assert parse_ref(str(ref)) == ref
    assert parse_name(versioned(ref.name, ref.version)) == (ref.name, ref.version)


@given(refs)
def test_whoever_says_less_may_mean_whoever_says_more(ref: CheckpointRef) -> None:
    full = CheckpointRef(ref.user or "ann", ref.job, ref.name, ref.version if ref.version is not None else 7)
    assert ref.may_mean(full)
    assert not CheckpointRef("bob2", ref.job, ref.name, None).may_mean(full)


@pytest.mark.parametrize(
    "text",
    [
        "final",
        "job-1/",
        "job-1/../x",
        "a/b/job-1/x",
        "job-1/x@",
        "job-1/x@y",
        "Ann/job-1/x",
        "../job-1/x",
        "job-1/x\n",
        "/job-1/x",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="not a checkpoint's address") as error:
        parse_ref(text)
    assert "user/job/name@version" in error.value.hint


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 101, 7, None, "x@", "x@-1", "x@1@2", "x\n"])
def test_a_name_is_one_safe_path_component(name: object) -> None:
    with pytest.raises(InvalidRequestError, match="not a checkpoint name"):
        parse_name(name)


def test_a_name_means_the_one_saved_last_and_older_runs_are_found_too(tmp_path: Path) -> None:
    saved(tmp_path, "final", 5.0)  # of a release that kept no versions
    saved(tmp_path, "best@9", 10.0, version=9)
    newest = saved(tmp_path, "best@2", 20.0, version=2)  # saved after the job began anew
    assert [(c.name, c.version) for c in checkpoints(tmp_path)] == [("best", 2), ("best", 9), ("final", None)]
    assert find(checkpoints(tmp_path), "best").path == newest  # type: ignore[union-attr]
    assert find(checkpoints(tmp_path), "best", 9).created_at == 10.0  # type: ignore[union-attr]
    assert find(checkpoints(tmp_path), "final").bytes == 11  # type: ignore[union-attr]
    assert find(checkpoints(tmp_path), "final", 1) is None
    assert find(checkpoints(tmp_path / "absent"), "final") is None


def test_what_is_not_whole_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "half@1").mkdir()
    saved(tmp_path, ".x@1.0a0a0a0a.tmp", 1.0)
    saved(tmp_path, ".x@1.previous", 1.0)
    (saved(tmp_path, "torn@1", 1.0) / "manifest.json").write_text("{")
    assert checkpoints(tmp_path) == []
    assert set(folders(tmp_path)) == {("torn", 1)}
