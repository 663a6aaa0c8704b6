"""Request bodies of routes that are not OpenAI's: LMDeploy's /generate, /v1/chat/interactive, /v1/encode and /get_ppl,
and vLLM's /tokenize and /detokenize. Other names are looked up in the table of `unsupported`, as on OpenAI's
routes."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from asyncllm.config import MAX_COUNT, MAX_LOGPROBS, Tools
from asyncllm.server.request.fields import (
    MAX_MESSAGES,
    Body,
    ImageOptions,
    ImageUrls,
    Label,
    NewTokens,
    PolicyFields,
    SamplingFields,
    Variables,
)
from asyncllm.server.sglang.requests import SamplingParams

__all__ = [
    "DetokenizeRequest",
    "EncodeRequest",
    "GenerateRequest",
    "InteractiveRequest",
    "LMDeployFields",
    "PerplexityRequest",
    "TokenizeRequest",
]


class LMDeployFields(SamplingFields, kw_only=True):
    """The fields shared by the two routes that generate."""

    stream: bool = False
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None


class GenerateRequest(LMDeployFields, kw_only=True):
    """The body of POST /generate. Sampling parameters have the same defaults as on /v1/completions."""

    prompt: str | None = None
    input_ids: Annotated[list[int | list[int]], Meta(min_length=1)] | None = None
    """In place of `prompt`."""
    image_data: ImageUrls = None
    """URLs of the images for a text prompt. They go before the text unless it contains IMAGE_TOKENs."""
    mm_processor_kwargs: ImageOptions | None = None
    """Image preparation: min_pixels, max_pixels, max_dynamic_patch, detail."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """A label, as in `OpenAIFields`."""
    max_tokens: NewTokens | None = None
    add_special_tokens: bool | None = None
    """false: leave out the tokens that the tokenizer prepends (vLLM's)."""
    return_logprob: bool | None = None
    text: str | list[str] | None = None
    """In place of `prompt`: SGLang's form of the body, as is a list of `input_ids`."""
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    """In SGLang's form, in place of the fields above; a list for each prompt its own."""
    logprob_start_len: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """In SGLang's form: the first token of the prompt whose log-probability is returned; -1: none."""
    top_logprobs_num: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """In SGLang's form: how many of the most likely tokens are returned too."""
    return_text_in_logprobs: bool | None = None
    """In SGLang's form: entries of log-probabilities have the token's text."""
    rid: Label | None = None
    """In SGLang's form: the answer's id."""
    lora_path: str | None = None
    """In SGLang's form: the adapter's name."""


class InteractiveRequest(LMDeployFields, kw_only=True):
    """The body of POST /v1/chat/interactive. Sampling parameters have LMDeploy's defaults."""

    prompt: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | str = ""
    """A text or messages, new ones only. An empty prompt with `interactive_mode: false` ends the session."""
    image_url: ImageUrls = None
    """URLs of the images for a text prompt. Messages have their images among their parts."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = -1
    """-1: none."""
    interactive_mode: bool = False
    """Keep the conversation for the next request with the same session_id."""
    step: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """Continue after this many tokens of the history; 0: after all of them."""
    cancel: bool = False
    """Stop the request that runs under session_id; the conversation stays."""
    request_output_len: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """Maximum number of new tokens. LMDeploy's client sends 0 to end a session."""
    mm_processor_kwargs: ImageOptions | None = None
    """Image preparation: min_pixels, max_pixels, max_dynamic_patch, detail."""
    adapter_name: str | None = None
    """The adapter for this turn, which other routes name in `model`."""


class TokenizeRequest(Body, kw_only=True):
    """The body of POST /tokenize: a text that is encoded verbatim, or messages, encoded as a chat."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """false: leave out the tokens that the tokenizer prepends."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    tools: Tools | None = None
    """Functions that the model may call."""


class DetokenizeRequest(Body, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]


class EncodeRequest(Body, kw_only=True):
    """The body of POST /v1/encode."""

    input: str | list[str]
    do_preprocess: bool = False
    """Encode each text as a user message."""
    add_bos: bool = True


class PerplexityRequest(PolicyFields, kw_only=True):
    """The body of POST /get_ppl."""

    input: str | list[int]
    """A text, encoded verbatim, or token ids."""
