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
    overwrite: Annotated[
        bool, Meta(description="Replace the contents of work_dir once the new checkpoint is complete.")
    ] = False
    calib_dataset: Annotated[
        str | None,
        Meta(
            description="Calibration texts: a .txt file with empty lines between texts, a .jsonl file of text or "
            "messages, or one of LMDeploy's data sets (wikitext2, c4), read from the hub. None: bundled texts."
        ),
    ] = None
    calib_samples: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="Number of calibration sequences. 0: none, only weights are used.")
    ] = 128
    calib_seqlen: Annotated[int, Meta(ge=8, le=MAX_COUNT, description="Maximum number of tokens per sequence.")] = 2048
    batch_size: Annotated[int, Meta(ge=1, le=MAX_COUNT, description="Number of sequences per batch.")] = 1
    w_bits: Annotated[int, Meta(description="Bits per weight: 4; for auto_gptq also 2 and 8.")] = 4
    w_sym: Annotated[bool, Meta(description="Without zero points.")] = False
    w_group_size: Annotated[
        int,
        Meta(ge=-1, le=MAX_COUNT, description="Input features that share a scale: a multiple of 32; -1: all of them."),
    ] = 128
    search_scale: Annotated[
        bool, Meta(description="Search over exponents for the input scales, instead of using one.")
    ] = True
    search_clip: Annotated[bool, Meta(description="Search over ranges narrower than a group's weights.")] = True
    compensate: Annotated[
        bool,
        Meta(description="Let weights that are rounded later compensate for earlier ones, as auto_gptq always does."),
    ] = True
    desc_act: Annotated[
        bool,
        Meta(description="Round the input features with the largest activations first; their order in the file stays."),
    ] = True
    damp_percent: Annotated[
        float, Meta(gt=0, lt=1, description="Fraction of the inputs' mean second moment that is added to each moment.")
    ] = 0.01
    quant_dtype: Annotated[
        Literal["int8", "fp8", "float8_e4m3fn"], Meta(description="Type of weights and activations.")
    ] = "int8"
    checkpoint_format: Annotated[
        Literal["native", "compressed-tensors"],
        Meta(description="File format: the method's own library's, or llm-compressor's."),
    ] = "native"
    device: Annotated[
        Literal["cuda", "cpu"] | None, Meta(description="Device to compute on; None: a GPU if there is one.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "float32"],
        Meta(description="Dtype of activations; auto: float32 on a CPU, the checkpoint's on a GPU."),
    ] = "auto"
    adapter: Annotated[str, Meta(description="Folder or hub id of the LoRA adapter for merge_lora.")] = ""
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a model from the hub.")] = None
    download_dir: Annotated[str | None, Meta(description="Folder for downloads; None: the hub's own cache.")] = None


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
    "calibrate": LiteTool("Write statistics of the inputs of all projections.", (*_COMMON, *_TEXTS)),
    "auto_awq": LiteTool(
        "4-bit weights, by AWQ.",
        (*_COMMON, *_TEXTS, *_FEW_BITS, "search_scale", "compensate"),
    ),
    "auto_gptq": LiteTool(
        "2-bit, 4-bit or 8-bit weights, by GPTQ.",
        (*_COMMON, *_TEXTS, *_FEW_BITS, "search_scale"),
    ),
    "smooth_quant": LiteTool(
        "int8 or fp8 weights and activations, by SmoothQuant.",
        (*_COMMON, *_TEXTS, "quant_dtype", "checkpoint_format", "search_scale", "compensate", "damp_percent"),
    ),
    "blocked_fp8": LiteTool("fp8 weights with a scale for each block of 128 x 128.", _COMMON),
    "merge_lora": LiteTool(
        "Unquantized weights merged with a LoRA adapter.",
        ("adapter", "work_dir", "overwrite", "revision", "download_dir"),
    ),
}
"""Name -> tool. All names but the last two are LMDeploy's."""
