"""Names, folders and hub ids. The hub is a fake module, or the real client with a cache and no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncllm import locate as locate_module
from asyncllm.errors import InvalidCheckpoint, InvalidParameter, ModelError, ModelNotFound
from asyncllm.locate import locate, locate_adapter


class FakeHub(ModuleType):
    """Stands for huggingface_hub: answers with `folder`, or raises `error`, and records the calls."""

    def __init__(self, folder: Path | None = None, error: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.error = folder, error
        self.calls: list[tuple[str, dict[str, Any]]] = []
        names = ("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError")
        self.errors = SimpleNamespace(**{name: type(name, (OSError,), {}) for name in names})

    def snapshot_download(self, repo_id: str, **arguments: Any) -> str:
        self.calls.append((repo_id, arguments))
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """The working directory is an empty folder, and the hub has every model."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.delenv("LMDEPLOY_USE_MODELSCOPE", raising=False)
    return fake


@pytest.fixture
def modelscope(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """ModelScope, which the environment asks for, has every model."""
    fake = FakeHub(model_folder(tmp_path / "modelscope"))
    monkeypatch.setitem(sys.modules, "modelscope", fake)
    monkeypatch.setenv("LMDEPLOY_USE_MODELSCOPE", "True")
    return fake


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> None:
    folder = model_folder(tmp_path / "here" / "owner" / "my model")
    assert locate(str(folder)) == folder
    assert locate(folder) == folder
    assert locate("owner/my model").resolve() == folder
    assert locate("./owner/my model/").resolve() == folder
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    assert locate("~/owner/my model") == folder
    assert hub.calls == []


def test_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> None:
    monkeypatch.setattr(locate_module, "ASSETS", tmp_path / "assets")
    with pytest.raises(ModelNotFound, match="Install asyncllm again"):
        locate("tiny-chat")
    folder = model_folder(tmp_path / "assets" / "tiny-chat")
    model_folder(Path("tiny-chat"))
    assert locate("tiny-chat") == folder
    assert locate("./tiny-chat") == Path("tiny-chat")
    assert hub.calls == []


def test_bundled_models_lie_inside_the_package() -> None:
    assert Path(locate_module.__file__).parent / "assets" == locate_module.ASSETS


@pytest.mark.parametrize(
    ("file", "find", "advice"),
    [
        ("adapter_config.json", locate, "give its base model, and this folder in `adapters`"),
        ("config.json", locate_adapter, "It holds a whole model"),
        ("params.json", locate, "Mistral's own layout"),
        ("README.md", locate, "all files"),
    ],
)
def test_a_folder_of_another_kind_is_told(tmp_path: Path, file: str, find: Callable[[str], Path], advice: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(InvalidCheckpoint, match=advice):
        find(str(tmp_path))


def test_a_hub_id_downloads_what_is_read_and_no_more(tmp_path: Path, hub: FakeHub) -> None:
    assert locate("owner/name", revision="v1", download_dir=tmp_path) == tmp_path / "hub"
    ((name, arguments),) = hub.calls
    assert (name, arguments["revision"], arguments["cache_dir"]) == ("owner/name", "v1", tmp_path)
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in arguments["allow_patterns"])
    assert "*.safetensors" in arguments["allow_patterns"]
    assert "*/*" in arguments["ignore_patterns"]


@pytest.mark.parametrize(
    "name",
    [
        "/absent/model",
        "./absent",
        "../absent",
        "~/absent",
        "~nobody-of-this-name/absent",
        "absent",
        "absent/",
        "owner/name/",
        "owner/name/more",
        "owner//name",
        "owner\\name",
        "C:\\models\\name",
        "owner/..",
        "../name",
        "owner/na..me",
        "owner/na me",
        "-owner/name",
        "owner/.name",
        "owner/näme",
        "owner/name\n",
        "owner/" + "n" * 200,
        "n" * 5000,
        "https://hub/owner/name",
        "owner/name\ud800",
        "tiny-chatt",
        "TINY-CHAT",
        "models/absent",
    ],
)
def test_what_is_not_a_hub_id_never_reaches_the_hub(name: str, hub: FakeHub) -> None:
    Path("models").mkdir()
    with pytest.raises(ModelNotFound) as caught:
        locate(name)
    assert name in str(caught.value) or repr(name)[1:-1][:100] in str(caught.value)
    str(caught.value).encode()
    assert hub.calls == []


@pytest.mark.parametrize("name", ["", " ", "\n", "owner/na\0me"])
def test_no_name(name: str, hub: FakeHub) -> None:
    with pytest.raises(InvalidParameter, match="model is"):
        locate(name)
    assert hub.calls == []


def test_a_file_is_not_a_folder() -> None:
    Path("model.safetensors").touch()
    with pytest.raises(ModelNotFound, match=r"'model.safetensors' is a file"):
        locate("model.safetensors")
    Path("model.gguf").touch()
    for name in ("model.gguf", "."):
        with pytest.raises((ModelNotFound, InvalidCheckpoint), match=r"GGUF is not read.*gguf_file"):
            locate(name)


def test_no_config(tmp_path: Path, hub: FakeHub) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(InvalidCheckpoint, match=r"bare has no config\.json"):
        locate(str(tmp_path / "bare"))
    (tmp_path / "hub" / "config.json").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"hub has no config\.json"):
        locate("owner/name")


def test_a_revision_is_honoured_or_refused(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    for name in (str(tmp_path / "model"), "tiny-chat"):
        with pytest.raises(InvalidParameter, match="revision") as caught:
            locate(name, revision="v1")
        assert caught.value.param == "revision"
    with pytest.raises(InvalidParameter, match="revision is ''"):
        locate("owner/name", revision="")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("GatedRepoError", "hf auth login"),
        ("RepositoryNotFoundError", "check the spelling"),
        ("RevisionNotFoundError", "branch, tag or commit"),
        (ConnectionError("offline"), "offline"),
        (TimeoutError(), "network"),
        (RuntimeError("of the HTTP library\nand more"), "network"),
    ],
)
def test_a_failed_download_says_what_to_do(error: str | Exception, advice: str, hub: FakeHub) -> None:
    hub.error = getattr(hub.errors, error)("no") if isinstance(error, str) else error
    with pytest.raises(ModelNotFound) as caught:
        locate("owner/name", revision="v1")
    for text in ("'owner/name'", "'v1'", type(hub.error).__name__, advice):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is hub.error


def test_without_the_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
        locate("owner/name")


def test_the_real_client_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "huggingface_hub")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'owner/name' .* or in its cache"):
        locate("owner/name", download_dir=tmp_path / "cache")
    commit = "0123456789" * 4
    repository = tmp_path / "cache" / "models--owner--name"
    snapshot = model_folder(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert locate("owner/name", download_dir=tmp_path / "cache") == snapshot


def test_modelscope_in_place_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub, modelscope: FakeHub
) -> None:
    for value in ("True", "true"):
        monkeypatch.setenv("LMDEPLOY_USE_MODELSCOPE", value)
        assert locate("owner/name", revision="v1", download_dir=tmp_path) == tmp_path / "modelscope"
    name, arguments = modelscope.calls[0]
    assert (name, arguments["revision"], arguments["cache_dir"]) == ("owner/name", "v1", str(tmp_path))
    assert "*.safetensors" in arguments["allow_patterns"]
    assert "*/*" in arguments["ignore_patterns"]
    assert hub.calls == []
    assert locate("tiny-chat").name == "tiny-chat"
    for value in ("False", "false", ""):
        monkeypatch.setenv("LMDEPLOY_USE_MODELSCOPE", value)
        assert locate("owner/name") == tmp_path / "hub"
    assert len(modelscope.calls) == 2


@pytest.mark.parametrize(
    ("file", "entries", "beside"),
    [
        *(
            (
                "config.json",
                {"architectures": [name]},
                ["vision-lora/adapter_config.json", "vision-lora/adapter_model.safetensors"],
            )
            for name in ("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM")
        ),
        (
            "modules.json",
            [
                {"path": "", "type": "sentence_transformers.models.Transformer"},
                {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ],
            ["1_Pooling/config.json"],
        ),
    ],
)
def test_a_model_comes_with_the_folders_that_are_read(
    file: str, entries: Any, beside: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    """Of an adapter of its own, or of its pooling, and no others; most models come in one call, with none."""
    top = ["config.json", "model-1.safetensors", "README.md", "consolidated.safetensors"]
    others = ["speech-lora/adapter_config.json", "vision-lora/old/adapter_config.json", "x/vision-lora/config.json"]
    others += ["onnx/config.json", "2_Dense/config.json"]
    had = set[str]()

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        files = utils.filter_repo_objects(
            [*top, *beside, *others], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        had.update(files)
        return str(hub.folder)

    monkeypatch.delitem(sys.modules, "huggingface_hub")
    utils = pytest.importorskip("huggingface_hub.utils")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert locate("owner/name") == hub.folder
    assert had == set(top[:2])
    (tmp_path / "hub" / file).write_text(json.dumps(entries))
    assert locate("owner/name") == hub.folder
    assert had == {*top[:2], *beside}


def test_a_model_that_changes_between_two_downloads_is_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    (tmp_path / "hub" / "config.json").write_text('{"architectures": ["Phi4MMForCausalLM"]}')
    folders = iter([tmp_path / "hub", tmp_path / "later"])
    monkeypatch.setattr(hub, "snapshot_download", lambda repo_id, **_: str(next(folders)))
    with pytest.raises(ModelNotFound, match="Try again, or give a revision"):
        locate("owner/name")


def test_modelscope_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modelscope: FakeHub) -> None:
    def offline(repo_id: str, *, local_files_only: bool, **_: Any) -> str:
        if not local_files_only or repo_id != "owner/cached":
            raise ConnectionError("offline" if not local_files_only else "no copy")
        return str(modelscope.folder)

    monkeypatch.setattr(modelscope, "snapshot_download", offline)
    assert locate("owner/cached") == tmp_path / "modelscope"
    with pytest.raises(
        ModelNotFound, match=r"'owner/name' .* on ModelScope or in its cache \(ConnectionError: offline"
    ):
        locate("owner/name")


def test_modelscope_is_honoured_or_refused(monkeypatch: pytest.MonkeyPatch, hub: FakeHub, modelscope: FakeHub) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelNotFound, match="pip install modelscope"):
        locate("owner/name")
    monkeypatch.setenv("LMDEPLOY_USE_MODELSCOPE", "1")
    with pytest.raises(InvalidParameter, match=r"LMDEPLOY_USE_MODELSCOPE is '1'\. Set it to True"):
        locate("owner/name")
    assert hub.calls == modelscope.calls == []


def test_an_adapter_comes_with_all_that_belongs_to_it(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of old adapters, and modules by which it would be refused."""
    (hub.folder / "adapter_config.json").write_text("{}")
    assert locate_adapter("owner/adapter") == hub.folder
    files = ["adapter_model.bin", "non_lora_trainables.bin", "pytorch_model.bin", "checkpoint-9/adapter_model.bin"]
    _, arguments = hub.calls[0]
    patterns = {key: arguments[key] for key in ("allow_patterns", "ignore_patterns")}
    monkeypatch.delitem(sys.modules, "huggingface_hub")
    utils = pytest.importorskip("huggingface_hub.utils")
    assert list(utils.filter_repo_objects(files, **patterns)) == files[:2]
