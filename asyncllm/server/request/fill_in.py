"""`suffix`: completes the text between a prompt and a suffix."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncllm.config import GenerationConfig
from asyncllm.server.http.errors import ApiError
from asyncllm.text.fill_in import fill_in_of
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["filled_in"]


def filled_in(
    prompts: Sequence[str | list[int]], suffix: str, config: GenerationConfig, tokenizer: Tokenizer
) -> tuple[list[str], GenerationConfig]:
    """Return the prompts combined with the suffix, in the form that the model was trained on, and the config with the
    tokens that end such an answer. Raises ApiError for token ids, and for models without such a form."""
    form = fill_in_of(tokenizer)
    if form is None:
        raise _refused(
            "The model's vocabulary has no tokens for text between a prompt and a suffix. Leave it out, or serve a "
            "model of code that was trained to fill in."
        )
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise _refused("The prompt is token ids, and a suffix is for texts. Send the prompt as a text.")
    stop_words = [*(config.stop_words or ()), *form.stop_words(tokenizer)]
    made = msgspec.structs.replace(config, stop_words=list(dict.fromkeys(stop_words))).checked()
    return [form.prompt(text, suffix) for text in texts], made


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="unsupported_parameter", param="suffix")
