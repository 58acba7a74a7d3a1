"""LoRA policies against plain peft, and against each other."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from trainer_tools import assert_same, gradients, make_data, make_trainer, plain_logprobs, plain_loss, plain_model, weights

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.errors import ConfigError, ConflictError
from opentinker.server.trainer import lora
from opentinker.server.trainer.packing import pack_data
from opentinker.server.trainer.trainer import TorchTrainer

PPO = LossConfig(name="ppo")
ADAM = AdamParams(learning_rate=1e-2)


def lora_trainer(model_dir: Path, *, policies: tuple[str, ...] = ("p",), steps: int = 0, **fields: Any) -> TorchTrainer:
    """Each policy with its own seed and, after `steps`, its own training."""
    trainer = make_trainer(model_dir)
    for seed, policy in enumerate(policies):
        trainer.create_policy(policy, PolicySpec(lora={"rank": 4, "alpha": 8.0, **fields}, seed=seed))
    for step in range(steps):
        for seed, policy in enumerate(policies):
            trainer.forward_backward(policy, make_data(seed=10 * seed + step), PPO, 0.1)
            trainer.optim_step(policy, ADAM)
    return trainer


def in_peft(trainer: TorchTrainer, model_dir: Path, folder: Path, policy: str = "p") -> Any:
    """The policy's saved adapter, loaded by plain peft."""
    trainer.save(policy, folder)
    return peft.PeftModel.from_pretrained(plain_model(model_dir), folder, is_trainable=True).eval()


def expected_logprobs(model: torch.nn.Module) -> list[np.ndarray]:
    return [plain_logprobs(model, d).detach().numpy() * d.weights for d in make_data()]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["down_proj"]])
def test_a_saved_adapter_gives_the_same_logprobs_and_gradients_in_peft(
    tiny_model_dir: Path, tmp_path: Path, targets: Any
) -> None:
    trainer, data = lora_trainer(tiny_model_dir, steps=2, target_modules=targets), make_data()
    model = in_peft(trainer, tiny_model_dir, tmp_path)
    for logprobs, expected in zip(trainer.forward("p", data)["logprobs"], expected_logprobs(model), strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    trainer.forward_backward("p", data, PPO, 1.0)
    plain_loss(model, data, PPO).backward()  # type: ignore[no-untyped-call]
    reference = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same(gradients(trainer), reference, relative=1e-4)


def test_a_new_adapter_is_initialized_as_in_peft_and_changes_nothing_yet(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = lora_trainer(tiny_model_dir)
    for logprobs, expected in zip(
        trainer.forward("p", make_data())["logprobs"], expected_logprobs(plain_model(tiny_model_dir)), strict=True
    ):
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model_state_dict(peft.get_peft_model(plain_model(tiny_model_dir), config))
    ours = trainer.adapter("p").tensors
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    for name, tensor in ours.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < float(tensor.abs().max()) <= bound
            assert 0.9 * bound < float(theirs[name].abs().max()) <= bound


def test_the_seed_decides_the_initialization(tiny_model_dir: Path) -> None:
    first, second, other = make_trainer(tiny_model_dir), make_trainer(tiny_model_dir), make_trainer(tiny_model_dir)
    for trainer, seed in ((first, 1), (second, 1), (other, 2)):
        trainer.create_policy("p", PolicySpec(lora={"rank": 4}, seed=seed))
    assert_same(first.adapter("p").tensors, second.adapter("p").tensors)
    name = next(n for n in first.adapter("p").tensors if "lora_A" in n)
    assert not torch.equal(first.adapter("p").tensors[name], other.adapter("p").tensors[name])


def test_merged_weights_are_the_policy(tiny_model_dir: Path) -> None:
    trainer = lora_trainer(tiny_model_dir, steps=2)
    model = plain_model(tiny_model_dir)
    before = expected_logprobs(model)
    model.load_state_dict(weights(trainer))
    for logprobs, merged, base in zip(
        trainer.forward("p", make_data())["logprobs"], expected_logprobs(model), before, strict=True
    ):
        print(f"deviation: {np.abs(logprobs - merged).max():.1e}")
        np.testing.assert_allclose(logprobs, merged, atol=2e-5)
        assert np.abs(merged - base).max() > 1e-3


def test_training_an_adapter_leaves_the_base_weights_pristine(tiny_model_dir: Path) -> None:
    trainer = lora_trainer(tiny_model_dir, policies=("p", "q"), steps=2)
    trainer.delete_policy("p")
    base = dict(plain_model(tiny_model_dir).state_dict())
    assert_same({n: p.detach() for n, p in trainer._model.names.items()}, base)


def test_policies_do_not_touch_each_other(tiny_model_dir: Path) -> None:
    both = lora_trainer(tiny_model_dir, policies=("p", "q"), steps=2)
    alone = lora_trainer(tiny_model_dir, policies=("p",), steps=2)
    assert_same(both.adapter("p").tensors, alone.adapter("p").tensors)
    both.delete_policy("q")
    assert_same(weights(both), weights(alone))


def test_a_pass_of_several_policies_is_their_passes_apart(tiny_model_dir: Path) -> None:
    policies = ("p", "q", "r")
    trainer, data = lora_trainer(tiny_model_dir, policies=policies, steps=1), make_data(groups=4, size=2)
    (pack,) = pack_data(data, 1024)
    targets = np.array([data[d].targets[t] for d, t in zip(pack.data_N, pack.steps_N, strict=True)], np.int32)
    slot_of_group = [0, 1, 2, -1]  # the last group is the base model's
    slots_T = torch.tensor(np.repeat(slot_of_group, [g.stop - g.start for g in pack.groups]))
    slots_N = slots_T[torch.from_numpy(pack.rows_N.astype(np.int64))]
    with trainer._adapter_pass.using(policies, slots_T):
        together = trainer._model.logprobs(pack, targets, 1.0)
    together.sum().backward()  # type: ignore[no-untyped-call]
    collected = {policy: gradients(trainer, policy) for policy in policies}
    for slot, policy in [*enumerate(policies), (-1, "")]:
        if policy:
            trainer._policies[policy].optimizer.clear_gradients()
        with trainer._adapter_pass.using([policy]):
            apart = trainer._model.logprobs(pack, targets, 1.0)
        torch.testing.assert_close(together[slots_N == slot], apart[slots_N == slot], rtol=0, atol=2e-5)
        if policy:
            apart[slots_N == slot].sum().backward()  # type: ignore[no-untyped-call]
            assert_same(collected[policy], gradients(trainer, policy), relative=1e-4)


def test_a_pack_of_several_policies_data_is_their_packs_apart(tiny_model_dir: Path) -> None:
    policies = ("p", "q")
    trainer = lora_trainer(tiny_model_dir, policies=policies, steps=1)
    # The same data for both, in turns, so that every prompt is there once for each policy.
    data = [datum for datum in make_data(groups=2, size=2) for _ in policies]
    slots = [index % 2 for index in range(len(data))]
    (mixed,) = pack_data(data, 1024, slots)
    targets = np.array([data[d].targets[t] for d, t in zip(mixed.data_N, mixed.steps_N, strict=True)], np.int32)
    assert mixed.slots_T is not None
    with trainer._adapter_pass.using(policies, torch.from_numpy(mixed.slots_T)):
        together = trainer._model.logprobs(mixed, targets, 1.0)
    together.sum().backward()  # type: ignore[no-untyped-call]
    for slot, policy in enumerate(policies):
        collected = gradients(trainer, policy)
        trainer._policies[policy].optimizer.clear_gradients()
        for index in (i for i, s in enumerate(slots) if s == slot):
            expected = trainer.forward(policy, [data[index]])["logprobs"][0]
            found = together.detach().numpy()[mixed.data_N == index]
            np.testing.assert_allclose(found, expected[mixed.steps_N[mixed.data_N == index]], atol=2e-5)
            trainer.forward_backward(policy, [data[index]], LossConfig(name="cross_entropy"), -1.0)
        assert_same(collected, gradients(trainer, policy), relative=1e-4)


def test_several_adapters_without_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="a slot for each token"), lora.AdapterPass().using(["p", "q"]):
        pass


def test_bfloat16_adapters_learn_in_float32_masters(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir, dtype="bfloat16")
    trainer.create_policy("p", PolicySpec(lora={"rank": 4}))
    losses = []
    for _ in range(6):
        losses.append(trainer.forward_backward("p", make_data(), LossConfig(name="cross_entropy"), 0.01).loss)
        trainer.optim_step("p", AdamParams(learning_rate=1e-2))
    assert losses[-1] < losses[0]
    assert all(tensor.dtype == torch.bfloat16 for tensor in trainer.adapter("p").tensors.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["no_such"]}, "no_such"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens is not a linear layer"),
        ({"rnak": 4}, "did you mean 'rank'"),
        ({"rank": 0}, "rank"),
    ],
)
def test_a_wrong_adapter_config_is_named_and_leaves_no_policy(
    tiny_model_dir: Path, fields: dict[str, Any], message: str
) -> None:
    trainer = make_trainer(tiny_model_dir)
    with pytest.raises(ConfigError, match=message):
        trainer.create_policy("p", PolicySpec(lora=fields))
    trainer.create_policy("p", PolicySpec())
    assert not trainer.is_lora("p")


def test_a_full_policy_has_no_adapter_and_does_not_join_others(tiny_model_dir: Path) -> None:
    trainer = lora_trainer(tiny_model_dir)
    assert trainer.is_lora("p")
    with pytest.raises(ConflictError, match="to itself"):
        trainer.create_policy("q", PolicySpec())
    trainer.delete_policy("p")
    trainer.create_policy("q", PolicySpec())
    with pytest.raises(ConflictError, match="no adapter"):
        trainer.adapter("q")


def test_a_full_policy_after_adapters_trains_every_weight(tiny_model_dir: Path) -> None:
    trainer, data = lora_trainer(tiny_model_dir), make_data()
    trainer.delete_policy("p")
    trainer.create_policy("p", PolicySpec())
    trainer.forward_backward("p", data, PPO, 1.0)
    model = plain_model(tiny_model_dir)
    plain_loss(model, data, PPO).backward()  # type: ignore[no-untyped-call]
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(gradients(trainer), reference, relative=1e-4)
