"""A row of a training step says what its passes took."""

from opentinker.training.metrics import pass_metrics


def minibatch(sequences: float, computed: float, passes: float, longest: float) -> dict[str, dict[str, float]]:
    effort = {"sequence_tokens": sequences, "computed_tokens": computed, "passes": passes, "pass_tokens_max": longest}
    return {"metrics": {"tokens": 3.0, **effort}}


def test_minibatches_add_up_and_the_longest_pass_counts() -> None:
    trained = {"minibatches": [minibatch(100, 40, 1, 40), {"critic": {}}, minibatch(90, 60, 2, 35)]}
    assert pass_metrics(trained) == {"tokens_in_passes": 190, "tokens_computed": 100, "passes": 3, "pass_tokens_max": 40}


def test_the_memory_that_the_server_needed_is_passed_on_where_it_says_so() -> None:
    assert pass_metrics({"minibatches": [minibatch(1, 1, 1, 1)], "memory_bytes": 5 << 30})["memory_bytes"] == 5 << 30


def test_where_nothing_was_trained_or_nothing_is_said_there_is_none() -> None:
    for trained in (
        None,
        {"minibatches": []},
        {"minibatches": [{"metrics": {"tokens": 3.0}}]},
        {"minibatches": [{"critic": {}}]},
    ):
        assert pass_metrics(trained) == {}
