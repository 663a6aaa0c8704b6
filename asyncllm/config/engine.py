"""How a model is loaded and run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from asyncllm.config.lmdeploy_settings import ENGINES
from asyncllm.config.settings import MAX_COUNT, Settings
from asyncllm.config.unsupported import Unsupported
from asyncllm.errors import InvalidParameter, short

__all__ = ["SERVED_QUEUE", "EngineConfig", "PytorchEngineConfig", "TurbomindEngineConfig", "check_adapter_name"]

_MAX_ADAPTER_NAME = 256

SERVED_QUEUE: Mapping[str, int] = MappingProxyType({"max_queued_requests": 2048, "max_queued_tokens": 2**22})
"""Default queue bounds of `asyncllm serve`, whose clients may be untrusted: enough for 2,000 clients and about 150 MB
of prompts."""


class EngineConfig(Settings, frozen=True, kw_only=True):
    """How a model is loaded and run."""

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = ENGINES

    model_name: Annotated[str, Meta(description="Name the model is served under; empty: the folder's name.")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="Type of weights and activations; auto: float32 on CPU, the checkpoint's on a GPU."),
    ] = "auto"
    device_type: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs; auto: a GPU if there is one.")
    ] = "auto"
    tp: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of ranks that share the model's weights and KV cache; each is a child process with a "
            "GPU of its own.",
        ),
    ] = 1
    ep: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of ranks that share the experts of a mixture, each with whole experts; must equal tp. "
            "1: each rank holds some features of every expert.",
        ),
    ] = 1
    isolated: Annotated[
        bool,
        Meta(
            description="Run the model in a child process: an error that the device does not survive ends only that "
            "process, and the server starts another engine."
        ),
    ] = False
    cpu_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Number of threads of torch's operators for steps on a CPU; 0: as set by OMP_NUM_THREADS or "
            "torch.set_num_threads, else chosen by the model's size, the cores, their quota and the machine's load.",
        ),
    ] = 0
    session_len: Annotated[
        int | None,
        Meta(
            description="Maximum number of tokens of history, prompt and answer together; None: the model's own "
            "limit, which rotary positions may exceed, with worse answers. It also selects one of longrope's two sets "
            "of frequencies for all requests: the short one up to the original context (4096 for Phi-3, for example), "
            "the long one above."
        ),
    ] = None
    max_batch_size: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of running sequences.")] = 128
    max_prefill_token_num: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="Maximum number of prompt tokens computed in one step; fewer on a GPU while answers are "
            "streamed. Longer prompts are computed in chunks.",
        ),
    ] = 4096
    num_tokens_per_iter: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="TurboMind's name for max_prefill_token_num; 0: use that one.")
    ] = 0
    prefill_interval: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="Maximum number of decode steps between two steps with prompt tokens while prompts wait.",
        ),
    ] = 1
    vision_max_batch_size: Annotated[
        int, Meta(ge=1, le=4096, description="Maximum number of images that a vision tower encodes at once.")
    ] = 8
    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block; a multiple of 16 on a GPU.")] = 64
    cache_block_seq_len: Annotated[
        int | None, Meta(description="TurboMind's name for block_size; None: use that one.")
    ] = None
    cache_max_entry_count: Annotated[
        float, Meta(gt=0, description="Up to 1: fraction of free memory for KV blocks. Above 1: number of KV blocks.")
    ] = 0.8
    num_gpu_blocks: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="Number of KV blocks on the device; 0: set by cache_max_entry_count.")
    ] = 0
    num_cpu_blocks: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Number of KV blocks in host memory, for preempted sequences (eviction_type) and for blocks "
            "evicted from the device's prefix cache; 0: none, or with eviction_type copy as many as fit in a quarter "
            "of free memory, at most 8 GiB and at most as many as on the device.",
        ),
    ] = 0
    eviction_type: Annotated[
        Literal["recompute", "copy"],
        Meta(description="How a preempted sequence gets its KV back; copy: from host memory, if it fitted there."),
    ] = "recompute"
    max_queued_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Maximum number of requests that wait for a row; more are refused with QueueFull. 0: no "
            "limit, for programs that queue 10,000 prompts of their own. With qos_config_path, each user always has "
            "a share of the queue by quota.",
        ),
    ] = 0
    max_queued_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Maximum number of tokens of the requests that wait for a row; a request that finds the queue "
            "empty is never refused. 0: no limit.",
        ),
    ] = 0
    stall_timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Seconds without a completed step, while there is work, after which the engine dies "
            "(EngineDead); a command, such as sleep, may take ten times as long. 0: never. A long prompt may take "
            "minutes on a slow CPU; on a GPU, 60 is plenty. None: 120 with GPUs in other processes (tp, isolated), "
            "otherwise never."
        ),
    ] = None
    qos_config_path: Annotated[
        str | None,
        Meta(description="JSON file of user groups and quotas, in LMDeploy's format; None: all users are equal."),
    ] = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of shared prompt prefixes.")] = True
    enable_prompt_embeds: Annotated[
        bool,
        Meta(
            description="Take embeddings instead of tokens in prompts (input_embeddings, and prompt_embeds of "
            "/v1/completions). Embeddings of a wrong model give senseless answers, and a prompt takes its width times "
            "as much memory as token ids."
        ),
    ] = False
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Make a request's tokens independent of the batch, bit for bit; slower. On a CPU, products "
            "are computed row by row."
        ),
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="Format of the model's tool calls, by its name in vLLM, SGLang or LMDeploy; none: calls stay "
            "in the text. None: detected from the chat template."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(
            description="Format of the model's reasoning, by its name in those projects; none: it stays in the text. "
            "None: detected from the chat template."
        ),
    ] = None
    quant_policy: Annotated[
        Literal[0, 4, 8, 16, "fp8"],
        Meta(
            description="Type of keys and values in the cache. 0: the model's; 8: int8; 4: 5 bits for keys and 3 for "
            "values; fp8, or LMDeploy's 16: e4m3. Scales are per token and head."
        ),
    ] = 0
    model_format: Annotated[
        Literal[
            "hf",
            "awq",
            "gptq",
            "fp8",
            "smooth_quant",
            "compressed-tensors",
            "modelopt",
            "auto-round",
            "mxfp4",
            "bitsandbytes",
        ]
        | None,
        Meta(
            description="Quantization format of the checkpoint; None: as its config.json says; hf: not quantized. "
            "fp8 quantizes an unquantized checkpoint while loading it."
        ),
    ] = None
    rope_scaling_factor: Annotated[
        float, Meta(ge=0, description="Above 0: dynamic NTK scaling of the rotary base with this factor.")
    ] = 0.0
    use_logn_attn: Annotated[
        bool,
        Meta(description="Scale queries beyond the model's trained length by the logarithm of position to that base."),
    ] = False
    adapters: Annotated[
        dict[str, str] | None,
        Meta(
            description="LoRA adapters to load at start: name to PEFT folder or hub id. On the command line, a single "
            "adapter may be given without a name; it is called default."
        ),
    ] = None
    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Maximum number of adapters on the device at once; the others stay in host memory. 0: the "
            "number of adapters.",
        ),
    ] = 0
    max_lora_rank: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Maximum rank of an adapter, which determines the size of slots on the device. 0: the highest "
            "rank in adapters, or 16.",
        ),
    ] = 0
    lora_host_mb: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Host memory for adapters, in MiB. Adapters that do not fit are read from their folders "
            "again when they are requested. 0: a quarter of the memory free at start.",
        ),
    ] = 0
    plugin: Annotated[
        list[str] | None,
        Meta(description="Your own Python files that register model families. They are executed."),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None, Meta(description="Entries that override the checkpoint's config.json.")
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="Folder for models downloaded from the hub; None: the hub library's cache.")
    ] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a model from the hub.")] = None

    def __post_init__(self) -> None:
        for name in ("adapters", "qos_config_path", "plugin", "download_dir"):
            msgspec.structs.force_setattr(self, name, _as_text(getattr(self, name)))

    @classmethod
    def own_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        own = super().own_fields(fields)
        for name in ("max_batch_size", "model_name"):
            if name in own and own[name] is None:  # LMDeploy's default
                del own[name]
        return own

    @property
    def kv_format(self) -> str | None:
        """Format of keys and values in the cache: a name in `kernels.quantized_kv`; None: the model's dtype."""
        return {0: None, 4: "k5v3", 8: "int8", 16: "fp8", "fp8": "fp8"}[self.quant_policy]

    @property
    def tokens_per_block(self) -> int:
        """block_size, under either of its two names."""
        return self.cache_block_seq_len or self.block_size

    @property
    def prefill_budget(self) -> int:
        """max_prefill_token_num, under either of its two names."""
        return self.num_tokens_per_iter or self.max_prefill_token_num

    @property
    def num_adapter_slots(self) -> int:
        """Maximum number of adapters on the device at once."""
        return self.max_loras or len(self.adapters or {})

    @property
    def uses_host_blocks(self) -> bool:
        """Whether KV blocks may be in host memory."""
        return self.num_cpu_blocks > 0 or self.eviction_type == "copy"

    def _check(self) -> None:
        if self.session_len is not None and not 2 <= self.session_len <= MAX_COUNT:
            raise InvalidParameter(
                f"session_len must be None or in [2, {MAX_COUNT}] (given: {self.session_len}).", "session_len"
            )
        if self.cache_block_seq_len is not None and not 1 <= self.cache_block_seq_len <= 1024:
            raise InvalidParameter("cache_block_seq_len must be None or in [1, 1024].", "cache_block_seq_len")
        for name in ("cache_max_entry_count", "rope_scaling_factor", "stall_timeout"):
            if not math.isfinite(getattr(self, name) or 0):
                raise InvalidParameter(f"{name} must be a finite number.", name)
        if self.cache_max_entry_count > 1 and self.cache_max_entry_count != int(self.cache_max_entry_count):
            raise InvalidParameter(
                f"cache_max_entry_count above 1 is a number of blocks and must be whole "
                f"(given: {self.cache_max_entry_count}).",
                "cache_max_entry_count",
            )
        if self.num_cpu_blocks and self.eviction_type == "recompute" and not self.enable_prefix_caching:
            raise InvalidParameter(
                f"num_cpu_blocks={self.num_cpu_blocks} would never be used: eviction_type='recompute' swaps nothing, "
                f"and without a prefix cache nothing else is kept. Use eviction_type='copy' or num_cpu_blocks=0.",
                "num_cpu_blocks",
            )
        if self.ep not in (1, self.tp):
            raise InvalidParameter(
                f"ep is {self.ep} and tp is {self.tp}, but the same ranks divide the experts and everything else. "
                f"Use tp={self.ep}, or leave ep out.",
                "ep",
            )
        for adapter in self.adapters or {}:
            check_adapter_name(adapter, "adapters")
        if self.max_lora_rank and not self.num_adapter_slots:
            raise InvalidParameter("max_lora_rank is for adapters: set adapters or max_loras too.", "max_lora_rank")
        if self.lora_host_mb and not self.num_adapter_slots:
            raise InvalidParameter("lora_host_mb is for adapters: set adapters or max_loras too.", "lora_host_mb")
        if 0 < self.rope_scaling_factor < 1:
            raise InvalidParameter("rope_scaling_factor must be 0 (off) or at least 1.", "rope_scaling_factor")


def _as_text(value: Any) -> Any:
    """Return a setting with texts in place of pathlib's paths."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {name: _as_text(each) for name, each in value.items()}
    return [_as_text(each) for each in value] if isinstance(value, list) else value


def check_adapter_name(name: Any, param: str) -> None:
    """Raise InvalidParameter unless `name` can be the name of an adapter."""
    if not isinstance(name, str) or not name.strip() or len(name) > _MAX_ADAPTER_NAME or not name.isprintable():
        raise InvalidParameter(
            f"The name of an adapter is a text of 1 to {_MAX_ADAPTER_NAME} printable characters, not {short(name)}.",
            param,
        )


PytorchEngineConfig = EngineConfig
"""LMDeploy's name."""
TurbomindEngineConfig = EngineConfig
"""LMDeploy's name."""
