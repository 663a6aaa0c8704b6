"""Tiny vision-language checkpoints in the layout of the hub, every parameter perturbed, and their oracles."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm import GenerationConfig, Response
from tests.checkpoints import perturb, write_tokenizer
from tests.vl.cohere2_pictures import cohere2_pictures
from tests.vl.kinds import KINDS
from tests.vl.llama4_pictures import llama4_pictures
from tests.vl.pillow_pictures import kimi_pictures, lfm2_pictures
from tests.vl.published.families import PUBLISHED
from tests.vl.tiny_parts import IMAGE_ID, TEXT

__all__ = [
    "ALL_KINDS",
    "build_vlm",
    "folder_of",
    "greedy",
    "image_processor_of",
    "oracle_of",
    "picture",
    "shared_oracle",
    "worst_difference",
]


ALL_KINDS = [*KINDS, *PUBLISHED]


def _transposed_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }


def _kimis_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers turns back of its names leaves some as in no published file."""
    theirs = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    }
    own = {name: name for name in tensors}
    for old, new in theirs.items():
        own = {name: new + each.removeprefix(old) if each.startswith(old) else each for name, each in own.items()}
    return {own[name]: tensor for name, tensor in tensors.items()}


_AS_PUBLISHED: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "kimi_k25": _kimis_names,
    "qwen3_vl_moe": _transposed_experts,
}
"""Where published files have other tensors than transformers writes, and reads both."""


def build_vlm(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a complete model folder and return it."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if kind in PUBLISHED:
        return _build_published(kind, folder, seed)
    config, pictures, tokens, template = KINDS[kind]()
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    perturb(model, seed, offset=0.0 if kind.startswith("gemma") else 1.0)
    _fill_buffers(model, seed)
    model.save_pretrained(folder)
    if kind in _AS_PUBLISHED:
        file = folder / "model.safetensors"
        save_file(_AS_PUBLISHED[kind](load_file(file)), file, metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    write_tokenizer(folder, TEXT["vocab_size"], more=tokens, template=template)
    return folder


def _fill_buffers(model: torch.nn.Module, seed: int) -> None:
    """Give bounds and shifts of Gemma 4's tower, which are no parameters, values that count."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        last = name.rpartition(".")[2]
        if last in ("input_min", "output_min", "input_max", "output_max"):
            buffer.fill_((0.4 + torch.rand((), generator=generator).item()) * (-1 if last.endswith("min") else 1))
        elif last in ("std_bias", "std_scale"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def _build_published(kind: str, folder: Path, seed: int) -> Path:
    family = PUBLISHED[kind]
    model = family()
    perturb(model, seed)
    state = {name: tensor.clone().contiguous() for name, tensor in model.renamed(dict(model.state_dict())).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    remote = {"AutoModelForCausalLM": f"modeling.{family.architecture}"}
    fields = {**family.fields, "architectures": [family.architecture], "auto_map": remote, "torch_dtype": "float32"}
    pictures = {"preprocessor_config.json": family.pictures} if family.pictures else {}
    files = {"config.json": fields, **pictures, **family.files}
    for name, content in {**files, "generation_config.json": {"eos_token_id": [3]}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    model.write_beside(folder)
    if family.code:
        (folder / "ixc_utils.py").write_text(family.code)
    write_tokenizer(folder, TEXT["vocab_size"], more=family.tokens, template=family.template)
    return folder


def _published_oracle(kind: str, seed: int = 0) -> Callable[[Sequence[int], Sequence[Image.Image]], Tensor]:
    model = PUBLISHED[kind]().eval()
    perturb(model, seed)
    return model.logits


def image_processor_of(folder: Path) -> Any:
    """Return transformers' image processor."""
    from transformers import AutoImageProcessor

    fields = json.loads((folder / "preprocessor_config.json").read_text())
    if fields["image_processor_type"] == "Llama4ImageProcessor":
        return llama4_pictures(fields)
    if fields["image_processor_type"] == "Cohere2VisionImageProcessor":
        return cohere2_pictures(fields)
    if fields["image_processor_type"] == "Lfm2VlImageProcessor":
        return lfm2_pictures(fields)
    if fields["image_processor_type"] == "Kimi_K25ImageProcessor":
        return kimi_pictures(fields)
    if fields["image_processor_type"] == "Gemma4ImageProcessor":
        # It takes no other numbers than those of its checkpoints, of which the least is 70.
        from transformers.models.gemma4 import image_processing_pil_gemma4

        vars(image_processing_pil_gemma4)["_SUPPORTED_SOFT_TOKENS"] = (fields["max_soft_tokens"],)
    # Not torchvision's where that is installed: its resized pixels differ by one step of 255.
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def oracle_of(folder: Path) -> Callable[[Sequence[int], Sequence[Image.Image]], Tensor]:
    """Return what gives transformers' logits [tokens, vocab] of expanded token ids and their images."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    if model.config.model_type == "paddleocr_vl":
        # Published files' code does not align corners where it stretches positions; some versions of transformers do.
        (embeddings,) = (each for each in model.modules() if hasattr(each, "interpolation_align_corners"))
        embeddings.interpolation_align_corners = False
    processor = image_processor_of(folder)

    @torch.inference_mode()
    def logits(ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
        # Of several images in one prompt, LLaVA-OneVision's are not tiled.
        given = [list(images)] if "batch_num_images" in processor.model_input_names else list(images)
        pictures = processor(given, return_tensors="pt") if images else {}
        if "grids" in pictures:
            ids = _with_marks(ids, [tuple(each) for each in pictures.pop("grids").tolist()])
        inputs = torch.tensor([list(ids)])
        if "image_grid_thw" in pictures:
            pictures["mm_token_type_ids"] = (inputs == IMAGE_ID).int()
        if "omni" in str(model.config.model_type):
            pictures["attention_mask"] = torch.ones_like(inputs)
            pictures.pop("mm_token_type_ids", None)
        pictures.pop("aspect_ratios", None)
        if pictures.pop("num_soft_tokens_per_image", None) is not None:
            pictures["mm_token_type_ids"] = (inputs == IMAGE_ID).int()
        if pictures.pop("num_crops", None) is not None:
            pictures["token_type_ids"] = (inputs == IMAGE_ID).int()
        result: Tensor = model(input_ids=inputs, **pictures).logits[0]
        return result

    return logits


def _with_marks(ids: Sequence[int], grids: Sequence[tuple[int, int]]) -> list[int]:
    """Return a prompt with the tokens that Ovis2 has in front of, between and behind tiles of four, where all of an
    image's are alike."""
    start, grid, column, row, end = range(IMAGE_ID + 1, IMAGE_ID + 6)
    tile, marked = [IMAGE_ID] * 4, list[int]()
    for rows, columns in grids:
        marked += [start, *tile, grid]
        for number in range(rows * columns if rows * columns > 1 else 0):
            marked += [*([column if number % columns else row] if number else []), *tile]
        marked.append(end)
    places = [place for place, token in enumerate(ids) if token == IMAGE_ID][: len(marked)]
    found = list(ids)
    for place, token in zip(places, marked, strict=True):
        found[place] = token
    return found


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Return an image of smooth noise, another for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@cache
def folder_of(kind: str) -> Path:
    """Return the checkpoint of a kind, built once per process and removed when it ends."""
    folder = Path(mkdtemp(prefix="asyncllm-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    return build_vlm(kind, folder)


@cache
def shared_oracle(kind: str) -> Callable[[Sequence[int], Sequence[Image.Image]], Tensor]:
    """Return `oracle_of` the shared checkpoint."""
    return _published_oracle(kind) if kind in PUBLISHED else oracle_of(folder_of(kind))


def greedy(max_new_tokens: int = 6) -> GenerationConfig:
    """Return how to ask for what `worst_difference` compares: without the token of images, which a tiny model may
    answer with, and for which transformers' classes want an image."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=0, ignore_eos=True, logprobs=1, bad_token_ids=[IMAGE_ID]
    )


def worst_difference(kind: str, prompt_ids: Sequence[int], images: Sequence[Image.Image], response: Response) -> float:
    """Return by how much the log-probabilities of the tokens of a `greedy` answer differ from transformers', given its
    images."""
    ids = response.token_ids
    assert response.logprobs is not None
    assert len(ids) > 1
    logits = shared_oracle(kind)([*prompt_ids, *ids], images)[len(prompt_ids) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    allowed = expected.index_fill(-1, torch.tensor([IMAGE_ID]), -torch.inf)
    assert allowed.argmax(-1).tolist() == ids, "another token is the likeliest"
    return max(
        abs(expected[index, token].item() - entry[token])
        for index, (token, entry) in enumerate(zip(ids, response.logprobs, strict=True))
    )
