"""CogVLM: transformers' Llama with two weights in each of its products, behind the tower in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.published.eva import PATCH, SIDE, TOWER, WIDTH, Eva, shared_positions, squeezed
from tests.vl.published.model import PublishedModel
from tests.vl.tiny_parts import IMAGE_ID, TEXT

__all__ = ["CogVLM", "CogVLM2"]

_TEXT = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads", "pad_token_id")}


class _Typed(nn.Module):
    """Rows of images have a weight of their own. Which these are is written ahead of a call."""

    def __init__(self, plain: nn.Linear, bias: bool) -> None:
        super().__init__()
        self.language = plain
        self.vision = nn.Linear(plain.in_features, plain.out_features, bias=bias)
        self.seen = torch.zeros(0, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.seen[:, None], self.vision(x), self.language(x))


class CogVLM(PublishedModel):
    architecture = "CogVLMForCausalLM"
    oracle = "`LlamaForCausalLM` with two weights in each product; the tower in plain torch"
    groups: int | None = None
    fields: dict[str, Any] = {
        **_TEXT,
        "model_type": "cogvlm",
        "hidden_act": "silu",
        "pad_token_id": IMAGE_ID,
        "rms_norm_eps": 1e-5,
        "template_version": "chat",
        "vision_config": TOWER,
    }
    tokens = ["<|reserved|>"]
    length = (SIDE // PATCH) ** 2 + 2

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        second = self.groups is not None
        theta = {"rope_type": "default", "rope_theta": 500000.0 if second else 10000.0}
        heads = self.groups or _TEXT["num_attention_heads"]
        config = LlamaConfig(**_TEXT, num_key_value_heads=heads, rope_parameters=theta, rms_norm_eps=1e-5)
        self.decoder = LlamaForCausalLM(config)
        self.typed: list[_Typed] = []
        for layer in self.decoder.model.layers:
            for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
                for name in names:
                    typed = _Typed(getattr(part, f"{name}_proj"), bias=second and name in "qkv")
                    setattr(part, f"{name}_proj", typed)
                    self.typed.append(typed)
        self.vision = Eva(32, TEXT["intermediate_size"], folded=WIDTH if second else None, divisor=1)

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, tensor in state.items():
            if name.startswith("vision."):
                found[f"model.{name}"] = tensor
                continue
            name = name.removeprefix("decoder.")
            for kind in ("language", "vision"):
                name = name.replace(f"o_proj.{kind}", f"{kind}_expert_dense")
                if f"q_proj.{kind}" in name:
                    own = f"decoder.{name}"
                    tensor = torch.cat([state[own.replace("q_proj", f"{part}_proj")] for part in "qkv"])
                name = name.replace(f"q_proj.{kind}", f"{kind}_expert_query_key_value")
                if f".{kind}." in name and ".mlp." in name:
                    name = name.replace(f".{kind}.", ".").replace(".mlp.", f".mlp.{kind}_mlp.")
            if "k_proj" not in name and "v_proj" not in name:
                found[name] = tensor
        return found

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        return squeezed(image)[None].numpy()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        found: Tensor = self.vision(torch.stack([squeezed(image) for image in images]))
        return found.flatten(0, 1)

    def positions(self, shown: Sequence[bool]) -> Tensor:
        return shared_positions(shown, self.length)

    def type_tokens(self, shown: Sequence[bool]) -> None:
        seen, inside = [], 0
        for image in shown:
            inside = (inside + 1) % self.length if image else 0
            # The last feature of an image is computed as text.
            seen.append(image and inside != 0)
        for typed in self.typed:
            typed.seen = torch.tensor(seen)


class CogVLM2(CogVLM):
    groups = 1
    fields = {**CogVLM.fields, "num_multi_query_heads": 1}
    length = (SIDE // PATCH // 2) ** 2 + 2
