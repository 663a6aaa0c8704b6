"""How a model is loaded and run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from asyncllm.config.lmdeploy_settings import ENGINES
from asyncllm.config.neutral import Neutral
from asyncllm.config.settings import MAX_COUNT, Settings
from asyncllm.errors import InvalidParameter, short

__all__ = ["SERVED_QUEUE", "EngineConfig", "PytorchEngineConfig", "TurbomindEngineConfig", "check_adapter_name"]

_MAX_ADAPTER_NAME = 256

SERVED_QUEUE: Mapping[str, int] = MappingProxyType({"max_queued_requests": 2048, "max_queued_tokens": 2**22})
"""Bounds of the queue of `asyncllm serve`, whose clients may be strangers: room for 2,000 clients, and about 150 MB of
prompts."""


class EngineConfig(Settings, frozen=True, kw_only=True):
    """How a model is loaded and run."""

    NEUTRAL: ClassVar[Mapping[str, Neutral]] = ENGINES

    model_name: Annotated[str, Meta(description="Name under which the model answers; empty: the folder's name.")] = ""
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
            description="Ranks among which the model's weights and KV cache are divided, a child process for each, on "
            "a GPU of its own.",
        ),
    ] = 1
    ep: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Ranks among which the experts of a mixture are divided, whole ones to each: as many as tp. 1: "
            "each rank has some features of every expert.",
        ),
    ] = 1
    isolated: Annotated[
        bool,
        Meta(
            description="Run the model in a child process: what the device does not survive ends that process alone, "
            "and the server starts another engine in place."
        ),
    ] = False
    cpu_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Threads of torch's operators in the thread that runs the steps on a CPU; 0: what "
            "OMP_NUM_THREADS or torch.set_num_threads say, else by the model's size, the cores, their quota and the "
            "machine's load.",
        ),
    ] = 0
    session_len: Annotated[
        int | None,
        Meta(
            description="Most tokens of prompt, history and answer together; None: the model's own limit. It also "
            "chooses between longrope's two sets of frequencies, for all requests: the short one up to the context "
            "before extension (4096, say, of Phi-3), the long one above."
        ),
    ] = None
    max_batch_size: Annotated[int, Meta(ge=1, le=4096, description="Most sequences that run at once.")] = 128
    max_prefill_token_num: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="Most prompt tokens computed in one step, on a GPU fewer beside streamed answers; longer "
            "prompts go in chunks.",
        ),
    ] = 4096
    num_tokens_per_iter: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="TurboMind's name of max_prefill_token_num; 0: take that one.")
    ] = 0
    prefill_interval: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="Most decode steps between two steps that take in prompt tokens while prompts wait.",
        ),
    ] = 1
    vision_max_batch_size: Annotated[
        int, Meta(ge=1, le=4096, description="Most images that a vision-language model's tower encodes at once.")
    ] = 8
    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block; a multiple of 16 on a GPU.")] = 64
    cache_block_seq_len: Annotated[
        int | None, Meta(description="TurboMind's name of block_size; None: take that one.")
    ] = None
    cache_max_entry_count: Annotated[
        float, Meta(gt=0, description="Up to 1: fraction of the free memory for KV blocks. Above: number of blocks.")
    ] = 0.8
    num_gpu_blocks: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="KV blocks on the device; 0: by cache_max_entry_count.")
    ] = 0
    num_cpu_blocks: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="KV blocks in host memory, for preempted sequences (eviction_type) and for what the prefix "
            "cache has no room for on the device; 0: none, or with eviction_type copy as many as a quarter of the free "
            "memory holds, at most 8 GiB and at most as many as on the device.",
        ),
    ] = 0
    eviction_type: Annotated[
        Literal["recompute", "copy"],
        Meta(description="How the KV of a preempted sequence comes back; copy: from host memory, if it found room."),
    ] = "recompute"
    max_queued_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Most requests that wait for a row; more are refused with QueueFull. 0: no bound, as a program "
            "that queues 10,000 prompts of its own wants it. With qos_config_path, each "
            "user has the part of its quota in any case.",
        ),
    ] = 0
    max_queued_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Most tokens of the requests that wait for a row; one that finds no other there is never "
            "refused. 0: no bound.",
        ),
    ] = 0
    stall_timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Seconds without a completed step, while there is work, after which the engine ends as "
            "EngineDead; a command, such as sleep, may take ten times as long. 0: never, as a long prompt may take "
            "minutes on a slow CPU; on a GPU, 60 is plenty. None: 120 with GPUs in other processes (tp, isolated), "
            "else never."
        ),
    ] = None
    qos_config_path: Annotated[
        str | None,
        Meta(description="JSON file of user groups and quotas, LMDeploy's format; None: all users are served alike."),
    ] = None
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of equal prompt beginnings.")] = True
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Give a request the same tokens alone and in any batch, to the last bit; slower. On a CPU "
            "products are taken row by row."
        ),
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="Format of the model's calls of tools, under a name of vLLM's, SGLang's or LMDeploy's; none: "
            "calls are text. None: by the chat template."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(
            description="Format of the model's reasoning, under a name of theirs; none: it stays in the text. None: by "
            "the chat template."
        ),
    ] = None
    quant_policy: Annotated[
        Literal[0, 4, 8, 16, "fp8"],
        Meta(
            description="Type of keys and values in the cache. 0: the model's; 8: int8; 4: 5 bits of keys and 3 of "
            "values; fp8, or LMDeploy's 16: e4m3. Each is rounded per token and head."
        ),
    ] = 0
    model_format: Annotated[
        Literal["hf", "awq", "gptq", "fp8", "smooth_quant", "compressed-tensors", "modelopt", "auto-round", "mxfp4"]
        | None,
        Meta(
            description="How the checkpoint's weights are quantized; None: as its config.json says, hf: not at all. "
            "fp8 rounds those of a plain checkpoint as they are read."
        ),
    ] = None
    rope_scaling_factor: Annotated[
        float, Meta(ge=0, description="Above 0: dynamic NTK scaling of the rotary base with this factor.")
    ] = 0.0
    use_logn_attn: Annotated[
        bool,
        Meta(description="Queries behind the model's trained length are scaled by the logarithm of their place to it."),
    ] = False
    adapters: Annotated[
        dict[str, str] | None,
        Meta(
            description="LoRA adapters that are loaded at start: name to a folder of PEFT's, or a hub id. On a command "
            "line one of them alone may come without a name: default."
        ),
    ] = None
    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Adapters that are on the device at a time; the others wait in host memory. 0: as many as "
            "adapters.",
        ),
    ] = 0
    max_lora_rank: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Highest rank of an adapter, which slots on the device are made for. 0: the highest of "
            "adapters, or 16.",
        ),
    ] = 0
    lora_host_mb: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="MiB of host memory for adapters. Those that find no room there are read from their folders "
            "again when they are asked for. 0: a quarter of what is free at start.",
        ),
    ] = 0
    plugin: Annotated[
        list[str] | None,
        Meta(description="Python files of your own that register families of models. They are run."),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None, Meta(description="Entries that replace those of the checkpoint's config.json.")
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="Where models from the hub are kept; None: the hub library's cache.")
    ] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a model from the hub.")] = None

    @classmethod
    def own_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        own = super().own_fields(fields)
        for name in ("max_batch_size", "model_name"):
            if name in own and own[name] is None:  # LMDeploy's default
                del own[name]
        return own

    @property
    def kv_format(self) -> str | None:
        """Format of keys and values in the cache: a name of `kernels.quantized_kv`; None: the model's type."""
        return {0: None, 4: "k5v3", 8: "int8", 16: "fp8", "fp8": "fp8"}[self.quant_policy]

    @property
    def tokens_per_block(self) -> int:
        """block_size, under whichever of its two names it was given."""
        return self.cache_block_seq_len or self.block_size

    @property
    def prefill_budget(self) -> int:
        """max_prefill_token_num, under whichever of its two names it was given."""
        return self.num_tokens_per_iter or self.max_prefill_token_num

    @property
    def num_adapter_slots(self) -> int:
        """Most adapters on the device at a time."""
        return self.max_loras or len(self.adapters or {})

    @property
    def uses_host_blocks(self) -> bool:
        """Whether KV blocks may lie in host memory."""
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
                f"ep is {self.ep} and tp {self.tp}: the ranks that divide the experts are those that divide the rest. "
                f"Use tp={self.ep}, or leave ep out.",
                "ep",
            )
        for adapter in self.adapters or {}:
            check_adapter_name(adapter, "adapters")
        if self.model_name and self.model_name in (self.adapters or {}):
            raise InvalidParameter(
                f"adapters name one {self.model_name!r}, which is the model's own name. Choose another.", "adapters"
            )
        if self.max_lora_rank and not self.num_adapter_slots:
            raise InvalidParameter("max_lora_rank is for adapters: set adapters or max_loras too.", "max_lora_rank")
        if self.lora_host_mb and not self.num_adapter_slots:
            raise InvalidParameter("lora_host_mb is for adapters: set adapters or max_loras too.", "lora_host_mb")
        if 0 < self.rope_scaling_factor < 1:
            raise InvalidParameter("rope_scaling_factor must be 0 (off) or at least 1.", "rope_scaling_factor")


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
