"""A trainer on two ranks gives what one on a single rank gives, and says which rank it lost."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_tools import assert_same, make_data, make_datum, make_trainer, weights, without_effort

from opentinker.client.messages import AdamParams, Datum, LossConfig, PolicySpec
from opentinker.config.server import TrainerConfig
from opentinker.errors import (
    CheckpointError,
    ConflictError,
    InvalidRequestError,
    ServerLostError,
    TooLargeError,
    TrainerError,
)
from opentinker.server.trainer import rank_process
from opentinker.server.trainer.base import Trainer
from opentinker.server.trainer.budget import SHARE
from opentinker.server.trainer.checkpoint import write_checkpoint
from opentinker.server.trainer.lead_trainer import LeadTrainer
from opentinker.server.trainer.memory import pass_shape
from opentinker.server.trainer.packing import pack_data
from opentinker.server.trainer.rank_trainer import _GATHERED
from opentinker.server.trainer.trainer import TorchTrainer

PPO = LossConfig(name="ppo")
STEP = AdamParams(learning_rate=1e-3, weight_decay=0.01)
KINDS: list[dict[str, Any] | None] = [None, {"rank": 4}]
BATCHES = [make_data(2, 4, seed=0), make_data(3, 3, seed=1), make_data(1, 1, seed=2), make_data(5, 1, seed=3)]
"""The third has data for one rank only."""


def start(model_dir: Path, *, timeout_s: float = 60.0, **more: Any) -> LeadTrainer:
    config = TrainerConfig.model_validate({"dtype": "float32", "pack_tokens": 64, "ranks": 2, **more})
    return LeadTrainer(model_dir, config, device="cpu", timeout_s=timeout_s)


@pytest.fixture(scope="module")
def two(tiny_model_dir: Path) -> Iterator[LeadTrainer]:
    trainer = start(tiny_model_dir)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def one(tiny_model_dir: Path) -> TorchTrainer:
    return make_trainer(tiny_model_dir)


@pytest.fixture(autouse=True)
def no_policies_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"one", "two"} & set(request.fixturenames):
        trainer = request.getfixturevalue(name)
        for policy in list(trainer._policies):
            trainer.delete_policy(policy)


def create(trainers: Sequence[Trainer], lora: dict[str, Any] | None, policy: str = "p", **more: Any) -> None:
    for trainer in trainers:
        trainer.create_policy(policy, PolicySpec(lora=lora, seed=3, **more))


def train(trainer: Trainer, data: Sequence[Datum], loss: LossConfig = PPO, policy: str = "p") -> tuple[float, float]:
    """(loss, gradient norm)."""
    result = trainer.forward_backward(policy, data, loss, 0.1)
    return result.loss, trainer.optim_step(policy, STEP)["grad_norm"]


def state(trainer: TorchTrainer, policy: str = "p") -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in trainer._policies[policy].optimizer.state().items()}


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_losses_gradients_and_parameters_are_those_of_one_rank(
    one: TorchTrainer, two: LeadTrainer, lora: dict[str, Any] | None
) -> None:
    create((one, two), lora)
    for data in BATCHES:
        mine, theirs = (trainer.forward_backward("p", data, PPO, 0.1) for trainer in (two, one))
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        metrics = [without_effort(result.metrics) for result in (mine, theirs)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-5)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        norms = [trainer.optim_step("p", STEP)["grad_norm"] for trainer in (two, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        if (
            data is BATCHES[0]
        ):  # the moments are gradients: later ones are of weights that differ, by the noise that Adam scales up
            moments = [{key: tensor for key, tensor in state(t).items() if "master" not in key} for t in (two, one)]
            assert_same(*moments, relative=1e-5)
    assert_same(weights(two), weights(one), relative=1e-5)


def test_every_rank_gives_memory_back_and_goes_on(two: LeadTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    tell = two._tell
    monkeypatch.setattr(two, "_tell", lambda method, *more: (told.append(method), tell(method, *more)))
    create((two,), None)
    two.release_cache()
    train(two, BATCHES[0])
    assert told == ["create_policy", "release_cache"]


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_scores_come_in_the_order_of_the_data(one: TorchTrainer, two: LeadTrainer, lora: dict[str, Any] | None) -> None:
    create((one, two), lora)
    for trainer in (one, two):
        train(trainer, BATCHES[0])
    compute = ("logprobs", "reference_logprobs", "entropy")
    for data in (*BATCHES, []):
        mine, theirs = (trainer.forward("p", data, compute=compute, temperature=0.7) for trainer in (two, one))
        assert list(mine) == list(compute)
        for name in compute:
            assert len(mine[name]) == len(data)
            for a, b in zip(mine[name], theirs[name], strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_gradients_add_up_over_calls_and_an_empty_batch_adds_none(
    one: TorchTrainer, two: LeadTrainer, lora: dict[str, Any] | None
) -> None:
    create((one, two), lora)
    for trainer in (one, two):
        for data in (BATCHES[0], [], BATCHES[2], BATCHES[1]):
            trainer.forward_backward("p", data, LossConfig(name="cross_entropy"), 0.1)
        trainer.optim_step("p", STEP)
    assert_same(state(two), state(one), relative=1e-4)


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
@pytest.mark.parametrize("where", [0, -1], ids=["first", "last"])
def test_a_loss_that_is_not_finite_on_one_rank_moves_none(two: LeadTrainer, lora: dict[str, Any] | None, where: int) -> None:
    create((two,), lora)
    data = make_data(4, 2, seed=5)
    two.forward_backward("p", data, PPO, 0.1)
    broken = list(data)
    arrays = {**broken[where].arrays, "advantages": broken[where].arrays["advantages"] * np.float32(np.nan)}
    broken[where] = Datum(broken[where].chunks, broken[where].targets, arrays)
    with pytest.raises(TrainerError, match="the loss is nan; no gradient was added"):
        two.forward_backward("p", broken, PPO, 0.1)
    norm = two.optim_step("p", STEP)["grad_norm"]
    after = weights(two)
    two.delete_policy("p")
    create((two,), lora)
    assert train(two, data)[1] == norm
    assert_same(weights(two), after)


def test_a_gradient_that_is_not_finite_is_refused_by_all_ranks(one: TorchTrainer, two: LeadTrainer) -> None:
    create((one, two), None)
    before = state(two)
    for trainer in (one, two):
        for _ in range(2):
            trainer.forward_backward("p", BATCHES[0], LossConfig(name="cross_entropy"), 1e36)
        with pytest.raises(TrainerError, match=r"the gradient norm is (inf|nan)"):
            trainer.optim_step("p", STEP)
    assert_same(state(two), before)
    losses = [train(trainer, BATCHES[0])[0] for trainer in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_a_critic_learns_the_same_on_two_ranks(one: TorchTrainer, two: LeadTrainer, lora: dict[str, Any] | None) -> None:
    create((one, two), lora, critic={"rank": 2})
    for data in BATCHES[:3]:
        valued = [
            Datum(datum.chunks, datum.targets, {**datum.arrays, "returns": datum.arrays["advantages"] + datum.weights})
            for datum in data
        ]
        for trainer in (one, two):
            trainer.forward_backward("p", valued, LossConfig(name="value"), 0.1)
            trainer.optim_step("p", STEP, critic=True)
            train(trainer, data)
    mine, theirs = (trainer.forward("p", BATCHES[1], compute=("values", "logprobs")) for trainer in (two, one))
    for name in ("values", "logprobs"):
        assert any(np.abs(value).max() > 0 for value in mine[name])
        for a, b in zip(mine[name], theirs[name], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_a_reward_model_learns_the_same_on_two_ranks(one: TorchTrainer, two: LeadTrainer, lora: dict[str, Any] | None) -> None:
    create((one, two), lora, head="scalar")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 400, 6) for _ in range(3)]
    pairs = [
        make_datum(rng, prompt, length) for prompt, length in zip(np.repeat(prompts, 2, 0), [3, 5, 8, 2, 1, 4], strict=True)
    ]
    for _ in range(2):
        ends = [train(trainer, pairs, LossConfig(name="bradley_terry")) for trainer in (one, two)]
        assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    mine, theirs = (trainer.forward("p", pairs, compute=("values",))["values"] for trainer in (two, one))
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_several_adapters_train_beside_each_other(one: TorchTrainer, two: LeadTrainer) -> None:
    create((one, two), {"rank": 4}, "a")
    create((one, two), {"rank": 2}, "b")
    for data in BATCHES[:2]:
        for policy in ("a", "b"):
            ends = [train(trainer, data, policy=policy) for trainer in (one, two)]
            assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    for policy in ("a", "b"):
        assert_same(weights(two, policy), weights(one, policy), relative=1e-5)
        assert_same(two.adapter(policy).tensors, one.adapter(policy).tensors, relative=1e-4)


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_a_checkpoint_fits_any_number_of_ranks(
    one: TorchTrainer, two: LeadTrainer, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    create((one, two), lora, critic={"rank": 2})
    for number, (writer, reader) in enumerate(((two, one), (one, two))):
        train(writer, BATCHES[number])
        write_checkpoint(tmp_path / str(number), lambda folder, writer=writer: writer.save("p", folder))  # type: ignore[misc]
        reader.load("p", tmp_path / str(number))
        assert_same(weights(reader), weights(writer))
        assert_same(state(reader), state(writer))
        critics = [trainer._critic("p").optimizer.state() for trainer in (reader, writer)]
        assert_same(dict(critics[0]), dict(critics[1]))
    folder = tmp_path / "1"
    (folder / "model.safetensors" if lora is None else folder / "adapter_model.safetensors").unlink()
    before = weights(two)
    with pytest.raises(CheckpointError):
        two.load("p", folder)
    assert_same(weights(two), before)


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_a_resumed_run_is_one_that_was_never_interrupted_bit_for_bit(
    two: LeadTrainer, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    create((two,), lora)
    for data in BATCHES[:2]:
        train(two, data)
    write_checkpoint(tmp_path / "c", lambda folder: two.save("p", folder))
    ends = [train(two, data) for data in BATCHES[2:]]
    whole = state(two)
    two.delete_policy("p")
    create((two,), lora)
    two.forward_backward("p", BATCHES[0], PPO, 1.0)  # gradients that a load drops
    two.load("p", tmp_path / "c")
    assert [train(two, data) for data in BATCHES[2:]] == ends
    assert_same(state(two), whole)


def test_bfloat16_weights_have_float32_masters_and_a_rank_that_fails_alone_is_named(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    one, two = make_trainer(tiny_model_dir, dtype="bfloat16"), start(tiny_model_dir, dtype="bfloat16")
    try:
        create((one, two), None)
        for data in BATCHES[:2]:
            losses = [train(trainer, data)[0] for trainer in (one, two)]
            assert losses[0] == pytest.approx(losses[1], rel=2e-2)
        two.save("p", tmp_path / "c")
        one.load("p", tmp_path / "c")
        assert_same(weights(one), weights(two))
        masters = state(two)
        assert all(tensor.dtype == torch.float32 for tensor in masters.values())
        for name, tensor in weights(two).items():
            if f"master/{name}" in masters:
                assert torch.equal(masters[f"master/{name}"].bfloat16(), tensor)
        # A command that fails on one rank alone, while the other waits for it in the middle of a pass.
        mine, theirs = two._share_out("p", BATCHES[0], scalar=False, trains=True, together=1)
        with pytest.raises(TrainerError, match=r"rank 1 of 2 .* failed in train_share: this server has no policy nobody"):
            two._all("train_share", [("p", mine, PPO, 1.0), ("nobody", theirs, PPO, 1.0)])
    finally:
        two.close()


def test_adapters_learn_the_same_on_a_base_that_is_sharded_until_a_rank_is_killed(
    one: TorchTrainer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    two = start(tiny_model_dir, shard_base=True, activation_checkpointing=True)
    try:
        create((one, two), {"rank": 4}, critic={"rank": 2})
        for data in BATCHES[:3]:
            ends = [train(trainer, data) for trainer in (one, two)]
            assert ends[0] == pytest.approx(ends[1], rel=1e-5)
        assert_same(weights(two), weights(one), relative=1e-5)
        for name in ("logprobs", "reference_logprobs", "values"):
            mine, theirs = (trainer.forward("p", BATCHES[3], compute=(name,))[name] for trainer in (two, one))  # type: ignore[arg-type, index]
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
        one.save("p", tmp_path / "c")
        two.load("p", tmp_path / "c")
        assert_same(weights(two), weights(one))
        two.delete_policy("p")
        create((two,), None)
        train(two, BATCHES[0])
        (pid,) = two.pids
        os.kill(pid, signal.SIGKILL)
        assert_lost(two, pid, "was killed by SIGKILL")
    finally:
        two.close()


def test_what_is_refused_changes_nothing_and_loses_nobody(two: LeadTrainer) -> None:
    create((two,), {"rank": 4})
    with pytest.raises(ConflictError, match="needs the server to itself"):
        two.create_policy("q", PolicySpec())
    with pytest.raises(InvalidRequestError, match="has no 'advantages'"):
        two.forward_backward("p", [Datum(d.chunks, d.targets, {"weights": d.weights}) for d in BATCHES[0]], PPO, 1.0)
    with pytest.raises(InvalidRequestError, match="no critic"):
        two.optim_step("p", STEP, critic=True)
    train(two, BATCHES[0])


def test_weights_need_not_be_taken_to_the_last(two: LeadTrainer) -> None:
    create((two,), None)
    for _ in range(2):
        next(iter(two.full_weights("p")))
    train(two, BATCHES[0])


def assert_lost(trainer: LeadTrainer, pid: int, how: str) -> None:
    """The next command names the rank and says how it was lost, later ones too, and nothing is left of it."""
    with pytest.raises(TrainerError, match=rf"rank 1 of 2 of the trainer \(pid {pid}\) {how}") as caught:
        train(trainer, BATCHES[0])
    assert isinstance(caught.value, ServerLostError)
    for refused in (
        lambda: train(trainer, BATCHES[0]),
        lambda: trainer.forward("p", BATCHES[0]),
        lambda: trainer.create_policy("q", PolicySpec(lora={"rank": 2})),
        lambda: list(trainer.full_weights("p")),
    ):
        with pytest.raises(TrainerError, match="rank 1 of 2"):
            refused()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_rank_that_hangs_is_named_and_every_later_command_refused(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process, "REPORT_S", 1.0)
    trainer = start(tiny_model_dir, timeout_s=5.0)
    try:
        create((trainer,), {"rank": 4})
        train(trainer, BATCHES[0])
        (pid,) = trainer.pids
        os.kill(pid, signal.SIGSTOP)
        assert_lost(trainer, pid, "did not answer in time")
    finally:
        trainer.close()


def test_eight_bit_moments_are_those_of_one_rank_and_their_checkpoint_fits_any_number(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    one, two = make_trainer(tiny_model_dir, optimizer="adamw_8bit"), start(tiny_model_dir, optimizer="adamw_8bit")
    try:
        for lora in KINDS:
            create((one, two), lora)
            folder = tmp_path / ("full" if lora is None else "lora")
            ends = [train(trainer, BATCHES[0]) for trainer in (one, two)]
            assert ends[0] == pytest.approx(ends[1], rel=1e-5)
            kept = [state(trainer) for trainer in (one, two)]
            bytes_of = [key for key, tensor in kept[0].items() if tensor.dtype == torch.uint8]
            assert bytes_of or lora is not None
            for key in bytes_of:  # the noise of a sum of floats tips a byte in thousands to the next
                pad = -two._policies["p"].optimizer.parameters[key.split("/", 1)[1]].numel() % 256
                a, b = (each[key].reshape(-1)[: each[key].numel() - pad].int() for each in kept)
                assert (a - b).abs().max() <= 1
                assert (a != b).float().mean() < 0.01
            assert_same(*({key: t for key, t in each.items() if t.dtype != torch.uint8} for each in kept), relative=1e-4)
            write_checkpoint(folder, lambda folder: two.save("p", folder))
            one.load("p", folder)
            assert_same(state(one), state(two))
            write_checkpoint(folder.with_suffix(".back"), lambda folder: one.save("p", folder))
            train(two, BATCHES[1])
            two.load("p", folder.with_suffix(".back"))
            assert_same(state(two), state(one))
            ends = [train(trainer, BATCHES[1]) for trainer in (one, two)]
            assert ends[0] == pytest.approx(ends[1], rel=1e-5)
            for trainer in (one, two):
                trainer.delete_policy("p")
    finally:
        two.close()


def test_float16_has_one_loss_scale_on_all_ranks_and_a_step_that_one_cannot_take_is_skipped_by_all(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    one, two = make_trainer(tiny_model_dir, dtype="float16"), start(tiny_model_dir, dtype="float16")
    try:
        for lora in KINDS:
            create((one, two), lora)
            reports: list[list[dict[str, float]]] = [[], []]
            for factor, data in ((1e6, BATCHES[0]), (1e6, BATCHES[1]), (1e-4, BATCHES[0]), (1e-4, BATCHES[1])):
                for trainer, known in zip((one, two), reports, strict=True):
                    trainer.forward_backward("p", data, PPO, factor)
                    known.append(trainer.optim_step("p", STEP))
            assert [report["grad_norm"] > 0 for report in reports[1]] == [False, False, True, True]
            assert reports[1][-1]["steps_skipped"] == 2
            for mine, theirs in zip(*reports, strict=True):
                assert mine.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=2e-2)
                assert mine == theirs
            folder = tmp_path / ("full" if lora is None else "lora")
            write_checkpoint(folder, lambda folder: two.save("p", folder))
            one.load("p", folder)
            assert_same(weights(one), weights(two))
            two.forward_backward("p", BATCHES[1], PPO, 1e6)
            assert two.optim_step("p", STEP)["steps_skipped"] == 3
            two.load("p", folder)
            ends = [train(trainer, BATCHES[1]) for trainer in (one, two)]
            assert ends[0] == pytest.approx(ends[1], rel=2e-2)
            for trainer in (one, two):
                trainer.delete_policy("p")
    finally:
        two.close()


def test_full_parameters_without_room_for_each_ranks_part_of_their_state_are_refused(
    two: LeadTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(p.numel() for p in two._model.trainable().values())
    needed = 12 * parameters  # a gradient and two moments take 12 bytes each
    needed += 4 * sum(p.numel() for p in two._ranks.wholes(two._model))  # the second of two ranks has their gradients, too
    with monkeypatch.context() as patched:
        patched.setattr(two._budget, "_free", lambda device: needed - 8)
        with pytest.raises(TooLargeError, match="to train all parameters takes"):
            two.create_policy("p", PolicySpec())
        patched.setattr(two._budget, "_free", lambda device: needed)
        create((two,), None)
    train(two, BATCHES[0])


@pytest.mark.parametrize("lora", KINDS, ids=["full", "lora"])
def test_packs_fit_into_the_memory_of_the_rank_that_has_least(
    one: TorchTrainer, two: LeadTrainer, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None
) -> None:
    create((one, two), lora)
    data = make_data(4, 8)
    train(two, data[:2])  # its buffers are there
    free = two._budget._free
    monkeypatch.setattr(two._budget, "_free", lambda device: 0)
    with pytest.raises(TooLargeError, match=r"with 0\.00 GiB to spare about 0 tokens of one sequence fit; nothing was"):
        two.check("p", data, PPO)
    cost = two._budget._costs["p", False, True]
    monkeypatch.setattr(two._budget, "_free", free)
    two.delete_policy("p")
    create((two,), lora)
    _, reserve = two._pass_kind("p", scalar=False, trains=True)
    gathered = _GATHERED * two._ranks.layer_bytes(two._model) if lora is None else 0
    most = [max(cost.bytes(pass_shape(pack)) for pack in pack_data(data, tokens)) for tokens in (16, 64)]
    room = sum(most) / 2 / SHARE + reserve + gathered
    monkeypatch.setattr(two._budget, "_free", lambda device: room * two._ranks.count)
    packs, tokens = two._plan("p", data, scalar=False, trains=True, together=1)
    assert tokens < 64
    assert len(packs) > len(pack_data(data, 64))
    for each in (data, BATCHES[2], []):
        mine, theirs = (trainer.forward_backward("p", each, PPO, 0.1) for trainer in (two, one))
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    mine, theirs = (trainer.optim_step("p", STEP)["grad_norm"] for trainer in (two, one))
    assert mine == pytest.approx(theirs, rel=1e-5)
    long = make_datum(np.random.default_rng(0), np.array([5]), 200)
    for call in (lambda: two.forward_backward("p", [*data, long], PPO, 0.1), lambda: two.check("p", [*data, long], PPO)):
        with pytest.raises(TooLargeError, match=r"datum 32 has 200 tokens.*about \d+ tokens of one sequence fit"):
            call()
    monkeypatch.setattr(two._budget, "_free", free)
    two.forward_backward("p", [*data, long], PPO, 0.1)
