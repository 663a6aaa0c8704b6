"""What the parity tests share: rows over paged caches, tiny models of each family and scaling, and their oracles."""

from __future__ import annotations

import atexit
import copy
import math
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.kernels import KVFormat
from asyncllm.layers.quantized_cache import quantized
from asyncllm.layers.rotary import ROPE_LENS
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import families
from tests.checkpoints import build_checkpoint, build_oracle, native_class, tiny_fields
from tests.remote_layouts import LAYOUTS

__all__ = [
    "COMMON_SCALINGS",
    "FAMILIES",
    "PROMPT",
    "SCALINGS",
    "TOKENS",
    "UNROTATED",
    "Case",
    "Row",
    "Runner",
    "hub_model",
    "open_case",
    "random_tokens",
    "reference",
    "scalings_of",
]

PROMPT = 80
TOKENS = 96
"""A sequence of the tests: a prompt, and 16 tokens decoded one by one. Longer than windows and original contexts."""

FAMILIES = sorted({each.__module__.rpartition(".")[2] for each in families().values()})

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope_short": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128},
    "longrope_long": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    "longrope_mscale": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "short_mscale": 0.7,
        "long_mscale": 1.3,
    },
}

DYNAMIC_MAX_POSITION = 32

COMMON_SCALINGS = [each for each in SCALINGS if each != "longrope_mscale"]
"""Without what the files of one family alone have."""

UNDER_ALL_SCALINGS = ("gemma2", "internlm2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")

SCALINGS_OF = {
    "deepseek_v2": ["default", "yarn_mscale"],
    "deepseek_v3": ["default", "yarn_mscale"],
    "deepseek_v32": ["default", "yarn_mscale"],
    **{family: COMMON_SCALINGS for family in UNDER_ALL_SCALINGS},
    "minicpm3": ["default", "longrope_long"],
    "phi": ["default", "dynamic"],
    "phi3": ["default", "longrope_short", "longrope_long"],
    "phimoe": ["default", "longrope_mscale"],
}
"""Families that are tested under more than their own rotary embedding. Others add what no scaling meets."""


UNROTATED = {
    *(
        "baichuan_13b",
        "bloom",
        "falcon_mamba",
        "falcon_rw",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "granite_4_dense",
        "jamba",
        "kimi_linear",
    ),
    *("mamba", "mamba2", "mpt", "zamba", "zamba2_plain"),
    "mpt_grouped",
    *("nemotron_h", "nemotron_h_experts", "nemotron_h_pattern", "openai_gpt", "opt", "opt_350m", "xglm"),
}
"""They know positions by other means."""

FIXED_ROTATION = {"codegen", "gptj"}
"""Their files have no entries for it."""

ATTENTION = {"falcon_rw": "sdpa"}
"""What transformers computes attention by, where that is not "eager": there it adds Falcon's ALiBi twice."""


OWN_LENGTH = {"qwen"}
"""Their tiny files say how long a context they were trained for."""

LEGACY_OF_THEIR_OWN = {"falcon", "mellum"}
"""Their first files have entries that transformers does not read, or would have."""


def scalings_of(family: str) -> list[str]:
    return SCALINGS_OF.get(family, ["default"])


@dataclass(frozen=True)
class Case:
    family: str
    scaling: str
    legacy: bool = False

    @property
    def head_dim(self) -> int:
        tiny = tiny_fields(self.family)
        return (
            tiny.get("qk_rope_head_dim")
            or tiny.get("head_dim")
            or tiny.get("kv_channels")
            or tiny["hidden_size"] // tiny["num_attention_heads"]
        )

    @property
    def overrides(self) -> dict[str, Any]:
        if self.family in UNROTATED | FIXED_ROTATION | OWN_LENGTH:
            return {}
        rope = dict(SCALINGS[self.scaling])
        if rope["rope_type"] == "longrope":
            half = self.head_dim // 2
            rope["short_factor"] = [1.0 + 0.1 * index for index in range(half)]
            # With these entries transformers takes the short factors whatever the length, unlike the model's own code.
            apart = "long_mscale" not in rope
            rope["long_factor"] = [1.5 + 0.4 * index for index in range(half)] if apart else rope["short_factor"]
        position = DYNAMIC_MAX_POSITION if self.scaling == "dynamic" else 256
        tiny, layout = tiny_fields(self.family), LAYOUTS.get(self.family)
        given = (
            "rope_parameters" in tiny
            or isinstance(tiny.get("rope_theta"), list)
            or (layout is not None and layout.rope is not None)
        )
        length = "seq_length" if "seq_length" in tiny else "max_position_embeddings"
        return {length: position} if given else {"rope_parameters": rope, length: position}

    @property
    def session_len(self) -> int | None:
        return 128 if self.scaling.startswith("longrope") else None


def random_tokens(seed: int, count: int = TOKENS) -> list[int]:
    return torch.randint(4, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def folder_of(case: Case) -> Path:
    """Built once per process and removed when it ends."""
    folder = Path(mkdtemp(prefix="asyncllm-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    family = LAYOUTS[case.family].family if case.family in LAYOUTS else case.family
    if family in ("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"):
        _take_delta_rule_by_token(family)
    return build_checkpoint(case.family, folder, legacy=case.legacy, **case.overrides)


def _take_delta_rule_by_token(family: str) -> None:
    """Of transformers' two forms of the gated delta rule, which differ by up to 4e-4 in these logits: that by chunks
    solves for all of a chunk at once, and rounds more."""
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    chunk, recurrent = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    if family in ("bailing_hybrid", "kimi_linear"):
        chunk, recurrent = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
    setattr(modeling, chunk, getattr(modeling, recurrent))


@cache
def oracle_folder_of(case: Case) -> Path:
    """The folder that transformers opens: for a layout that it does not know, the native model of the same weights."""
    if case.family not in LAYOUTS:
        return folder_of(replace(case, legacy=False) if case.family in LEGACY_OF_THEIR_OWN else case)
    folder = Path(mkdtemp(prefix="asyncllm-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    return build_oracle(case.family, folder, **case.overrides)


@cache
def open_case(case: Case) -> DecoderLM:
    return open_model(folder_of(case), dtype=torch.float32, device=torch.device("cpu"), session_len=case.session_len)


@cache
def _oracle(case: Case, prompt_len: int) -> Any:
    """The transformers model.

    Its dynamic scaling follows the call's length and the calls before it, so for that scaling the oracle is the
    unscaled model at the base of the prompt's length (NTK-aware formula, written out here).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = oracle_folder_of(case)
    config = AutoConfig.from_pretrained(folder)
    if case.scaling == "dynamic":
        rope = SCALINGS["dynamic"]
        growth = rope["factor"] * max(prompt_len, DYNAMIC_MAX_POSITION) / DYNAMIC_MAX_POSITION - (rope["factor"] - 1)
        dim = int(case.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        base = rope["rope_theta"] * growth ** (dim / (dim - 2))
        config.rope_parameters = {**config.rope_parameters, "rope_type": "default", "rope_theta": base}
    if case.family == "qwen":
        # By powers of two beyond the trained length, and at the base of the prompt too.
        growth = max(2 ** math.ceil(math.log2(prompt_len / 32) + 1) - 1, 1)
        base = 5000.0 * growth ** (case.head_dim / (case.head_dim - 2))
        config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    patch = LAYOUTS[case.family].patch if case.family in LAYOUTS else None
    if patch is not None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        patch(model)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval()
    return (
        native_class(config.model_type)
        .from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation=ATTENTION.get(case.family, "eager")
        )
        .eval()
    )


@cache
def _reference(case: Case, tokens: tuple[int, ...], prompt_len: int) -> Tensor:
    with torch.inference_mode():
        extra = LAYOUTS[case.family].call(list(tokens)) if case.family in LAYOUTS else {}
        return _oracle(case, prompt_len)(torch.tensor([tokens]), **extra).logits[0]


def reference(case: Case, tokens: list[int], prompt_len: int = PROMPT) -> Tensor:
    """Logits [len(tokens), vocab] of transformers, in one pass."""
    return _reference(case, tuple(tokens), prompt_len)


def hub_model(case: Case) -> Any:
    """A fresh copy of the transformers model with the checkpoint's own scaling."""
    from transformers import AutoModelForCausalLM

    return copy.deepcopy(
        AutoModelForCausalLM.from_pretrained(folder_of(case), dtype=torch.float32, attn_implementation="eager")
    ).eval()


@dataclass
class Row:
    """One sequence: its tokens, its blocks, how many tokens are computed, and the logits so far."""

    tokens: list[int]
    blocks: list[int]
    prompt_len: int = PROMPT
    computed: int = 0
    adapter_slot: int = -1
    logits: list[Tensor] = field(default_factory=list)

    @property
    def result(self) -> Tensor:
        return torch.cat(self.logits)


class Runner:
    """A model and its paged caches, which start full of garbage: no test may depend on what a fresh block holds."""

    def __init__(
        self,
        model: DecoderLM,
        block_size: int,
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
        form: KVFormat | None = None,
    ) -> None:
        """`form`: that of a quantized cache."""
        self.model, self.block_size = model, block_size
        # One block group: rows have one block table.
        specs = model.cache_specs if form is None else [quantized(spec, form) for spec in model.cache_specs]
        layout = CacheLayout(specs, block_size, dtype, longest=1)
        signs = torch.tensor([1e3, -1e3], dtype=dtype)
        self.caches = layout.caches(
            [
                signs.repeat(-(-part.planes // 2))[: part.planes]
                .view(-1, *(1 for _ in range(1 + len(part.shape))))
                .repeat(1, num_blocks, *part.shape)
                .to(part.dtype)
                for part in layout.parts
            ]
        )
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()

    def row(self, tokens: list[int], *, prompt_len: int = PROMPT, shared: list[int] | None = None) -> Row:
        """A row with blocks for all its tokens in random order; it starts after the shared blocks."""
        shared = shared or []
        needed = -(-len(tokens) // self.block_size) - len(shared)
        blocks = [self._free.pop() for _ in range(needed)]
        return Row(tokens, [*shared, *blocks], prompt_len, computed=len(shared) * self.block_size)

    def step(self, *chunks: tuple[Row, int]) -> None:
        """One forward pass over the next tokens of each row. Rows of one token are decode rows, and come first."""
        num_decode = sum(count == 1 for _, count in chunks)
        assert all(count == 1 for _, count in chunks[:num_decode])
        ids, positions, slots, offsets, lens = [], [], [], [0], []
        for row, count in chunks:
            for position in range(row.computed, row.computed + count):
                ids.append(row.tokens[position])
                positions.append(position)
                block = row.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            row.computed += count
            offsets.append(len(ids))
            lens.append(row.computed)
        width = max(len(row.blocks) for row, _ in chunks)
        tables = [row.blocks + [0] * (width - len(row.blocks)) for row, _ in chunks]
        asked = [column for column in self.model.step_columns if column.name == "adapter_slots"]
        adapter_slots = [row.adapter_slot for row, count in chunks for _ in range(count)]
        rope_lens = [row.prompt_len for row, count in chunks for _ in range(count)]
        inputs = StepInputs(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            places=torch.tensor(slots),
            num_decode=num_decode,
            q_offsets=torch.tensor(offsets, dtype=torch.int32),
            kv_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            max_q_len=max(count for _, count in chunks),
            caches=self.caches,
            prompts=[(count, row.computed) for row, count in chunks[num_decode:]],
            more={
                ROPE_LENS: torch.tensor(rope_lens),
                **dict.fromkeys(asked, torch.tensor(adapter_slots, dtype=torch.int32)),
            },
            adapted=max(adapter_slots) >= 0,
        )
        with torch.inference_mode():
            logits = self.model.logits(self.model(inputs))
        for (row, _), part in zip(chunks, logits.tensor_split(offsets[1:-1]), strict=True):
            row.logits.append(part)

    def decode(self, row: Row, until: int) -> None:
        while row.computed < until:
            self.step((row, 1))
