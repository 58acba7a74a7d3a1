"""What cannot be trained on: each mistake is named with its remedy, and moves no bit of weights, moments or gradients."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server_tools import FAST, LORA, Server, datum, serving
from trainer_tools import assert_same, everything

from opentinker.client.messages import LossConfig, Minibatch
from opentinker.errors import InvalidRequestError, TrainerError
from opentinker.server.trainer.trainer import TorchTrainer

NAN, INFINITE = float("nan"), float("inf")
T = len(datum())
GOOD = datum().to_wire()


def floats(value: float, length: int = T) -> np.ndarray:
    return np.full(length, value, np.float32)


def second(**changes: Any) -> dict[str, Any]:
    """A batch whose second datum is wrong."""
    return {"data": [GOOD, {**GOOD, **changes}]}


def without(name: str) -> dict[str, Any]:
    return {"data": [GOOD, {key: value for key, value in GOOD.items() if key != name}]}


def too_long(tokens: int = 600) -> dict[str, Any]:
    ids, ones = np.full(tokens, 5, np.int32), floats(1.0, tokens)
    body = {"chunks": ids, "targets": ids, "weights": ones, "advantages": ones, "behaviour_logprobs": -ones}
    return {"data": [GOOD, body]}


PROXIMAL = {"loss": {"name": "ppo", "anchor": "proximal"}}
REFERENCE = {"loss": {"name": "ppo", "kl_coefficient": 0.1}}
BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "NaN advantages": (
        second(advantages=floats(NAN)),
        "datum 1: advantages holds NaN or infinity; nothing .*look for what",
    ),
    "infinite advantages": (second(advantages=floats(INFINITE)), "datum 1: advantages holds NaN or infinity"),
    "NaN logprobs": (second(behaviour_logprobs=floats(NAN)), "datum 1: behaviour_logprobs holds NaN .*leave the datum out"),
    "NaN proximal logprobs": (second(proximal_logprobs=floats(NAN)) | PROXIMAL, "datum 1: proximal_logprobs holds NaN"),
    "NaN reference logprobs": (second(reference_logprobs=floats(NAN)) | REFERENCE, "datum 1: reference_logprobs holds NaN"),
    "NaN weights": (second(weights=floats(NAN)), "datum 1: weights holds NaN"),
    "positive logprobs": (
        second(behaviour_logprobs=floats(0.5)),
        "datum 1 has positive behaviour_logprobs.*send what",
    ),
    "advantages too short": (second(advantages=floats(1, T - 1)), r"datum 1: advantages has shape \(6,\).*one number for each"),
    "targets too short": (second(targets=np.ones(T - 1, np.int32)), "datum 1: a datum has 7 tokens but 6 targets.*follows"),
    "a target outside the vocabulary": (
        second(targets=np.full(T, 512, np.int32)),
        "datum 1: targets are outside the vocabulary of 512 tokens.*GET /v1/tokenizer",
    ),
    "a token outside the vocabulary": (
        second(chunks=np.full(T, 512, np.int32)),
        "datum 1: tokens are outside the vocabulary of 512 tokens.*GET /v1/tokenizer",
    ),
    "a negative token": (second(chunks=np.full(T, -1, np.int32)), "datum 1: .*outside int32"),
    "tokens that are numbers": (second(targets=floats(1.5)), "datum 1: targets must be a flat list of token ids"),
    "more tokens than the model takes": (too_long(), "datum 1 has 600 tokens, the model takes 512.*shorten"),
    "no advantages": (without("advantages"), "datum 1 has no 'advantages', which the loss 'ppo' needs.*it needs weights, adv"),
    "no weights": (without("weights"), "datum 1: a datum needs 'weights': 1 where the target is in the loss"),
    "no data": ({"data": []}, "data must be a list that is not empty"),
}
STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "an index out of range": ({"minibatches": [{"indices": [0]}, {"indices": [2]}]}, "minibatch 1 has index 2, .* are 2 data"),
    "a negative index": ({"minibatches": [{"indices": [-1]}]}, "minibatch 0 has index -1"),
    "an empty minibatch": ({"minibatches": [{"indices": [0]}, {"indices": []}]}, "indices of minibatch 1 must be a list"),
    "no minibatch": ({"minibatches": []}, "minibatches must be a list that is not empty"),
    "an infinite factor": ({"minibatches": [{"indices": [1], "factor": INFINITE}]}, "factor of minibatch 0 must be a finite"),
    "a NaN factor": ({"minibatches": [{"indices": [1], "factor": NAN}]}, "factor of minibatch 0 must be a finite"),
    "an unknown loss": ({"loss": {"name": "pppo"}}, "name: Input should be .*'ppo'"),
    "a NaN temperature": ({"loss": {"name": "ppo", "temperature": NAN}}, "temperature: Input should be a finite"),
    "an infinite price of distance": ({"loss": {"name": "ppo", "kl_coefficient": INFINITE}}, "kl_coefficient: .*finite"),
    "an unknown argument": ({"optimiser": {}}, "unknown argument 'optimiser'.*did you mean 'optimizer'"),
    "a negative learning rate": ({"optimizer": {"learning_rate": -1.0}}, "learning_rate: .*greater than or equal to 0"),
    "a learning rate of NaN": ({"optimizer": {"learning_rate": NAN}}, "learning_rate: Input should be a finite number"),
    "an infinite learning rate": ({"optimizer": {"learning_rate": INFINITE}}, "learning_rate: Input should be a finite number"),
    "a learning rate in words": ({"optimizer": {"learning_rate": "fast"}}, "learning_rate: Input should be a valid number"),
    "an infinite weight decay": ({"optimizer": {"weight_decay": INFINITE}}, "weight_decay: Input should be a finite number"),
}


@pytest.fixture(scope="module")
async def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with serving(tiny_model_dir, tmp_path_factory.mktemp("bad"), lora=LORA) as server:
        yield server


def everything_of(server: Server) -> dict[str, torch.Tensor]:
    trainer = server.parts.trainer
    assert isinstance(trainer, TorchTrainer)
    return everything(trainer)


async def refused(server: Server, call: Callable[[], Any], says: str, kind: type[Exception] = InvalidRequestError) -> None:
    before, version = everything_of(server), (await server.client.state())["version"]
    with pytest.raises(kind, match=says):
        await call()
    assert_same(everything_of(server), before)
    assert (await server.client.state())["version"] == version


@pytest.mark.parametrize("name", [*BATCHES, *STEPS])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_train_step_that_is_wrong_says_why_and_moves_nothing(server: Server, name: str) -> None:
    wrong, says = (BATCHES | STEPS)[name]
    good = {
        "data": [GOOD, GOOD],
        "minibatches": [{"indices": [0]}, {"indices": [1]}],
        "loss": {"name": "ppo"},
        "optimizer": {"learning_rate": 0.1},
    }
    await refused(server, lambda: server.client.command("train_step", good | wrong), says)


@pytest.mark.parametrize("name", list(BATCHES))
@pytest.mark.asyncio(loop_scope="module")
async def test_data_that_are_wrong_leave_earlier_gradients_as_they_were(server: Server, name: str) -> None:
    wrong, says = BATCHES[name]
    await server.client.forward_backward([datum()], LossConfig(name="ppo"))
    await refused(
        server, lambda: server.client.command("forward_backward", {"loss": {"name": "ppo"}, "factor": 1.0} | wrong), says
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_numbers_that_are_finite_and_yet_too_large_move_nothing(server: Server) -> None:
    loss, optimizer = LossConfig(name="importance_sampling"), {"learning_rate": 0.1}
    for field, value, says in [("advantages", 3e38, "the loss is"), ("behaviour_logprobs", -1e30, "the loss is")]:
        body = {**GOOD, field: floats(value)}
        args = {"data": [body], "minibatches": [{"indices": [0]}], "loss": loss.model_dump(), "optimizer": optimizer}
        await refused(server, lambda args=args: server.client.command("train_step", args), says, TrainerError)


@pytest.mark.asyncio(loop_scope="module")
async def test_after_all_of_them_the_next_good_step_trains(server: Server) -> None:
    before, version = everything_of(server), (await server.client.state())["version"]
    result = await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
    assert result["version"] == version + 1
    after = everything_of(server)
    assert any(not torch.equal(after[name], before[name]) for name in before)
