"""Find the folder of a model from a bundled name, a folder or a hub id."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncllm.errors import InvalidCheckpoint, InvalidParameter, ModelNotFound, short
from asyncllm.text.checkpoint_files import classes_of, read_json_object
from asyncllm.text.sentence_transformers import pooling_folder

__all__ = ["BUNDLED", "GGUF_ADVICE", "MISTRAL_ADVICE", "WHOLE_MODULES", "locate", "locate_adapter", "own_adapter"]

BUNDLED = ("tiny-chat", "tiny-vlm")
"""Models in the package, under `asyncllm/assets`."""
BUNDLED_ADAPTERS = ("tiny-lora",)
"""Adapters for tiny-chat, in the same place."""

ASSETS = Path(__file__).resolve().parent / "assets"

# The files that the engine reads, at the top of the repository: no pickles, no code, and no second copy of the weights
# under other names (consolidated.safetensors, original/, onnx/).
ALLOW_PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.jinja", "*.txt")
IGNORE_PATTERNS = ("*/*", "consolidated*.safetensors")

WHOLE_MODULES = (
    *("non_lora_trainables.bin", "mm_projector.bin", "vit.safetensors", "vpm_resampler_embedtokens.pt"),
    *("new_embeddings.safetensors", "new_embeddings.bin"),
)
"""Files beside an adapter in which trainers store whole modules: projectors, towers, embeddings."""

_ADAPTER_PATTERNS = ("adapter_model.bin", *WHOLE_MODULES)

_ADAPTER_FOLDERS: Mapping[str, str] = dict.fromkeys(("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"), "vision-lora")
"""Class -> the folder beside its weights, `NAME-lora`, with the adapter for prompts with images."""

MODELSCOPE_VARIABLE = "LMDEPLOY_USE_MODELSCOPE"
"""LMDeploy's environment variable. "True" resolves hub ids on ModelScope rather than Hugging Face."""

GGUF_ADVICE = (
    "GGUF is not read. Give the model's own repository, or let transformers expand the file "
    "(AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(OTHER), then the tokenizer), "
    "and quantize that with `asyncllm lite`."
)

MISTRAL_ADVICE = (
    "params.json and consolidated.safetensors are Mistral's own layout, which is not read. Give a repository in "
    "transformers' layout, with config.json and model.safetensors or its shards."
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

logger = logging.getLogger(__name__)


def locate(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    weights: bool = True,
) -> Path:
    """Return the folder of `model`, downloaded from the hub if needed. Blocks on disk and network.

    Tries in this order: a bundled name ("tiny-chat"), an existing folder, a hub id "owner/name". A name that is written
    like a path, or begins with an existing folder, is never looked up on the hub.

    Args:
        model: name, folder or hub id.
        revision: branch, tag or commit of a hub model.
        download_dir: where downloads are kept; None is the hub's own cache.
        weights: whether weights are downloaded too.

    Raises:
        InvalidParameter: `model` or `revision` is empty, `revision` is given for a model that is not on the hub, or the
            environment's LMDEPLOY_USE_MODELSCOPE is neither true nor false.
        ModelNotFound: nothing has this name, the hub cannot be reached and its cache has no copy, or the model changed
            during the download.
        InvalidCheckpoint: the folder has no config.json, or a hub's config.json or modules.json is damaged.
    """
    name = os.fspath(model)
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise InvalidParameter(
            f"model is {short(name)}, which is not a name. Give a bundled name ({', '.join(BUNDLED)}), a folder or a "
            f"hub id such as 'owner/name'.",
            "model_path",
        )
    if revision is not None and not revision.strip():
        raise InvalidParameter(f"revision is {revision!r}. Give a branch, tag or commit, or leave it out.", "revision")
    if name in BUNDLED:
        _refuse_revision(name, revision, "is bundled with the package")
        if not (ASSETS / name).is_dir():
            raise ModelNotFound(f"The bundled model {name!r} is not at {ASSETS / name}. Install asyncllm again.")
        return _checked(ASSETS / name)
    try:
        folder = Path(name).expanduser()
        is_folder, is_other = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:
        raise ModelNotFound(f"{short(name)} cannot be looked up ({error}). Check the spelling.") from error
    if is_folder:
        _refuse_revision(name, revision, "is a folder here")
        return _checked(folder)
    if is_other:
        advice = GGUF_ADVICE if name.endswith(".gguf") else "Give the folder that holds it, with config.json beside it."
        raise ModelNotFound(f"{short(name)} is a file. {advice}")
    if not _HUB_ID.fullmatch(name) or ".." in name or Path(name).parent.is_dir():
        raise ModelNotFound(
            f"{short(name)} was tried as a bundled name ({', '.join(BUNDLED)}) and as a folder ({short(str(folder))}), "
            f"and is neither. It was not looked up on the hub, because it is a path or not of the form 'owner/name'. "
            f"Check the spelling, or download the model first."
        )
    if not weights:
        return _checked(_download(name, revision, download_dir, less=("*.safetensors",)))
    folder = _checked(_download(name, revision, download_dir))
    for beside in (_adapter_folder(read_json_object(folder / "config.json")), pooling_folder(folder)):
        if beside and _download(name, revision, download_dir, inside=f"{beside}/") != folder:
            raise ModelNotFound(f"{name!r} changed on the hub while it was downloaded. Try again, or give a revision.")
    return folder


def locate_adapter(adapter: str | os.PathLike[str], *, download_dir: str | Path | None = None) -> Path:
    """Return the folder of a PEFT adapter, downloaded from the hub if needed: a bundled name ("tiny-lora"), an existing
    folder, or a hub id.

    Raises InvalidParameter, ModelNotFound and InvalidCheckpoint as `locate` does.
    """
    name = adapter if isinstance(adapter, str) else os.fspath(adapter)
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise InvalidParameter(f"The path of an adapter is {short(name)}. Give a folder or a hub id.", "adapters")
    if name in BUNDLED_ADAPTERS:
        return _checked(ASSETS / name, "adapter_config.json")
    try:
        folder = Path(name).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise ModelNotFound(f"{short(name)} cannot be looked up ({error}). Check the spelling.") from error
    if is_folder:
        return _checked(folder.absolute(), "adapter_config.json")
    if not _HUB_ID.fullmatch(name) or ".." in name or Path(name).parent.is_dir():
        raise ModelNotFound(
            f"There is no folder {short(name)}, and it is no hub id of the form 'owner/name'. Check the "
            f"spelling, or download the adapter first."
        )
    return _checked(_download(name, None, download_dir, more=_ADAPTER_PATTERNS), "adapter_config.json")


def own_adapter(folder: Path, overrides: Mapping[str, Any] | None = None) -> Mapping[str, str]:
    """Return name -> folder of the adapter for prompts with images, if the model's family has one and its folder
    contains it. `overrides` replaces entries of config.json. Raises InvalidCheckpoint."""
    beside = _adapter_folder({**read_json_object(folder / "config.json"), **(overrides or {})})
    if beside is None or not (folder / beside).is_dir():
        return {}
    return {beside.removesuffix("-lora"): str(folder / beside)}


def _adapter_folder(fields: Mapping[str, Any]) -> str | None:
    return _ADAPTER_FOLDERS.get(next(iter(classes_of(fields)), ""))


def _refuse_revision(name: str, revision: str | None, why: str) -> None:
    if revision is not None:
        raise InvalidParameter(
            f"revision is {revision!r}, but {short(name)} {why} and has no revisions. Leave revision out.", "revision"
        )


def _checked(folder: Path, config: str = "config.json") -> Path:
    if not (folder / config).is_file():
        raise InvalidCheckpoint(f"{folder} has no {config}, which describes the weights. {_advice(folder)}")
    return folder


def _advice(folder: Path) -> str:
    """Return what to do about a folder that is not one of a model, or not one of an adapter."""
    if (folder / "adapter_config.json").is_file():
        return "It holds an adapter: give its base model, and this folder in `adapters`."
    if (folder / "config.json").is_file():
        return "It holds a whole model: give it as the model, or the folder of an adapter that PEFT has saved."
    if any(folder.glob("*.gguf")):
        return GGUF_ADVICE
    return MISTRAL_ADVICE if (folder / "params.json").is_file() else "Give the folder with all files."


def _download(
    name: str,
    revision: str | None,
    download_dir: str | Path | None,
    *,
    inside: str = "",
    more: tuple[str, ...] = (),
    less: tuple[str, ...] = (),
) -> Path:
    """Return the folder of a hub model, with the files that match `ALLOW_PATTERNS` or `more`, and not `less`, at its
    top, or in the folder `inside`, which ends in a slash. Raises ModelNotFound."""
    where = f"{name!r}" if revision is None else f"{name!r} at revision {revision!r}"
    download = _from_modelscope if _uses_modelscope() else _from_hugging_face
    allowed, ignored = (
        [f"{inside}{pattern}" for pattern in each] for each in ((*ALLOW_PATTERNS, *more), (*IGNORE_PATTERNS, *less))
    )
    path = download(where, name, revision, download_dir, allowed, ignored)
    logger.info("%s is %s", name, path)
    return Path(path)


def _from_hugging_face(
    where: str,
    name: str,
    revision: str | None,
    download_dir: str | Path | None,
    allowed: list[str],
    ignored: list[str],
) -> str:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise ModelNotFound(
            f"{name!r} is not a folder here, and downloading it from the hub needs the package huggingface_hub. "
            f"`pip install huggingface_hub`, or give a folder."
        ) from error
    try:
        return snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=allowed,
            ignore_patterns=ignored,
        )
    except Exception as error:
        # The hub client leaks the exceptions of its HTTP library, which differs between its versions.
        advice = "Check the network, or download it elsewhere and give the folder."
        match error:
            case errors.GatedRepoError():
                advice = "The model is gated: accept its terms on its hub page and log in with `hf auth login`."
            case errors.RepositoryNotFoundError():
                advice = "The hub has no such model, or it is private: check the spelling, or log in."
            case errors.RevisionNotFoundError():
                advice = "The model is there, but this revision is not: check the branch, tag or commit."
        raise _not_had(where, "the hub", error, advice) from error


def _uses_modelscope() -> bool:
    """Return whether the environment selects ModelScope. Raises InvalidParameter if the value is not a boolean."""
    value = os.environ.get(MODELSCOPE_VARIABLE, "")
    if value.lower() not in ("", "false", "true"):
        raise InvalidParameter(
            f"The environment variable {MODELSCOPE_VARIABLE} is {short(value)}. Set it to True, to take models from "
            f"ModelScope, or to False.",
            MODELSCOPE_VARIABLE,
        )
    return value.lower() == "true"


def _from_modelscope(
    where: str,
    name: str,
    revision: str | None,
    download_dir: str | Path | None,
    allowed: list[str],
    ignored: list[str],
) -> str:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ModelNotFound(
            f"{name!r} is not a folder here, and {MODELSCOPE_VARIABLE} is set, for which downloading needs the package "
            f"modelscope. `pip install modelscope`, unset the variable to ask Hugging Face, or give a folder."
        ) from error

    def snapshot(*, local: bool) -> str:
        path: str = snapshot_download(
            name,
            revision=revision,
            cache_dir=None if download_dir is None else str(download_dir),
            local_files_only=local,
            allow_patterns=allowed,
            ignore_patterns=ignored,
        )
        return path

    try:
        return snapshot(local=False)
    except Exception as error:
        # Unlike Hugging Face's client, this one does not fall back to its cache when the network is down.
        try:
            return snapshot(local=True)
        except Exception:
            advice = "Check the name and the network, or download it elsewhere and give the folder."
            raise _not_had(where, "ModelScope", error, advice) from error


def _not_had(where: str, hub: str, error: Exception, advice: str) -> ModelNotFound:
    reason = str(error).strip().splitlines()
    return ModelNotFound(
        f"{where} is not a folder here, and could not be found on {hub} or in its cache "
        f"({type(error).__name__}{': ' + reason[0][:200] if reason else ''}). {advice}"
    )
