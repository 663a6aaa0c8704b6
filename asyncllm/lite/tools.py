"""The tools by name. Each checks its settings, locates model and texts, and quantizes with its recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncllm.config import LITE_TOOLS, LiteConfig
from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.lite.eight_bits import BlockedFP8, SmoothQuant
from asyncllm.lite.few_bits import FewBits, Scaled
from asyncllm.lite.merge_lora import merge_lora
from asyncllm.lite.quantize import Progress, QuantizeReport, input_statistics, quantize
from asyncllm.lite.recipe import Recipe
from asyncllm.lite.rounding import Grid
from asyncllm.lite.texts import Texts, read_texts, sequences
from asyncllm.lite.walk import Walk
from asyncllm.locate import locate
from asyncllm.models.loading.output_folder import check_free, output_folder
from asyncllm.models.registry import read_config

__all__ = ["TOOLS", "auto_awq", "auto_gptq", "blocked_fp8", "calibrate", "smooth_quant"]

Model = str | os.PathLike[str]

STATISTICS = "inputs_stats.safetensors"

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def auto_awq(
    model: Model,
    work_dir: str = LiteConfig().work_dir,
    *,
    texts: Texts | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> QuantizeReport:
    """Write a 4-bit checkpoint with AWQ, which scales large inputs down and their weights up before it rounds the
    weights.

    Args:
        model: name, folder or hub id of an unquantized checkpoint.
        work_dir: folder to write.
        texts: calibration texts, conversations or lists of token ids, in place of `calib_dataset`.
        progress: called with (finished layers, all layers).
        options: fields of `LiteConfig`, as on the command line.

    Raises InvalidParameter, UnsupportedFeature, and ModelError with its subclasses.
    """
    job = _Job.open("auto_awq", model, work_dir, options)
    config = job.config
    if config.w_bits != 4:
        raise UnsupportedFeature(f"w_bits = {config.w_bits}: AWQ's files have 4 bits. Use auto_gptq for others.")
    recipe = Scaled(**job.few_bits("awq"), compensate=config.compensate, search_scale=config.search_scale)
    return job.quantize(recipe, texts, progress)


def auto_gptq(
    model: Model,
    work_dir: str = LiteConfig().work_dir,
    *,
    texts: Texts | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> QuantizeReport:
    """Write a checkpoint of 2, 4 or 8 bits with GPTQ, which adjusts weights for the errors of those already rounded.
    See `auto_awq`; scales are moved only with `search_scale`."""
    job = _Job.open("auto_gptq", model, work_dir, options)
    config = job.config
    if config.w_bits not in ((4, 8) if job.compressed else (2, 4, 8)):
        raise UnsupportedFeature(f"w_bits = {config.w_bits} is not written. Take 4 or 8; the native format has 2 too.")
    fields = job.few_bits("gptq")
    recipe = Scaled(**fields) if config.search_scale else FewBits(**fields)
    return job.quantize(recipe, texts, progress)


def smooth_quant(
    model: Model,
    work_dir: str = LiteConfig().work_dir,
    *,
    texts: Texts | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> QuantizeReport:
    """Write a checkpoint with weights and activations in int8 or fp8, with SmoothQuant. See `auto_awq`."""
    job = _Job.open("smooth_quant", model, work_dir, options)
    config = job.config
    recipe = SmoothQuant(
        torch.int8 if config.quant_dtype == "int8" else torch.float8_e4m3fn,
        job.compressed,
        search_scale=config.search_scale,
        compensate=config.compensate,
        damp=config.damp_percent,
    )
    return job.quantize(recipe, texts, progress)


def blocked_fp8(
    model: Model, work_dir: str = LiteConfig().work_dir, *, progress: Progress | None = None, **options: Any
) -> QuantizeReport:
    """Write an fp8 checkpoint with one scale for each block of 128 x 128, as DeepSeek-V3 has. See `auto_awq`; no texts
    are used."""
    return _Job.open("blocked_fp8", model, work_dir, options).quantize(BlockedFP8(), None, progress)


def calibrate(
    model: Model,
    work_dir: str = LiteConfig().work_dir,
    *,
    texts: Texts | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Write statistics of the inputs of all projections to `inputs_stats.safetensors`, and return the file.

    NAME.absmax and NAME.absmean are float32 [K], where NAME is a module of the checkpoint and K its number of input
    features. See `auto_awq`.
    """
    job = _Job.open("calibrate", model, work_dir, options)
    chosen = job.sequences(texts)
    if not chosen:
        raise InvalidParameter("calib_samples = 0 leaves nothing to look at. Give 1 or more.", "calib_samples")
    with output_folder(job.destination, 0) as partial:
        found = input_statistics(
            Walk(job.folder, job.dtype, job.device), chosen, tokens_at_once=job.tokens_at_once, progress=progress
        )
        save_file(found, partial / STATISTICS)
    return job.destination / STATISTICS


TOOLS: Mapping[str, Callable[..., QuantizeReport | Path]] = {
    "calibrate": calibrate,
    "auto_awq": auto_awq,
    "auto_gptq": auto_gptq,
    "smooth_quant": smooth_quant,
    "blocked_fp8": blocked_fp8,
    "merge_lora": merge_lora,
}


@dataclass(frozen=True, slots=True)
class _Job:
    """The inputs of one call of a tool. Invalid settings are refused before any weight is read."""

    config: LiteConfig
    folder: Path
    destination: Path
    stored: str
    """The checkpoint's dtype."""
    max_position: int
    device: torch.device

    @classmethod
    def open(cls, tool: str, model: Model, work_dir: str, options: Mapping[str, Any]) -> _Job:
        """Check the options of a tool and find the model's folder. Raises InvalidParameter, ModelError."""
        known = LITE_TOOLS[tool]
        for name in options:
            if name not in known.options:
                raise InvalidParameter(f"{tool} has no option {name!r}. Its options: {', '.join(known.options)}.", name)
        config = LiteConfig.from_dict({**known.defaults, **options, "work_dir": str(work_dir)}).checked()
        destination = check_free(Path(config.work_dir), "work_dir", overwrite=config.overwrite)
        folder = locate(model, revision=config.revision, download_dir=config.download_dir)
        if folder.resolve() == destination.resolve():
            raise InvalidParameter("work_dir is the folder of the model. Give another one.", "work_dir")
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidParameter("device is 'cuda', and torch finds no GPU. Use device='cpu'.", "device")
        described = read_config(folder)
        return cls(config, folder, destination, described.dtype, described.max_position, torch.device(device))

    @property
    def compressed(self) -> bool:
        """Whether to write files of compressed-tensors."""
        return self.config.checkpoint_format == "compressed-tensors"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        auto = "float32" if self.device.type == "cpu" else self.stored
        return _DTYPES[auto if self.config.dtype == "auto" else self.config.dtype]

    @property
    def tokens_at_once(self) -> int:
        return self.config.batch_size * self.config.calib_seqlen

    def few_bits(self, files: str) -> dict[str, Any]:
        """Return the fields of `FewBits` that both tools share."""
        config, size = self.config, self.config.w_group_size
        if size != -1 and (size <= 0 or size % 32):
            raise InvalidParameter(f"w_group_size = {size} is not a multiple of 32, and not -1.", "w_group_size")
        # compressed-tensors has scales of the model's dtype.
        dtype = _DTYPES[self.stored] if self.compressed else torch.float16
        # The first format of GPTQ stores zero points minus one.
        min_zero = 1 if files == "gptq" and not self.compressed else 0
        return {
            "grid": Grid(config.w_bits, size, config.w_sym, dtype, min_zero),
            "files": "compressed-tensors" if self.compressed else files,
            "search_clip": config.search_clip,
            "damp": config.damp_percent,
            "ordered": config.desc_act,
            "writer": f"asyncllm:{version('asyncllm')}",
        }

    def sequences(self, texts: Texts | None) -> list[list[int]]:
        """Return the calibration texts; none if calib_samples is 0."""
        config = self.config
        if not config.calib_samples:
            return []
        if texts is not None and config.calib_dataset is not None:
            raise InvalidParameter("texts and calib_dataset are two sources of texts. Give one.", "calib_dataset")
        chosen = read_texts(config.calib_dataset) if texts is None else texts
        length = min(config.calib_seqlen, self.max_position)
        return sequences(self.folder, chosen, samples=config.calib_samples, length=length)

    def quantize(self, recipe: Recipe, texts: Texts | None, progress: Progress | None) -> QuantizeReport:
        return quantize(
            self.folder,
            self.destination,
            recipe,
            self.sequences(texts) if recipe.reads_inputs else [],
            tokens_at_once=self.tokens_at_once,
            dtype=self.dtype,
            device=self.device,
            progress=progress,
        )
