"""GET /server_info and /model_info: sizes and capabilities of the engine and its model, in SGLang's format."""

from __future__ import annotations

import msgspec
from aiohttp import web

from asyncllm import __version__
from asyncllm.server.http.responses import json_response
from asyncllm.server.service import service_of

__all__ = ["ModelInformation", "ServerInformation", "model_info", "server_info"]


class InternalState(msgspec.Struct, kw_only=True):
    """The engine's current contents."""

    running: int
    """Sequences in the batch."""
    waiting: int
    """Sequences in the queue."""
    token_usage: float
    """Fraction of the KV cache that running sequences hold."""
    cache_hit_rate: float
    """Fraction of prompt tokens that came from the prefix cache."""


class ServerInformation(msgspec.Struct, kw_only=True):
    """The body of /server_info."""

    version: str
    """asyncllm's version."""
    status: str
    """ready, paused or sleeping."""
    model_path: str
    """The model's name. Folders of the server are not shown."""
    served_model_name: str
    context_length: int
    """Maximum number of tokens of history, prompt and answer together."""
    max_req_input_len: int
    """Maximum number of tokens of a prompt."""
    max_total_num_tokens: int
    """Tokens in the KV cache."""
    max_running_requests: int
    """Maximum number of running sequences."""
    chunked_prefill_size: int
    """Maximum number of prompt tokens in a step."""
    page_size: int
    """Tokens per KV block."""
    tp_size: int
    """Number of ranks."""
    dtype: str
    device: str
    disable_radix_cache: bool
    """Whether prompts share no cached prefixes."""
    weight_version: str
    """Number of weight updates since the start."""
    internal_states: list[InternalState]


class ModelInformation(msgspec.Struct, kw_only=True):
    """The body of /model_info."""

    model_path: str
    """The model's name. Folders of the server are not shown."""
    tokenizer_path: str
    """The same."""
    is_generation: bool
    """Whether the model generates text. Others compute embeddings or scores."""
    preferred_sampling_params: None = None
    """The server's defaults apply to requests that name none."""
    weight_version: str
    """Number of weight updates since the start."""
    has_image_understanding: bool
    has_audio_understanding: bool = False
    architectures: list[str]


async def server_info(request: web.Request) -> web.Response:
    """Return the sizes of the engine and its current contents, by SGLang's names."""
    engine = service_of(request).engine
    stats, limits, config = engine.stats(), engine.limits, engine.config
    state = InternalState(
        running=stats.running,
        waiting=stats.waiting,
        token_usage=stats.blocks_held / stats.blocks_total,
        cache_hit_rate=stats.prefix_hit_rate,
    )
    return json_response(
        ServerInformation(
            version=__version__,
            status="sleeping" if stats.sleep_level else "paused" if engine.paused else "ready",
            model_path=engine.model_name,
            served_model_name=engine.model_name,
            context_length=engine.session_len,
            max_req_input_len=engine.session_len - 1,
            max_total_num_tokens=limits.num_blocks * limits.block_size,
            max_running_requests=min(config.max_batch_size, limits.num_slots),
            chunked_prefill_size=config.prefill_budget,
            page_size=limits.block_size,
            tp_size=config.tp,
            dtype=limits.dtype,
            device=limits.device,
            disable_radix_cache=not config.enable_prefix_caching,
            weight_version=str(stats.weight_updates),
            internal_states=[state],
        )
    )


async def model_info(request: web.Request) -> web.Response:
    """Return what the model can do, by SGLang's names."""
    engine = service_of(request).engine
    limits = engine.limits
    return json_response(
        ModelInformation(
            model_path=engine.model_name,
            tokenizer_path=engine.model_name,
            is_generation=limits.has_head,
            weight_version=str(engine.stats().weight_updates),
            has_image_understanding=limits.takes_images,
            architectures=[limits.architecture],
        )
    )
