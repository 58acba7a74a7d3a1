"""A tiny vision-language model, built from nothing, and pictures for it."""

import io
from pathlib import Path

from tiny_model import LLAMA, byte_level_tokenizer, make_peaked

IMAGE_SIZE, PATCH_SIZE, SHUFFLE = 32, 8, 2
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2 // SHUFFLE**2
"""Features, and so placeholder tokens, of one tile."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
]
CORPUS = [
    "system user assistant",
    "How wide is the bar? How many sides has the shape? The answer is 4.",
    "The quick brown fox jumps over the lazy dog.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12",
]


def build_tiny_vlm(folder: Path, *, seed: int = 0, image_seq_len: int = IMAGE_TOKENS, tiles: bool = False) -> Path:
    """Write a random float32 Idefics3 (text: hidden 64, head_dim 32, tied head, context 512; pictures of 32 x 32, or with
    `tiles` cut into such tiles) with its image processor and a byte-level BPE tokenizer with ChatML tokens into `folder`."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = byte_level_tokenizer(SPECIAL, CORPUS, CHAT_TEMPLATE)
    config = Idefics3Config(
        text_config={"model_type": "llama", **LLAMA},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
        },
        scale_factor=SHUFFLE,
        image_token_id=SPECIAL.index("<image>"),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    make_peaked(model)
    model.save_pretrained(folder)
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * IMAGE_SIZE}, max_image_size={"longest_edge": IMAGE_SIZE}, do_image_splitting=tiles
    )
    Idefics3Processor(pictures, tokenizer, image_seq_len=image_seq_len, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return folder


def picture(seed: int, width: int = IMAGE_SIZE, height: int = IMAGE_SIZE) -> bytes:
    """A PNG of coarse noise, determined by its seed."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()
