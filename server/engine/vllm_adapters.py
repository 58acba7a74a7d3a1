"""Adapters as vLLM serves them: which layers they may change, and how its workers take them and let go of them."""

from pathlib import Path
from typing import Any

import torch

from opentinker.config.server import LoraConfig
from opentinker.errors import EngineError
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import LoraTensors, WeightAck
from opentinker.server.vision import auto_class, language_prefix


def adapted_modules(model_dir: Path, lora: LoraConfig) -> list[str]:
    """Short names of the layers that adapters may change."""
    if lora.target_modules != "all-linear":
        return list(lora.target_modules)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    head, prefix = model.get_output_embeddings(), language_prefix(model)
    modules = ((name, module) for name, module in model.named_modules() if name.startswith(prefix))
    linear = (name for name, module in modules if isinstance(module, torch.nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def add_adapter(worker: Any, adapter: LoraTensors, number: int) -> WeightAck:
    """Runs on the vLLM worker: hold `adapter`, under the id `number`."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    loader = worker.model_runner.lora_manager
    manager = loader._adapter_manager
    if len(manager.list_adapters()) >= manager.lora_slots:
        raise EngineError(f"vLLM has room for {manager.lora_slots} adapters")  # it would drop one that is in use
    helper = PEFTHelper(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.target_modules))
    helper.validate_legal(loader.lora_config)
    homes = set(manager.modules) | {part for parts in manager.packed_modules.values() for part in parts}
    written = {name for name in adapter.tensors if parse_fine_tuned_lora_name(name)[0] in homes}
    digests = {name: tensor_digest(tensor) for name, tensor in adapter.tensors.items()}
    # vLLM keeps and packs what it is given; the sender's tensors go on changing.
    tensors = {name: tensor.detach().clone() for name, tensor in adapter.tensors.items()}
    model = LoRAModel.from_lora_tensors(number, tensors, helper, device="cpu", dtype=loader.lora_config.lora_dtype)
    manager.add_adapter(model)
    manager.activate_adapter(number)
    return WeightAck(digests, frozenset(written), frozenset(adapter.tensors))


def remove_adapter(worker: Any, number: int) -> None:
    """Runs on the vLLM worker: let go of an adapter, and of its values: on CPU the kernels compute the rows of the base model
    with the last slot, whether it is in use or not. Of one that it does not hold, nothing."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slots = [slot for slot, held in enumerate(manager.lora_index_to_id) if held == number]
    manager.remove_adapter(number)
    for slot in slots:
        for module in manager.modules.values():
            module.reset_lora(slot)
