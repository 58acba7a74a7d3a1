"""A trainer that has little memory: batches are split, what cannot fit is refused, and the process lives."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_tools import assert_same, gradients, make_data, make_datum, make_trainer

from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.errors import TooLargeError, TrainerError
from opentinker.server.trainer.memory import PassCost, pass_shape, sequence_shape
from opentinker.server.trainer.packing import pack_data
from opentinker.server.trainer.peak import peak_bytes
from opentinker.server.trainer.trainer import TorchTrainer

PPO = LossConfig(name="ppo")


def budgeted(model_dir: Path, memory_gb: float | None = None, **fields: object) -> TorchTrainer:
    trainer = make_trainer(model_dir, pack_tokens=512, memory_gb=memory_gb, **fields)
    trainer.create_policy("p", PolicySpec())
    return trainer


def measured_cost(model_dir: Path, **fields: object) -> PassCost:
    trainer = budgeted(model_dir, 1e-9, **fields)
    with pytest.raises(TooLargeError):
        trainer.check("p", make_data(), PPO)
    (cost,) = trainer._budget._costs.values()
    return cost


@pytest.mark.parametrize("again", [False, True])
def test_what_a_pass_takes_is_foreseen_from_smaller_ones(tiny_model_dir: Path, again: bool) -> None:
    cost = measured_cost(tiny_model_dir, activation_checkpointing=again)
    trainer, data = budgeted(tiny_model_dir, activation_checkpointing=again), make_data(8, 8)
    (pack,) = pack_data(data, 512)
    trainer.forward_backward("p", data, PPO, 1.0)
    trainer.optim_step("p", AdamParams(learning_rate=0.0))
    taken = peak_bytes(torch.device("cpu"), lambda: trainer.forward_backward("p", data, PPO, 1.0))
    assert taken <= cost.bytes(pass_shape(pack)) <= 4 * taken


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("count", "prefix"), [(40, 150), (100, 100)])
def test_copies_of_a_shared_prefix_are_foreseen(tiny_model_dir: Path, again: bool, count: int, prefix: int) -> None:
    cost = measured_cost(tiny_model_dir, activation_checkpointing=again)
    trainer, rng = budgeted(tiny_model_dir, activation_checkpointing=again), np.random.default_rng(0)
    begun = rng.integers(3, 512, prefix)
    data = [make_datum(rng, np.concatenate([begun, rng.integers(3, 512, 3)]), 2) for _ in range(count)]
    (pack,) = pack_data(data, 2048)
    assert len(pack.groups) == count + 1
    trainer._config = trainer._budget._config = trainer._config.model_copy(update={"pack_tokens": 2048})
    trainer.forward_backward("p", data, PPO, 1.0)
    trainer.optim_step("p", AdamParams(learning_rate=0.0))
    taken = peak_bytes(torch.device("cpu"), lambda: trainer.forward_backward("p", data, PPO, 1.0))
    assert taken <= cost.bytes(pass_shape(pack)) <= 4 * taken


def room(model_dir: Path, tokens: int) -> float:
    """`memory_gb` for about so many tokens of one sequence."""
    return measured_cost(model_dir).bytes(sequence_shape(tokens)) * 1e-9


def test_a_small_budget_changes_no_result_and_refuses_what_is_too_long(tiny_model_dir: Path) -> None:
    data = make_data(4, 8)
    tight, free = budgeted(tiny_model_dir, room(tiny_model_dir, 40)), budgeted(tiny_model_dir)
    results = [trainer.forward_backward("p", data, PPO, 0.1) for trainer in (tight, free)]
    assert tight._budget._used < 512
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    assert_same(gradients(tight), gradients(free), relative=1e-5)
    before = gradients(tight)
    long = make_datum(np.random.default_rng(0), np.array([5]), 300)
    for call in (lambda: tight.forward_backward("p", [*data, long], PPO, 0.1), lambda: tight.check("p", [*data, long], PPO)):
        with pytest.raises(TooLargeError, match=r"datum 32 has 300 tokens.*about \d+ tokens of one sequence fit; nothing"):
            call()
    assert_same(gradients(tight), before)
    assert tight.optim_step("p", AdamParams(learning_rate=1e-3))["grad_norm"] > 0


def test_memory_that_runs_out_in_a_step_leaves_the_policy_as_it_was(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, data = budgeted(tiny_model_dir), make_data()
    trainer.forward_backward("p", data, PPO, 0.1)
    before = gradients(trainer)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "_logprobs", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
        with pytest.raises(TrainerError, match="not enough memory") as caught:
            trainer.forward_backward("p", data, PPO, 0.1)
    assert "pack_tokens" in caught.value.hint
    assert_same(gradients(trainer), before)
    trainer.forward_backward("p", data, PPO, 0.1)


def test_a_policy_without_room_for_its_optimizer_state_is_refused(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir)
    free = trainer._budget._free
    trainer._budget._free = lambda device: 100_000
    with pytest.raises(TooLargeError, match=r"to train all parameters takes 0.00 GiB beside the model") as caught:
        trainer.create_policy("p", PolicySpec())
    assert "lora" in caught.value.hint
    trainer._budget._free = free
    trainer.create_policy("p", PolicySpec())


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from trainer_tools import make_data, make_datum
from opentinker.client.messages import AdamParams, LossConfig, PolicySpec
from opentinker.config.server import TrainerConfig
from opentinker.errors import TooLargeError, TrainerError
from opentinker.server.trainer.packing import pack_data
from opentinker.server.trainer.trainer import TorchTrainer

loss = LossConfig(name="ppo")
trainer = TorchTrainer(Path(sys.argv[1]), TrainerConfig(dtype="float32", pack_tokens=1 << 16), device="cpu")
trainer.create_policy("p", PolicySpec())
trainer.forward_backward("p", make_data(1, 2), loss, 1.0)
trainer.optim_step("p", AdamParams(learning_rate=1e-3))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, resource.RLIM_INFINITY))

rng = np.random.default_rng(0)
many = [make_datum(rng, rng.integers(3, 512, 100), 100) for _ in range(120)]
budget = trainer._budget.packs
trainer._budget.packs = lambda data, *args, together=1, **rest: pack_data(data, 1 << 16, together=together)
try:
    trainer.forward_backward("p", many, loss, 0.1)
except TrainerError as error:
    print("unsplit:", error)
trainer._budget.packs = budget
trainer.forward_backward("p", many, loss, 0.1)
assert trainer._budget._used < len(many) * 199
trainer.optim_step("p", AdamParams(learning_rate=1e-3))
print("split: trained")
try:
    trainer.forward_backward("p", [*make_data(1, 1), make_datum(rng, rng.integers(3, 512, 10_000), 5_000)], loss, 0.1)
except TooLargeError as error:
    print("long:", error)
trainer.forward_backward("p", make_data(1, 1), loss, 0.1)
print("small: trained")
"""


def test_under_a_memory_limit_a_large_batch_is_split_and_the_process_lives(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    command = [sys.executable, "-c", LIMITED, str(model), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unsplit, split, long, small = done.stdout.splitlines()
    assert unsplit.startswith("unsplit: there was not enough memory")
    assert (split, small) == ("split: trained", "small: trained")
    assert re.match(r"long: datum 1 has 14999 tokens, whose pass takes about .* GiB; with .* about \d+ tokens", long)
