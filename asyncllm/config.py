"""Every setting, written once: name, type, bounds, default and description.

Command-line flags (`flags.py`), `--help` and the documentation derive from these Structs. Constructors do not
validate, as in msgspec; whoever takes a config calls `checked()` on it, which does.
"""

from __future__ import annotations

import math
import re
import reprlib
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from asyncllm.errors import InvalidParameter, UnsupportedFeature

__all__ = [
    "ChatTemplateConfig",
    "EngineConfig",
    "GenerationConfig",
    "PytorchEngineConfig",
    "TurbomindEngineConfig",
]

Capability = Literal["completion", "chat", "infilling", "python"]

MAX_LOGPROBS = 20
MAX_STOP_WORDS = 64
MAX_LOGIT_BIAS = 512
MAX_CHOICES = 128
MAX_COUNT = 2**31 - 1


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A validated, immutable group of settings."""

    def checked(self) -> Self:
        """Return this config if every field holds, else raise InvalidParameter or UnsupportedFeature."""
        fields = msgspec.structs.asdict(self)
        checked = self.from_dict(fields)
        checked._check()
        return checked

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Build from plain data. Raises InvalidParameter for unknown fields, wrong types and values out of range."""
        for name in fields:
            if name not in cls.__struct_fields__:
                known = ", ".join(sorted(cls.__struct_fields__))
                raise InvalidParameter(f"{cls.__name__} has no field {name!r}. Its fields are: {known}.", name)
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            found = re.search(r"\$\.(\w+)", where)
            param = found[1] if found else None
            given = f" (given: {reprlib.repr(fields[param])})" if param in fields else ""
            raise InvalidParameter(f"{cls.__name__}.{param}: {what}{given}.", param) from None

    def _check(self) -> None:
        """Rules across fields."""


class GenerationConfig(_Config, frozen=True, kw_only=True):
    """How an answer is generated. The default is greedy, as top_k is 1."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Answers per prompt; they share the prompt's blocks.")] = 1
    max_new_tokens: Annotated[
        int | None, Meta(description="Most tokens to generate; None: as many as the session length allows.")
    ] = 512
    min_new_tokens: Annotated[
        int | None, Meta(description="Stop tokens cannot be sampled before this many tokens are there.")
    ] = None
    top_p: Annotated[float, Meta(ge=0, le=1, description="Keep the smallest set of tokens with this probability.")] = (
        1.0
    )
    top_k: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="Keep the k most likely tokens; 0: all; 1: greedy.")] = 1
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="Drop tokens below this fraction of the most likely one's probability.")
    ] = 0.0
    temperature: Annotated[float, Meta(ge=0, le=2, description="Divides the logits; 0: greedy.")] = 0.8
    repetition_penalty: Annotated[
        float, Meta(gt=0, le=10, description="Above 1 makes tokens of prompt and answer less likely.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted from the logits of tokens that the answer holds.")
    ] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2, description="Subtracted per occurrence in the answer.")] = 0.0
    logit_bias: Annotated[
        dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None,
        Meta(description="Token id -> value in [-100, 100] added to its logit."),
    ] = None
    ignore_eos: Annotated[bool, Meta(description="Go on after the end-of-sequence token.")] = False
    random_seed: Annotated[
        int | None, Meta(description="Same seed and prompt, same answer. None: drawn anew for each request.")
    ] = None
    stop_words: Annotated[
        list[str] | None, Meta(description="Texts that end the answer and are cut from it; of any length.")
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Token ids that end the answer.")] = None
    bad_words: Annotated[list[str] | None, Meta(description="Texts that are not generated; of any length.")] = None
    bad_token_ids: Annotated[list[int] | None, Meta(description="Token ids that are not generated.")] = None
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Keep the stop word that ended the answer in its text.")
    ] = False
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    logprobs: Annotated[
        int | None,
        Meta(description=f"Log-probabilities of the chosen and of the N most likely tokens, 0 to {MAX_LOGPROBS}."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, Meta(description=f"The same for the tokens of the prompt, 0 to {MAX_LOGPROBS}.")
    ] = None
    response_format: Annotated[dict[str, Any] | None, Meta(description="Not implemented yet; refused.")] = None

    def _check(self) -> None:
        if self.response_format is not None:
            raise UnsupportedFeature(
                "response_format is not implemented yet: answers cannot be held to a grammar. "
                "Leave it out and check the answer yourself.",
                "response_format",
            )
        self._bound("max_new_tokens", self.max_new_tokens, 1, MAX_COUNT)
        self._bound("min_new_tokens", self.min_new_tokens, 0, MAX_COUNT)
        self._bound("random_seed", self.random_seed, -(2**63), 2**64 - 1)
        self._bound("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._bound("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise InvalidParameter(
                f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens}).",
                "min_new_tokens",
            )
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name) or []
            if len(words) > MAX_STOP_WORDS:
                raise InvalidParameter(f"{name} takes at most {MAX_STOP_WORDS} words, {len(words)} were given.", name)
            if any(not word for word in words):
                raise InvalidParameter(f"{name} holds an empty text, which every answer contains. Remove it.", name)
        if self.logit_bias is not None and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens.", "logit_bias")

    @staticmethod
    def _bound(name: str, value: int | None, low: int, high: int) -> None:
        if value is not None and not low <= value <= high:
            raise InvalidParameter(f"{name} must be None or in [{low}, {high}] (given: {value}).", name)


class EngineConfig(_Config, frozen=True, kw_only=True):
    """How a model is loaded and run."""

    model_name: Annotated[str, Meta(description="Name under which the model answers; empty: the folder's name.")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="Type of weights and activations; auto: float32 on CPU, the checkpoint's on a GPU."),
    ] = "auto"
    device_type: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs; auto: a GPU if there is one.")
    ] = "auto"
    tp: Annotated[int, Meta(ge=1, description="Tensor-parallel ranks; only 1 so far.")] = 1
    session_len: Annotated[
        int | None, Meta(description="Most tokens of prompt, history and answer together; None: the model's own limit.")
    ] = None
    max_batch_size: Annotated[int, Meta(ge=1, le=4096, description="Most sequences that run at once.")] = 128
    max_prefill_token_num: Annotated[
        int,
        Meta(ge=1, le=MAX_COUNT, description="Most prompt tokens computed in one step; longer prompts go in chunks."),
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
    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block.")] = 64
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
    enable_prefix_caching: Annotated[bool, Meta(description="Reuse the KV blocks of equal prompt beginnings.")] = True
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Give a request the same tokens alone and in any batch, whatever is rounded; slower, GPU only."
        ),
    ] = False
    quant_policy: Annotated[
        Literal[0, 4, 8], Meta(description="Bits of a quantized KV cache; 0: not quantized, the only one so far.")
    ] = 0
    model_format: Annotated[
        Literal["hf", "awq", "gptq", "fp8"] | None, Meta(description="Layout of the checkpoint; only hf so far.")
    ] = None
    rope_scaling_factor: Annotated[
        float, Meta(ge=0, description="Above 0: dynamic NTK scaling of the rotary base with this factor.")
    ] = 0.0
    use_logn_attn: Annotated[bool, Meta(description="Log-n attention scaling; not implemented, refused.")] = False
    adapters: Annotated[
        dict[str, str] | None, Meta(description="LoRA adapters, name to path; not implemented, refused.")
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None, Meta(description="Entries that replace those of the checkpoint's config.json.")
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="Where models from the hub are kept; None: the hub library's cache.")
    ] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a model from the hub.")] = None

    @property
    def tokens_per_block(self) -> int:
        """block_size, under whichever of its two names it was given."""
        return self.cache_block_seq_len or self.block_size

    @property
    def prefill_budget(self) -> int:
        """max_prefill_token_num, under whichever of its two names it was given."""
        return self.num_tokens_per_iter or self.max_prefill_token_num

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
        for name in ("cache_max_entry_count", "rope_scaling_factor"):
            if not math.isfinite(getattr(self, name)):
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
        if 0 < self.rope_scaling_factor < 1:
            raise InvalidParameter("rope_scaling_factor must be 0 (off) or at least 1.", "rope_scaling_factor")
        refused = {
            "tp": (self.tp > 1, "tensor parallelism", "1"),
            "quant_policy": (self.quant_policy != 0, "a quantized KV cache", "0"),
            "model_format": (self.model_format not in (None, "hf"), "quantized weights", "'hf'"),
            "use_logn_attn": (self.use_logn_attn, "log-n attention", "False"),
            "adapters": (bool(self.adapters), "LoRA", "None"),
        }
        for name, (asked, what, instead) in refused.items():
            if asked:
                raise UnsupportedFeature(f"{name}: {what} is not implemented yet. Use {name}={instead}.", name)


PytorchEngineConfig = EngineConfig
"""LMDeploy's name."""
TurbomindEngineConfig = EngineConfig
"""LMDeploy's name."""


class ChatTemplateConfig(_Config, frozen=True):
    """Which chat template to use, and which of its parts to replace.

    A built-in template composes a conversation as `system + meta_instruction + eosys`, then for each turn
    `user + text + eoh`, `assistant + text + eoa`, with `separator` between turns.
    """

    model_name: Annotated[
        str | None, Meta(description="Name of a built-in or registered template (`asyncllm list`).")
    ] = None
    model_path: Annotated[str | None, Meta(description="Folder whose Jinja template to use.")] = None
    system: Annotated[str | None, Meta(description="Before the system text.")] = None
    meta_instruction: Annotated[str | None, Meta(description="System text when the conversation has none.")] = None
    eosys: Annotated[str | None, Meta(description="After the system text.")] = None
    user: Annotated[str | None, Meta(description="Before what the user says.")] = None
    eoh: Annotated[str | None, Meta(description="After what the user says.")] = None
    assistant: Annotated[str | None, Meta(description="Before what the assistant says.")] = None
    eoa: Annotated[str | None, Meta(description="After what the assistant says.")] = None
    separator: Annotated[str | None, Meta(description="Between two turns.")] = None
    capability: Annotated[
        Capability | None, Meta(description="What the model can do: completion, chat, infilling or python.")
    ] = None
    stop_words: Annotated[list[str] | None, Meta(description="Texts that end an answer.")] = None
    chat_template: Annotated[str | None, Meta(description="A Jinja template in place of the checkpoint's.")] = None

    def to_json(self, file_path: str | None = None) -> str:
        """The set fields as JSON; also written to `file_path` if given."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        text = msgspec.json.format(msgspec.json.encode(fields)).decode()
        if file_path is not None:
            with open(file_path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    @classmethod
    def from_json(cls, file_or_text: str) -> ChatTemplateConfig:
        """Read a JSON file, or JSON text. Raises InvalidParameter when it is neither or does not hold."""
        text = file_or_text
        if not file_or_text.lstrip().startswith("{"):
            try:
                with open(file_or_text, encoding="utf-8") as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidParameter(
                    f"Cannot read the chat template file {file_or_text!r} ({type(error).__name__}). "
                    f"Give the path of a JSON file, or JSON text that begins with '{{'."
                ) from None
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidParameter(f"The chat template is not a JSON object: {error}.") from None
        return cls.from_dict(fields).checked()
