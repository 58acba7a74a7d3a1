import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import yaml

from opentinker.errors import ConfigError
from opentinker.training.recorder import Recorder
from opentinker.training.report import render_report
from opentinker.training.rl import RLLoop
from opentinker.training.svg import Series, line_chart, ticks

VOID = {"meta", "link", "br", "hr", "img", "input", "circle", "line"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed in the wrong place; collects attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
async def finished(policy, seven, make_config, recorder):
    config = make_config(evaluation={"every": 4, "samples_per_task": 8})
    loop = await RLLoop.connect(config, seven, policy, recorder)
    await loop.run(8)
    recorder.finish(wall_s=12.0, checkpoint="/checkpoints/final")
    return recorder


async def test_the_report_holds_curve_held_out_points_numbers_config_and_transcripts(finished) -> None:
    page = (finished.folder / "report.html").read_text()
    curve = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", page, re.S)[0])
    lines = {e.get("class"): e.get("points").split() for e in curve.iter("polyline")}
    assert len(lines["a"]) == 8
    held_out = [g for g in curve.iter("g") if g.get("class") == "c"]
    assert len(held_out) == 3
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert f"{summary['exact_before']:.2f} → {summary['exact_after']:.2f}" in page
    assert "learning_rate: 2.0" in page
    assert page.count('class="talk"') == 12
    assert "Which digit do I think of?" in page


async def test_the_report_is_self_contained_and_well_formed(finished) -> None:
    page = (finished.folder / "report.html").read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not {"src", "href", "onclick"} & {name for name, _ in parser.attributes}
    assert "<script" not in page
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page


async def test_what_a_policy_says_cannot_become_markup(finished) -> None:
    row = {"phase": "train", "step": 1, "task": "<b>", "reward": 0.0, "termination": "done", "error": "<i>", "metrics": {}}
    row["messages"] = [{"role": 'x" onload="y', "content": "<script>alert(1)</script>"}]
    config = yaml.safe_load((finished.folder / "config.yaml").read_text())
    summary = json.loads((finished.folder / "summary.json").read_text())
    page = render_report(config, finished.rows, [row], summary)
    assert "<script" not in page
    assert 'onload="y' not in page
    assert "<i>" not in page


def test_a_run_that_was_stopped_at_once_still_has_a_report(recorder) -> None:
    summary = recorder.finish(wall_s=0.0, checkpoint=None)
    assert summary["steps"] == 0
    assert summary["reward_before"] is None
    assert "no data" in (recorder.folder / "report.html").read_text()


def test_a_folder_holds_one_run(recorder, tmp_path) -> None:
    recorder.row({"kind": "other"})
    with pytest.raises(ConfigError, match="holds another run"):
        Recorder(recorder.folder, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the run's folder"):
        Recorder(tmp_path / "file" / "run", {})


def test_rows_are_valid_json_whatever_the_numbers(recorder) -> None:
    recorder.row({"kind": "other", "value": float("nan"), "many": [float("inf"), 1.0]})
    row = json.loads((recorder.folder / "metrics.jsonl").read_text())
    assert (row["value"], row["many"]) == (None, [None, 1.0])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (3, 3), (-2.5, 7), (0, 1e-7), (0.98, 1.02), (0, 123456)])
def test_ticks_are_few_round_numbers_that_enclose_the_data(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8


def test_a_chart_of_one_step_or_of_equal_values_can_be_drawn() -> None:
    for points in ([(1, 0.5)], [(1, 0.0), (2, 0.0)], [(1, -3.0), (2, -3.0)]):
        ElementTree.fromstring(line_chart([Series("reward", "a", points)]))


def test_a_run_without_a_checkpoint_starts_anew_in_its_folder(recorder) -> None:
    recorder.row({"kind": "evaluation", "step": 0, "exact": None})
    again = Recorder(recorder.folder, {}, resume_at=-1)
    assert again.rows == []
    kinds = [json.loads(line)["kind"] for line in (recorder.folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["evaluation", "resumed"]


def test_the_last_checkpoint_is_the_latest_that_is_whole(tmp_path) -> None:
    from opentinker.training.run import last_checkpoint

    assert last_checkpoint(tmp_path) is None
    for name in ("step-000002", "step-000010", "final", ".step-000012.ab.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    (tmp_path / "checkpoints" / "step-000011").mkdir()
    assert last_checkpoint(tmp_path) == 10


async def test_images_of_a_transcript_are_kept_as_files_and_shown_in_the_page(policy, seven, make_config, recorder) -> None:
    from io import BytesIO

    from PIL import Image as Pillow

    from opentinker.images import Image
    from opentinker.rollout.types import Episode, Termination
    from opentinker.training.transcripts import images_of, transcript_row

    encoded = BytesIO()
    Pillow.new("RGB", (8, 8), "red").save(encoded, format="PNG")
    image = Image(encoded.getvalue())
    content = [{"type": "text", "text": "what <is> it?"}, {"type": "image", "image": image}]
    episode = Episode("task", 0, Termination.DONE, messages=[{"role": "user", "content": content}], rewards=[1.0])
    await (await RLLoop.connect(make_config(), seven, policy, recorder)).run(1)
    recorder.transcript(transcript_row(episode, step=1, phase="evaluation"), images_of(episode))
    recorder.finish(wall_s=1.0, checkpoint=None)
    [path] = (recorder.folder / "images").iterdir()
    assert path.read_bytes() == image.data
    row = json.loads((recorder.folder / "transcripts.jsonl").read_text().splitlines()[-1])
    assert row["messages"][0]["content"][1] == {"type": "image", "file": f"images/{path.name}"}
    page = render_report(
        recorder._config, recorder.rows, [row], {**json.loads((recorder.folder / "summary.json").read_text())}, recorder.folder
    )
    assert image.data_url() in page
    assert "what &lt;is&gt; it?" in page


async def test_a_task_with_pictures_is_short_in_transcripts_and_headings(policy, seven, make_config, recorder) -> None:
    from opentinker.images import Image
    from opentinker.rollout.types import Episode, Termination
    from opentinker.training.transcripts import images_of, transcript_row

    image = Image(b"\x89PNG\r\n\x1a\n" + bytes(300_000))
    content = [{"type": "image", "image": image}]
    task = {
        "images": [image.data_url()],
        "hint": {"also": image},
        "sound": "data:audio/wav;base64," + "A" * 5000,
        "text": "data: plain",
        "long": "x" * 300,
    }
    episode = Episode(task, 0, Termination.DONE, messages=[{"role": "user", "content": content}], rewards=[1.0])
    row = transcript_row(episode, step=1, phase="evaluation")
    name = row["messages"][0]["content"][0]["file"]
    assert row["task"] == {
        "images": [name],
        "hint": {"also": name},
        "sound": "[audio/wav;base64, 5022 characters]",
        "text": "data: plain",
        "long": "x" * 300,
    }
    assert images_of(episode) == [image], "once, wherever it is"
    assert episode.task is task, "what the environment is given stays as it is"
    unseen = Episode({"image": image.data_url()}, 0, Termination.DONE, messages=[], rewards=[1.0])
    assert images_of(unseen) == [image], "a name in a transcript is that of a file"
    await (await RLLoop.connect(make_config(), seven, policy, recorder)).run(1)
    summary = recorder.finish(wall_s=1.0, checkpoint=None)
    page = render_report(recorder._config, recorder.rows, [row], summary, recorder.folder)
    [heading] = [line for line in page.split("<h3>") if line.startswith("before: step 1")]
    assert len(heading.partition("</h3>")[0]) < 400
