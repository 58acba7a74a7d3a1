"""Other architectures: what packs must equal the model's own forward pass, and what cannot pack is refused at load."""

from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_tools import assert_same, gradients, make_data, make_trainer, plain_logprobs, plain_loss, plain_model
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, MistralConfig, PretrainedConfig, Qwen3Config

from opentinker.client.messages import LossConfig, PolicySpec
from opentinker.errors import ConfigError

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, tie_word_embeddings=True),
        MistralConfig(**SIZES, sliding_window=4),
        Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=None, final_logit_softcapping=3.0),
    ],
    ids=lambda config: config.model_type,
)
def test_other_decoders_train_as_plain_transformers_does(config: PretrainedConfig, tmp_path: Path) -> None:
    folder = save(config, tmp_path)
    trainer, model, data = make_trainer(folder), plain_model(folder), make_data()
    trainer.create_policy("p", PolicySpec())
    for datum, logprobs in zip(data, trainer.forward("p", data)["logprobs"], strict=True):
        np.testing.assert_allclose(logprobs, plain_logprobs(model, datum).detach().numpy() * datum.weights, atol=2e-5)
    loss = LossConfig(name="importance_sampling")
    trainer.forward_backward("p", data, loss, 1.0)
    plain_loss(model, data, loss).backward()  # type: ignore[no-untyped-call]
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(gradients(trainer), reference, relative=2e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(**SIZES, sliding_window=64, attn_logit_softcapping=50.0), "attention has 'softcap'"),
        (
            CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logit_scale=0.2),
            "cannot pack cohere models: logprobs differ",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_an_architecture_that_packing_would_get_wrong_is_refused(
    config: PretrainedConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(save(config, tmp_path))
