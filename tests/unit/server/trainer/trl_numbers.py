"""Writes trl_numbers.json: what TRL computes for the policy-gradient losses and advantages, on numbers of our choosing.

Usage, in an environment of its own with trl 1.16 and torch: python tests/unit/server/trainer/trl_numbers.py
Losses and their gradients are those of `GRPOTrainer._compute_loss`, on given logprobs in float64. Advantages are those of
`GRPOTrainer` and `RLOOTrainer`, made with a tiny model, in float64, whose reward function gives the chosen rewards.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

LONGEST = 7
LENGTHS = [7, 3, 5, 1, 6, 4]
"""Tokens of each completion; some of them were not sampled (TRL's `tool_mask`)."""
NOT_SAMPLED = [(0, 2), (0, 3), (2, 1), (4, 0)]
"""(completion, token)."""
ADVANTAGES = [1.25, -0.75, 0.5, -1.5, 2.0, -0.25]
REWARDS = [[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 1.0, 1.0], [-2.0, 3.0, 0.125, 0.75], [0.5, 0.5, 0.5, 0.5]]
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "grpo with k3": {"loss_type": "grpo", "beta": 0.3},
    "dapo with k3": {"loss_type": "dapo", "beta": 0.3},
    "dr_grpo with k3": {"loss_type": "dr_grpo", "beta": 0.3, "max_completion_length": 11},
    "dapo with entropy": {"loss_type": "dapo", "entropy_coef": 0.2},
    "dapo, truncated importance sampling": {"loss_type": "dapo", "use_vllm": True, "clip_max": 1.1},
    "grpo, truncated importance sampling": {"loss_type": "grpo", "use_vllm": True, "clip_max": 1.1},
}


def arrays() -> dict[str, torch.Tensor]:
    """float64[completions, LONGEST] each, but `advantages`."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(LENGTHS), LONGEST, generator=generator, dtype=torch.float64)

    old = -torch.rand(len(LENGTHS), LONGEST, generator=generator, dtype=torch.float64) * 3 - 0.5
    mask = torch.tensor([[float(t < n) for t in range(LONGEST)] for n in LENGTHS], dtype=torch.float64)
    for completion, token in NOT_SAMPLED:
        mask[completion, token] = 0.0
    return {
        "logprobs": old + noise(0.3),
        "proximal_logprobs": old,
        "behaviour_logprobs": old + noise(0.15),
        "reference_logprobs": old + noise(0.4),
        "entropies": torch.rand(len(LENGTHS), LONGEST, generator=generator, dtype=torch.float64) * 2,
        "mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
    }


def loss_of(case: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, Any]:
    logprobs = given["logprobs"].clone().requires_grad_()
    entropies = given["entropies"].clone().requires_grad_()
    beta, coefficient = case.get("beta", 0.0), case.get("entropy_coef", 0.0)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        _entropy_bonus_enabled=bool(coefficient),
        _metrics={"train": defaultdict(list)},
        accelerator=accelerator,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        entropy_coef=coefficient,
        epsilon_high=case.get("epsilon_high", 0.2),
        epsilon_low=case.get("epsilon_low", 0.2),
        importance_sampling_level=case.get("importance_sampling_level", "token"),
        loss_type=case["loss_type"],
        max_completion_length=case.get("max_completion_length", LONGEST),
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=case.get("use_vllm", False),
        vllm_importance_sampling_correction=case.get("use_vllm", False),
    )
    mask = given["mask"]
    ones = torch.ones_like(mask)
    inputs = {
        "prompt_ids": ones[:, :1],
        "prompt_mask": ones[:, :1],
        "completion_ids": ones,
        "completion_mask": ones,
        "tool_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["proximal_logprobs"],
        "ref_per_token_logps": given["reference_logprobs"],
        "num_items_in_batch": mask.sum(),
        # As `_generate_and_score_completions` makes it in the mode 'token_truncate'.
        "importance_sampling_ratio": (given["proximal_logprobs"] - given["behaviour_logprobs"])
        .mul(mask)
        .exp()
        .clamp(max=case.get("clip_max", float("inf"))),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    slope = entropies.grad if entropies.grad is not None else torch.zeros_like(entropies)
    return {
        "settings": case,
        "loss": float(loss.detach()),
        "gradient": logprobs.grad.tolist(),
        "entropy_gradient": slope.tolist(),
    }


def advantages_of(trainer_class: Any, config_class: Any, folder: Path, **settings: Any) -> list[list[float]]:
    """Of the groups REWARDS."""
    words = ["<s>", "</s>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), bos_token_id=0, eos_token_id=1, pad_token_id=1, **sizes))
    size, flat = len(REWARDS[0]), [r for group in REWARDS for r in group]
    config = config_class(
        output_dir=str(folder),
        num_generations=size,
        per_device_train_batch_size=len(flat),
        max_completion_length=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    rows = Dataset.from_dict({"prompt": list("abcd")})
    trainer = trainer_class(model, lambda completions, **_: flat, args=config, train_dataset=rows, processing_class=fast)
    scored = trainer._generate_and_score_completions([{"prompt": p} for p in "abcd" for _ in range(size)])
    return [[float(a) for a in row] for row in scored["advantages"].view(-1, size)]


def main() -> None:
    import tempfile

    given = arrays()
    losses = {name: loss_of(case, given) for name, case in CASES.items()}
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        advantages = {
            "grpo": advantages_of(GRPOTrainer, GRPOConfig, folder),
            "grpo without std": advantages_of(GRPOTrainer, GRPOConfig, folder, scale_rewards="none"),
            "rloo": advantages_of(RLOOTrainer, RLOOConfig, folder, beta=0.0),
        }
    result = {
        "trl": trl.__version__,
        "arrays": {name: array.tolist() for name, array in given.items()},
        "losses": losses,
        "rewards": REWARDS,
        "advantages": advantages,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
