"""How `asyncllm lite` quantizes a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from asyncllm.config.settings import MAX_COUNT, Settings

__all__ = ["LITE_TOOLS", "LiteConfig", "LiteTool"]


class LiteConfig(Settings, frozen=True, kw_only=True):
    """How a checkpoint is quantized, and the calibration texts."""

    work_dir: Annotated[str, Meta(min_length=1, description="Folder to write.")] = "./work_dir"
    overwrite: Annotated[bool, Meta(description="Replace what is in work_dir, once the new checkpoint is whole.")] = (
        False
    )
    calib_dataset: Annotated[
        str | None,
        Meta(
            description="File of texts: .txt, with empty lines between, or .jsonl of text or messages; or the name of "
            "a data set as LMDeploy has them (wikitext2, c4), which is read from the hub. None: bundled."
        ),
    ] = None
    calib_samples: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="Sequences to take of the texts. 0: none, weights alone decide.")
    ] = 128
    calib_seqlen: Annotated[int, Meta(ge=8, le=MAX_COUNT, description="Most tokens of a sequence.")] = 2048
    batch_size: Annotated[int, Meta(ge=1, le=MAX_COUNT, description="Sequences that run at a time.")] = 1
    w_bits: Annotated[int, Meta(description="Bits of a weight: 4, and for auto_gptq 2 and 8 too.")] = 4
    w_sym: Annotated[bool, Meta(description="Without zero points.")] = False
    w_group_size: Annotated[
        int, Meta(ge=-1, le=MAX_COUNT, description="Input features with one scale: a multiple of 32; -1: all of them.")
    ] = 128
    search_scale: Annotated[
        bool, Meta(description="Try many exponents for the scales of the inputs, instead of one.")
    ] = True
    search_clip: Annotated[bool, Meta(description="Try ranges of a group narrower than its weights.")] = True
    compensate: Annotated[
        bool, Meta(description="Let weights that are rounded later make up for those before, as auto_gptq always does.")
    ] = True
    desc_act: Annotated[
        bool, Meta(description="Round the input features with the largest activations first; the file's order stays.")
    ] = True
    damp_percent: Annotated[
        float, Meta(gt=0, lt=1, description="Part of the mean second moment of the inputs that is added to each.")
    ] = 0.01
    quant_dtype: Annotated[
        Literal["int8", "fp8", "float8_e4m3fn"], Meta(description="Type of weights and activations.")
    ] = "int8"
    checkpoint_format: Annotated[
        Literal["native", "compressed-tensors"],
        Meta(description="Files as the method's own library has them, or as llm-compressor writes them."),
    ] = "native"
    device: Annotated[
        Literal["cuda", "cpu"] | None, Meta(description="Where to compute; None: on a GPU if there is one.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "float32"],
        Meta(description="Type to compute activations in; auto: float32 on a CPU, the checkpoint's on a GPU."),
    ] = "auto"
    adapter: Annotated[str, Meta(description="Folder or hub id of the LoRA adapter that merge_lora adds.")] = ""
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a model from the hub.")] = None
    download_dir: Annotated[str | None, Meta(description="Where downloads are kept; None: the hub's own cache.")] = None


class LiteTool(NamedTuple):
    """One of the tools."""

    about: str
    options: tuple[str, ...]
    """The fields of `LiteConfig` that it reads."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Defaults of its own, in place of the config's."""


_COMMON = ("work_dir", "overwrite", "device", "dtype", "revision", "download_dir")
_TEXTS = ("calib_dataset", "calib_samples", "calib_seqlen", "batch_size")
_FEW_BITS = ("w_bits", "w_sym", "w_group_size", "search_clip", "desc_act", "damp_percent", "checkpoint_format")

LITE_TOOLS: Mapping[str, LiteTool] = {
    "calibrate": LiteTool("Write what the inputs of all projections look like.", (*_COMMON, *_TEXTS)),
    "auto_awq": LiteTool(
        "Weights of 4 bits, by AWQ.",
        (*_COMMON, *_TEXTS, *_FEW_BITS, "search_scale", "compensate"),
    ),
    "auto_gptq": LiteTool(
        "Weights of 2, 4 or 8 bits, by GPTQ.",
        (*_COMMON, *_TEXTS, *_FEW_BITS, "search_scale"),
    ),
    "smooth_quant": LiteTool(
        "Weights and activations in int8 or fp8, by SmoothQuant.",
        (*_COMMON, *_TEXTS, "quant_dtype", "checkpoint_format", "search_scale", "compensate", "damp_percent"),
    ),
    "blocked_fp8": LiteTool("Weights in fp8 with a scale for each block of 128 x 128.", _COMMON),
    "merge_lora": LiteTool(
        "Plain weights with a LoRA adapter added to them.",
        ("adapter", "work_dir", "overwrite", "revision", "download_dir"),
    ),
}
"""Name -> tool. All names but the last two are LMDeploy's."""
