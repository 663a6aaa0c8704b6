"""The bodies of the routes that are not OpenAI's: LMDeploy's /generate, /v1/chat/interactive and /v1/encode, vLLM's
/tokenize and /detokenize. Their fields have the policies of `requests`, and its `REFUSED`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from asyncllm.config import MAX_COUNT
from asyncllm.server.requests import Body, Drawn, NewTokens, Variables

__all__ = ["DetokenizeRequest", "EncodeRequest", "GenerateRequest", "InteractiveRequest", "TokenizeRequest"]


class Generating(Drawn, kw_only=True):
    """What the two routes that generate have in common."""

    stream: bool = False
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    spaces_between_special_tokens: Any = None


class GenerateRequest(Generating, kw_only=True):
    """The body of POST /generate. What sampling it leaves out is as for /v1/completions."""

    prompt: str | None = None
    input_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    """Instead of `prompt`."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """A label, as in requests.Sampled."""
    max_tokens: NewTokens | None = None
    return_logprob: bool | None = None
    image_data: Any = None
    return_routed_experts: Any = None
    repetition_ngram_size: Any = None
    repetition_ngram_threshold: Any = None
    with_cache: Any = None
    preserve_cache: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None


class InteractiveRequest(Generating, kw_only=True):
    """The body of POST /v1/chat/interactive. What sampling it leaves out is as in LMDeploy."""

    prompt: str | list[dict[str, Any]] = ""
    """A text, or messages; only what is new. Empty with `interactive_mode: false`: the session ends."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = -1
    """-1: none."""
    interactive_mode: bool = False
    """Keep the conversation for the next request of the same session_id."""
    step: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """Go on after so many tokens of the history; 0: after all of them."""
    cancel: bool = False
    """Stop what runs under session_id; the conversation stays."""
    request_output_len: NewTokens | None = None
    image_url: Any = None
    adapter_name: Any = None


class TokenizeRequest(Body, kw_only=True):
    """The body of POST /tokenize: a text that is encoded as it is, or messages as a chat would encode them."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """false: leave out what the tokenizer puts in front."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    chat_template: Any = None
    tools: Any = None
    mm_processor_kwargs: Any = None


class DetokenizeRequest(Body, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]


class EncodeRequest(Body, kw_only=True):
    """The body of POST /v1/encode."""

    input: str | list[str]
    do_preprocess: bool = False
    """Encode each text as a user's message."""
    add_bos: bool = True
