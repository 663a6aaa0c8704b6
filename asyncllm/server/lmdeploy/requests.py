"""The bodies of the routes that are not OpenAI's: LMDeploy's /generate, /v1/chat/interactive, /v1/encode and
/get_ppl, vLLM's /tokenize and /detokenize. Other names are looked up in the table of `neutral`, as for those."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from asyncllm.config import MAX_COUNT, Tools
from asyncllm.server.request.fields import (
    MAX_MESSAGES,
    Body,
    ImageOptions,
    ImageUrls,
    NewTokens,
    PolicyFields,
    SamplingFields,
    Variables,
)

__all__ = [
    "DetokenizeRequest",
    "EncodeRequest",
    "GenerateRequest",
    "InteractiveRequest",
    "PerplexityRequest",
    "TokenizeRequest",
]


class LMDeployFields(SamplingFields, kw_only=True):
    """The common fields of the two routes that generate."""

    stream: bool = False
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None


class GenerateRequest(LMDeployFields, kw_only=True):
    """The body of POST /generate. What sampling it leaves out is as for /v1/completions."""

    prompt: str | None = None
    input_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    """Instead of `prompt`."""
    image_data: ImageUrls = None
    """URLs of the images that the prompt's text goes with, in front of it unless it has IMAGE_TOKENs."""
    mm_processor_kwargs: ImageOptions | None = None
    """How images are prepared: min_pixels, max_pixels, max_dynamic_patch, detail."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """A label, as in requests.OpenAIFields."""
    max_tokens: NewTokens | None = None
    return_logprob: bool | None = None


class InteractiveRequest(LMDeployFields, kw_only=True):
    """The body of POST /v1/chat/interactive. What sampling it leaves out is as in LMDeploy."""

    prompt: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | str = ""
    """A text, or messages; only what is new. Empty with `interactive_mode: false`: the session ends."""
    image_url: ImageUrls = None
    """URLs of the images that a prompt of text goes with; those of messages are among their parts."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = -1
    """-1: none."""
    interactive_mode: bool = False
    """Keep the conversation for the next request of the same session_id."""
    step: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """Go on after so many tokens of the history; 0: after all of them."""
    cancel: bool = False
    """Stop what runs under session_id; the conversation stays."""
    request_output_len: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """Most new tokens. LMDeploy's client sends 0 to end a session."""
    mm_processor_kwargs: ImageOptions | None = None
    """How images are prepared: min_pixels, max_pixels, max_dynamic_patch, detail."""
    adapter_name: str | None = None
    """The adapter that the turn is for, as `model` names it on all routes."""


class TokenizeRequest(Body, kw_only=True):
    """The body of POST /tokenize: a text that is encoded as it is, or messages as a chat would encode them."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """false: leave out what the tokenizer puts in front."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    tools: Tools | None = None
    """Functions that the messages' model may call."""


class DetokenizeRequest(Body, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]


class EncodeRequest(Body, kw_only=True):
    """The body of POST /v1/encode."""

    input: str | list[str]
    do_preprocess: bool = False
    """Encode each text as a user's message."""
    add_bos: bool = True


class PerplexityRequest(PolicyFields, kw_only=True):
    """The body of POST /get_ppl."""

    input: str | list[int]
    """A text, which is encoded as it is, or token ids."""
