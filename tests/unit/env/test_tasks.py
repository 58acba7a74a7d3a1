"""A stream of tasks depends on its seed and place alone, goes through everything before it repeats, and can be resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.env.datasets import load_tasks
from opentinker.env.tasks import GeneratedTasks, ListTasks, TaskCursor
from opentinker.errors import ConfigError


@given(size=st.integers(1, 30), seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 25), max_size=6))
def test_a_stream_is_the_same_however_it_is_cut(size: int, seed: int, cuts: list[int]) -> None:
    source = ListTasks(list(range(size)))
    cursor = TaskCursor(source, seed)
    pieces = [task for cut in cuts for task in cursor.take(cut)]
    assert pieces == ListTasks(list(range(size))).draw(seed, 0, sum(cuts))
    resumed = TaskCursor(source, 0)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert resumed.take(10) == cursor.take(10)


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_every_epoch_has_every_task_once_in_an_order_of_its_own(size: int, seed: int) -> None:
    drawn = ListTasks(list(range(size))).draw(seed, 0, 3 * size)
    epochs = [drawn[i * size : (i + 1) * size] for i in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size >= 12:
        assert epochs[0] != epochs[1] != epochs[2]


def test_rows_that_are_not_shuffled_come_in_their_own_order_again_and_again() -> None:
    assert ListTasks("abc", shuffle=False).draw(5, 2, 4) == ["c", "a", "b", "c"]
    assert ListTasks(iter("abc")).first(2) == ["a", "b"]


def test_generated_tasks_never_share_a_seed() -> None:
    source = GeneratedTasks(lambda seed: seed)
    drawn = source.draw(0, 0, 2000) + source.draw(1, 0, 2000)
    assert len(set(drawn)) == 4000
    assert source.draw(0, 1500, 5) == drawn[1500:1505]


def test_a_source_that_fails_leaves_the_cursor_where_it_was() -> None:
    cursor = TaskCursor(ListTasks([]), 0)
    with pytest.raises(ValueError, match="no tasks"):
        cursor.take(1)
    assert cursor.position == 0


ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]


def write(path: Path, kind: str) -> Path:
    path = path / f"tasks.{kind}"
    match kind:
        case "jsonl":
            path.write_text("\n\n".join(map(json.dumps, ROWS)))
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv":
            path.write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS))
        case "parquet":
            import datasets

            datasets.Dataset.from_list(ROWS).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_files_of_every_kind_give_the_same_tasks(tmp_path: Path, kind: str) -> None:
    source = load_tasks(str(write(tmp_path, kind)), required=("question",))
    assert source.first(9) == ROWS
    assert source.size == 5
    assert sorted(t["answer"] for t in source.draw(3, 0, 5)) == list("01234")
    taken = load_tasks(f"tasks.{kind}", base_dir=tmp_path, columns={"problem": "question"}, limit=2)
    assert taken.first(9) == [{"problem": "q0", "answer": "0"}, {"problem": "q1", "answer": "1"}]


def test_a_dataset_on_disk_is_found_by_its_folder_and_split(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "set")
    assert load_tasks(str(tmp_path / "set"), split="test").first(9) == [ROWS[1]]
    with pytest.raises(ConfigError, match=r"no split 'dev' \(it has train, test\)"):
        load_tasks(str(tmp_path / "set"), split="dev")


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = str(write(tmp_path, "jsonl"))
    with pytest.raises(ConfigError, match=r"no column 'problem': they have question, answer"):
        load_tasks(path, required=("problem",))
    with pytest.raises(ConfigError, match=r"no column 'anwser' for 'solution': they have question, answer .*'answer'"):
        load_tasks(path, columns={"solution": "anwser"})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", "", "are empty"),
        ("a.jsonl", '{"a": 1}\n{"a"', r"a.jsonl:2: not JSON"),
        ("a.jsonl", "[1]", "must be an object, not list"),
        ("a.json", "{}", "must hold a list of objects"),
        ("a.json", "[", "cannot be read"),
        ("a.parquet", "not parquet", "cannot be read"),
        ("a.csv", "question,answer\n", "are empty"),
    ],
)
def test_a_broken_or_empty_file_says_what_is_wrong(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_tasks(str(tmp_path / name))


def test_a_missing_file_or_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no.jsonl does not exist"):
        load_tasks(str(tmp_path / "no.jsonl"))
    with pytest.raises(ConfigError, match=r"the dataset .*nothing \(split 'train'\) cannot be loaded"):
        load_tasks(str(tmp_path / "nothing"))


def test_rows_stay_lazy_under_other_names(tmp_path: Path) -> None:
    source = load_tasks(str(write(tmp_path, "jsonl")), columns={"problem": "question"})
    rows: Any = source._tasks
    assert rows[4] == {"problem": "q4", "answer": "4"}
