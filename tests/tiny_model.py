"""A tiny Llama with a tokenizer of its own, built from nothing, for tests, scenarios and benchmarks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named Tiny<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "system user assistant",
    "You are a helpful AI assistant named Tiny",
    "What is 3 + 4? The answer is 7. What is 12 + 30? The answer is 42.",
    "I am thinking of a number between 1 and 100. Guess it. higher lower correct",
    "The quick brown fox jumps over the lazy dog.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
]
VOCAB_SIZE = 512
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def build_tiny_model(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Write a random float32 Llama (hidden 64, head_dim 32, tied head, context 512) and a byte-level BPE tokenizer with
    ChatML tokens into `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CORPUS, CHAT_TEMPLATE)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": layers}))
    make_peaked(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_peaked(model: Any) -> None:
    """Draw weights larger than usual: distributions must be peaked enough for tests to tell weights apart."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)


def byte_level_tokenizer(special: Sequence[str], corpus: Sequence[str], chat_template: str) -> Any:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens. The special ones are the first; among them are ChatML's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=chat_template,
    )
