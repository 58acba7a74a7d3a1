"""Rows of preference datasets become pairs that differ in the last answer only; what is no comparison is named."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opentinker.client.submission import prepare
from opentinker.config.job import PreferenceJobConfig, parse_job
from opentinker.config.preference import PreferenceDataConfig
from opentinker.config.tasks import TasksConfig
from opentinker.errors import ConfigError
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.supervised import SupervisedRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.training.preferences import Preferences, RenderedPairs, comparison_of

USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "yes"), ("assistant", "no")))
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def tokenizer(policy: Any) -> ChatTokenizer:
    return ChatTokenizer.from_files(policy.files)


def preferences(
    tokenizer: ChatTokenizer, rows: list[Any], *, longest: int = 120, scored: bool = False, **config: Any
) -> Preferences:
    source = TasksConfig(name="given rows", shuffle=False)
    renderer = SupervisedRenderer(ConversationRenderer(tokenizer, [0]))
    data = PreferenceDataConfig(train=source, **config)
    return Preferences(source, data, renderer, longest, rows=rows, scored=scored)


def rendered(tokenizer: ChatTokenizer, rows: list[Any], **config: Any) -> RenderedPairs:
    return preferences(tokenizer, rows, **config).render(rows)


@pytest.mark.parametrize(
    ("row", "earlier"),
    [
        ({"prompt": "q", "chosen": "yes", "rejected": "no"}, []),
        ({"prompt": [*EARLIER, USER], "chosen": "yes", "rejected": [BAD]}, EARLIER),
        ({"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, EARLIER),
        ({"prompt": "q", "prompt_id": "7", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0}, []),
        ({"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: q\n\nAssistant: no"}, []),
        (
            {
                "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: q\n\nAssistant: yes",
                "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: q\n\nAssistant: no\n",
            },
            EARLIER,
        ),
    ],
    ids=["texts", "prompt_of_messages", "conversations", "ultrafeedback", "hh", "hh_turns"],
)
def test_every_shape_of_rows_is_a_comparison(row: dict[str, Any], earlier: list[Any]) -> None:
    found = comparison_of(row)
    assert found.prompt == [*earlier, USER]
    assert (found.chosen, found.rejected) == (GOOD, BAD)


def test_only_the_last_answer_is_learnt_and_both_share_what_is_before(tokenizer: ChatTokenizer) -> None:
    row = {"prompt": [*EARLIER, USER], "chosen": "yes", "rejected": "no"}
    pairs = rendered(tokenizer, [row])
    chosen, rejected = pairs.data
    assert tokenizer.decode(chosen.targets[chosen.weights > 0].tolist()) == "yes<|end|>"
    assert tokenizer.decode(rejected.targets[rejected.weights > 0].tolist()) == "no<|end|>"
    first = int(np.flatnonzero(chosen.weights)[0])
    assert first == int(np.flatnonzero(rejected.weights)[0])
    np.testing.assert_array_equal(chosen.tokens[: first + 1], rejected.tokens[: first + 1])
    assert (pairs.pairs, pairs.learnt) == (1, 4 + 3)


def test_for_a_reward_model_the_score_is_read_behind_the_token_that_ends_the_answer(tokenizer: ChatTokenizer) -> None:
    row = {"prompt": "q", "chosen": "yes", "rejected": "no", "margin": 0.5}
    for datum, said in zip(rendered(tokenizer, [row], scored=True).data, ("yes", "no"), strict=True):
        assert tokenizer.decode(datum.tokens.tolist()).endswith(f"assistant\n{said}<|end|>")
        assert int(np.flatnonzero(datum.weights)[-1]) == len(datum) - 1
        assert datum.arrays["margins"][-1] == 0.5
        assert datum.weights.sum() == len(said) + 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "q", "chosen": "yes", "rejected": "yes"}, "chosen and rejected are the same"),
        ({"chosen": [USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, "their prompts differ"),
        ({"prompt": "p", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "chosen begins otherwise than the prompt"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "rejected does not end with an assistant's turn"),
        ({"chosen": "yes", "rejected": "no"}, "a text without a prompt beside it"),
        ({"chosen": "\n\nHuman: q", "rejected": "\n\nHuman: q\n\nAssistant: no"}, "chosen does not end with an assistant"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt before the answers"),
        ({"prompt": "q", "chosen": "yes", "rejected": None}, "rejected is empty or neither"),
        ({"prompt": "q", "chosen": "yes", "rejected": "no", "margin": "big"}, "margin is 'big'"),
    ],
)
def test_a_row_that_is_no_comparison_is_shown_or_left_out(tokenizer: ChatTokenizer, row: Any, says: str) -> None:
    good = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    with pytest.raises(ConfigError, match=f"row 2 of given rows cannot be trained on: .*{says}.*; it is "):
        preferences(tokenizer, [good, {**row}])
    left = rendered(tokenizer, [good, row, good], unusable="drop")
    assert (left.pairs, left.unusable, left.dropped) == (2, 1, 0)


def test_answers_that_the_template_makes_equal_are_no_comparison(tokenizer: ChatTokenizer, policy: Any) -> None:
    template = json.loads(policy.files["tokenizer_config.json"])
    template["chat_template"] = template["chat_template"].replace("m['content'] }}<", "m['content'] | trim }}<")
    stripping = ChatTokenizer.from_files({**policy.files, "tokenizer_config.json": json.dumps(template).encode()})
    row = {"prompt": "q", "chosen": "yes", "rejected": "yes "}
    assert rendered(tokenizer, [row]).pairs == 1
    with pytest.raises(ConfigError, match="the same once the chat template has rendered them"):
        rendered(stripping, [row])


def test_pairs_that_are_too_long_are_left_out_and_counted_or_an_error(tokenizer: ChatTokenizer) -> None:
    row = {"prompt": "q", "chosen": "yes", "rejected": "n" * 200}
    assert rendered(tokenizer, [row]).dropped == 1
    with pytest.raises(ConfigError, match=r"has \d+ tokens, engine.max_model_len is 120"):
        rendered(tokenizer, [row], overlong="error")


def test_rows_of_another_shape_are_refused_with_what_they_have(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match="have answer, question: not 'chosen' and 'rejected'"):
        preferences(tokenizer, [{"question": "q", "answer": "a"}])


def test_a_submitted_job_takes_its_files_along_and_is_checked_before(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "yes", "rejected": "no"}))
    (tmp_path / "job.yaml").write_text("kind: preference\nbase_model: m\ndata: {train: {name: pairs.jsonl}}\n")
    sent = prepare(tmp_path / "job.yaml", ["loss.kind=ipo"])
    assert isinstance(sent.config, PreferenceJobConfig)
    assert (sent.config.data.train.name, sent.config.default_name()) == ("train/pairs.jsonl", "pairs")
    assert sent.config.policy_head == "lm"
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "yes", "rejected": "yes"}))
    with pytest.raises(ConfigError, match=r"row 1 of .*pairs.jsonl cannot be trained on: chosen and rejected are the same"):
        prepare(tmp_path / "job.yaml")
    assert prepare(tmp_path / "job.yaml", ["data.unusable=drop"]).files


def test_the_kind_is_known_and_its_mistakes_are_explained() -> None:
    base = {"kind": "preference", "base_model": "m", "data": {"train": {"name": "x.jsonl"}}}
    job = parse_job(base)
    assert job.driven
    assert parse_job({**base, "loss": {"kind": "bradley_terry"}}).policy_head == "scalar"
    with pytest.raises(ConfigError, match="label_smoothing"):
        parse_job({**base, "loss": {"kind": "ipo", "label_smoothing": 0.1}})
    with pytest.raises(ConfigError, match="beta"):
        parse_job({**base, "loss": {"kind": "dpo", "beta": 0}})


def test_the_examples_pairs_are_what_their_script_writes_and_none_is_held_out_and_trained(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    runpy.run_path(str(root / "examples" / "preferences.py"))["main"](tmp_path)
    prompts = []
    for name in ("preferences.jsonl", "preferences-held-out.jsonl"):
        assert (tmp_path / name).read_text() == (root / "configs" / name).read_text()
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        prompts.append({tuple(sorted(row["chosen"].split(" = ")[0].split(" + "))) for row in rows})
    assert not prompts[0] & prompts[1]
    assert prepare(root / "configs" / "preference.yaml").config.kind == "preference"
