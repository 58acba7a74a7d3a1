"""What is deleted and what is kept, tags and holds; here and in a storage."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker import retention
from opentinker.checkpoint_marks import Marks, check_tag, resolve, tags_of
from opentinker.checkpoints import Checkpoint, checkpoints, versioned
from opentinker.errors import ConflictError, InvalidRequestError
from opentinker.retention import family, remove, surplus
from opentinker.storage import Storage, all_checkpoints


def saved(root: Path, name: str, version: int, at: float | None = None) -> Path:
    folder = root / f"{name}@{version}"
    folder.mkdir(parents=True)
    state = {"kind": "full", "model_type": "llama", "step": version, "created_at": at or 100.0 + version}
    (folder / "weights").write_text("weights")
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": {"weights": {"bytes": 7}}}))
    return folder


def names(root: Path, storage: Storage | None = None) -> list[str]:
    return sorted(versioned(c.name, c.version) for c in all_checkpoints(root, storage))


@pytest.fixture(params=["on a disk", "in a storage"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage | None:
    return None if request.param == "on a disk" else Storage(f"file://{tmp_path}/remote", tmp_path / "runs")


@pytest.fixture
def root(tmp_path: Path, storage: Storage | None) -> Path:
    root = tmp_path / "runs" / "ann" / "job-1" / "checkpoints"
    for name, version in (("step-000010", 10), ("step-000020", 20), ("step-000030", 30), ("final", 30), ("best", 20)):
        folder = saved(root, name, version)
        if storage is not None:
            storage.put_folder(folder, last="manifest.json")
    return root


@given(
    steps=st.lists(st.integers(1, 50), unique=True, max_size=12),
    keep=st.integers(1, 5),
    marked=st.sets(st.integers(1, 50)),
    others=st.sets(st.sampled_from(["final", "best", "stopped", "step", "mine-7"])),
)
def test_only_unmarked_checkpoints_of_the_family_behind_the_newest_go(
    steps: list[int], keep: int, marked: set[int], others: set[str]
) -> None:
    def one(name: str, at: int) -> Checkpoint:
        return Checkpoint(name, at, Path(), "full", "llama", at, float(at), 1)

    found = sorted(
        [*(one(f"step-{n:06d}", n) for n in steps), *(one(name, 60) for name in others)], key=lambda c: -c.created_at
    )
    gone = surplus(found, "step-000051", keep, {f"step-{n:06d}@{n}" for n in marked})
    kept = [c for c in found if c not in gone]
    assert {family(c.name) for c in gone} <= {"step"}
    assert not {c.version for c in gone} & marked
    unmarked = [c for c in kept if c.name.startswith("step-") and c.version not in marked]
    assert len(unmarked) == min(keep - ("step" in others), len(set(steps) - marked)) or "step" in others
    assert all(k.created_at > g.created_at for k in unmarked for g in gone)


def test_a_removed_checkpoint_is_gone_everywhere_and_nothing_else_is(root: Path, storage: Storage | None) -> None:
    shutil.copytree(root / "step-000010@10", root / ".step-000010@10.previous")  # of an interrupted replacement
    (root / ".final@30.0123abcd.deleted").mkdir()  # of an interrupted removal
    assert remove(root, "step-000010@10", storage)
    assert names(root, storage) == ["best@20", "final@30", "step-000020@20", "step-000030@30"]
    assert [path.name for path in root.glob(".*")] == []
    if storage is not None:
        assert "step-000010@10" not in storage.checkpoint_folders(root)
        shutil.rmtree(root)
        assert names(root, storage) == ["best@20", "final@30", "step-000020@20", "step-000030@30"]


def test_one_that_a_job_holds_by_now_stays_whole(root: Path, storage: Storage | None) -> None:
    before = names(root, storage)
    Marks(root, storage).hold("job-2", "step-000010@10")
    assert not remove(root, "step-000010@10", storage)
    assert names(root, storage) == before
    assert (root / "step-000010@10" / "weights").read_text() == "weights"
    if storage is not None:
        shutil.rmtree(root)
        assert names(root, storage) == before
    Marks(root, storage).release("job-2")
    assert remove(root, "step-000010@10", storage)


def test_a_removal_that_is_interrupted_leaves_no_half(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(path: Path, **_: object) -> None:
        (path / "weights").unlink()
        raise KeyboardInterrupt

    saved(root, "step-000005", 5)
    (root / ".step-000005@5.0123abcd.deleted").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", dies)
        (root / ".x.0123abcd.deleted").mkdir()
        (root / ".x.0123abcd.deleted" / "weights").touch()
        with pytest.raises((KeyboardInterrupt, FileNotFoundError)):
            remove(root, "step-000005@5", None)
    assert "step-000005@5" not in [versioned(c.name, c.version) for c in checkpoints(root)]
    remove(root, "step-000010@10", None)
    assert list(root.glob(".*.deleted")) == []


def test_tags_are_names_and_outlive_the_node(root: Path, storage: Storage | None) -> None:
    marks = Marks(root, storage)
    assert marks.tags() == {}
    marks.tag("good", "step-000010@10")
    marks.tag("paper", "step-000010@10")
    marks.tag("good", "step-000020@20")
    if storage is not None:
        shutil.rmtree(root)
    found, tags = all_checkpoints(root, storage), Marks(root, storage).tags()
    assert tags == {"good": "step-000020@20", "paper": "step-000010@10"}
    chosen = resolve(found, tags, "good", None)
    assert chosen is not None
    assert (chosen.name, tags_of(tags, chosen)) == ("step-000020", ["good"])
    assert resolve(found, tags, "good", 20) is None
    assert resolve(found, {**tags, "final": "best@20"}, "final", None) == resolve(found, {}, "final", None), "names go first"
    assert resolve(found, {"lost": "absent@1"}, "lost", None) is None
    assert Marks(root, storage).untag("good")
    assert not Marks(root, storage).untag("good")


def test_a_damaged_mark_is_none(root: Path) -> None:
    (root / ".tags").mkdir()
    (root / ".tags" / "torn").write_text('{"check')
    (root / ".tags" / "evil").write_text('{"checkpoint": "../../x"}')
    (root / ".tags" / ".good.0123abcd.tmp").write_text('{"checkpoint": "final@30"}')
    assert Marks(root, None).tags() == {}


@pytest.mark.parametrize("tag", ["final", "best", "stopped", "step-000010", "a/b", "../x", "", "x@3", ".x"])
def test_what_cannot_be_a_tag_is_refused(root: Path, tag: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_tag(tag, checkpoints(root))


def test_a_tag_is_not_the_name_of_a_checkpoint(root: Path) -> None:
    saved(root, "mine", 1)
    with pytest.raises(ConflictError, match="a checkpoint of this job is called 'mine'"):
        check_tag("mine", checkpoints(root))
    assert check_tag("mine-2", checkpoints(root)) == "mine-2"
