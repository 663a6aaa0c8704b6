"""SGLang's form of POST /generate: one prompt or several, `sampling_params`, and streams whose events have the whole
text so far."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from asyncllm.config import GenerationConfig, RequestKeywords
from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encode
from asyncllm.server.lmdeploy.requests import GenerateRequest, LMDeployFields
from asyncllm.server.openai.answers import ranked, size_of
from asyncllm.server.openai.inputs import prompts_of
from asyncllm.server.request.arguments import GENERATE_TOKENS, image_options, label_of, request_options, same_fields
from asyncllm.server.request.decode import FORM_FIELD, PROMPT_FIELD
from asyncllm.server.request.fields import ImageUrls
from asyncllm.server.request.media import images_of
from asyncllm.server.request.structure import sampling_format
from asyncllm.server.service import Service, service_of
from asyncllm.server.sglang.requests import SamplingParams
from asyncllm.server.sse import event, stream
from asyncllm.types import Chunk, Response

__all__ = ["generate_sglang", "is_sglang"]

BASE64 = re.compile(r"[A-Za-z0-9+/\s]{16,}={0,2}\s*")
"""The beginning of an image in base64, and of no URL."""
OWN = (
    *("text", "sampling_params", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
    *("rid", "lora_path"),
)
"""Fields of SGLang's form alone."""
ELSEWHERE = {"max_tokens", "session_id", "add_special_tokens", "prompt"} | {*LMDeployFields.__struct_fields__} - {
    "model",
    "stream",
    "priority",
    "timeout",
    "user_id",
    "cache_salt",
}
"""Fields of LMDeploy's form, which SGLang has in `sampling_params` or not at all."""


def is_sglang(body: GenerateRequest) -> bool:
    """Return whether a body of /generate has a field that only SGLang's form has."""
    several = any(isinstance(each, list) for each in body.input_ids or ())
    return several or any(getattr(body, name) is not None for name in OWN)


async def generate_sglang(request: web.Request, body: GenerateRequest) -> web.StreamResponse:
    """Answer in SGLang's form."""
    service = service_of(request)
    request[FORM_FIELD] = "sampling_params"
    request[PROMPT_FIELD] = "input_ids" if body.text is None else "text"
    prompts, several = _prompts(body, service)
    params = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(prompts)
    if len(params) != len(prompts):
        raise _refused("sampling_params", f"There are {len(prompts)} prompts and {len(params)} sampling_params.")
    images = await images_of(request, _urls(body.image_data))
    if images and (several or not isinstance(prompts[0], str)):
        raise _refused("image_data", "image_data goes with one prompt of text.")
    form = _Form(body, [each or SamplingParams() for each in params], several, service)
    if body.lora_path is not None:
        service.check_model(body.lora_path)
    options: RequestKeywords = {**request_options(request, body), **image_options(body)}
    generations = [
        service.engine.generate(
            ((prompt, images) if images else prompt) if isinstance(prompt, str) else None,
            form.configs[index],
            do_preprocess=False,
            input_ids=None if isinstance(prompt, str) else prompt,
            session_id=label_of(request, None, form.id),
            stream_response=body.stream,
            adapter_name=service.adapter_of(body.lora_path or body.model),
            **options,
        )
        for index, prompt in enumerate(prompts)
    ]
    try:
        for index, generation in enumerate(generations):
            generation.index = index
            await generation.start()
        form.prompt_ids = [generation.prompt_token_ids for generation in generations]
        if body.stream:
            return await stream(request, service, generations, _Events(form))
        return await _whole(form, generations, service)
    finally:
        for generation in generations:
            generation.cancel()


async def _whole(form: _Form, generations: Sequence[Generation], service: Service) -> web.StreamResponse:
    responses = [await generation.response() for generation in generations]
    answers = [
        (index, choice, answer)
        for index, each in enumerate(responses)
        for choice, answer in enumerate(each.choices or (each,))
    ]

    def build() -> Any:
        made = [
            form.answer(index, choice, answer, responses[index].prompt_logprobs) for index, choice, answer in answers
        ]
        return made if form.numbered else made[0]

    return await built_response(service.engine, build, sum(size_of(answer) for _, _, answer in answers))


def _prompts(body: GenerateRequest, service: Service) -> tuple[list[str | list[int]], bool]:
    """Return the prompts, and whether they came as a list. Raises ApiError."""
    for name in sorted(ELSEWHERE):
        if getattr(body, name) is not None:
            raise _refused(name, f"SGLang's form of the body has no {name}. Send text and sampling_params.")
    if (body.text is None) == (body.input_ids is None):
        raise _refused("text", "Send either text or input_ids.")
    if body.text is not None:
        return prompts_of([body.text] if isinstance(body.text, str) else list(body.text), service.config, "text"), (
            not isinstance(body.text, str)
        )
    ids = body.input_ids or []
    return prompts_of(list(ids), service.config, "input_ids"), any(isinstance(each, list) for each in ids)


def _urls(images: ImageUrls) -> ImageUrls:
    """Return the URLs of images, which SGLang takes in base64 without a head too."""
    given = images if isinstance(images, list) else [] if images is None else [images]
    return [
        f"data:;base64,{each}" if isinstance(each, str) and BASE64.fullmatch(each, 0, 64) else each for each in given
    ]


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


class _Form:
    """What a request asks for, and its answers in SGLang's format."""

    def __init__(self, body: GenerateRequest, params: list[SamplingParams], several: bool, service: Service) -> None:
        self.configs = [_config(body, each, service) for each in params]
        self.prompt_ids: list[list[int]] = []
        """Token ids of each prompt, once it is encoded."""
        self._generates = [each.max_new_tokens != 0 for each in params]
        self._body = body
        self.id = body.rid or uuid.uuid4().hex
        self._began = time.monotonic()
        self._tokenizer = service.engine.tokenizer
        self._choices = max(each.n or 1 for each in params)
        self.numbered = several or self._choices > 1
        """Whether the answers are a list."""

    def number(self, prompt: int, choice: int) -> int:
        """Return the position of an answer among all."""
        return prompt * self._choices + choice

    def answer(
        self, prompt: int, choice: int, answer: Response, of_prompt: list[dict[int, float] | None] | None
    ) -> dict[str, Any]:
        """Return an answer, or the part of it so far. `of_prompt`: the prompt's log-probabilities."""
        generates = self._generates[prompt]
        number = self.number(prompt, choice)
        ids = answer.token_ids if generates else []
        meta = {
            "id": f"{self.id}_{number}" if self.numbered else self.id,
            "finish_reason": _finish_reason(answer, len(ids)),
            "prompt_tokens": answer.input_token_len,
            "completion_tokens": answer.generate_token_len if generates else 0,
            "cached_tokens": answer.cached_token_len,
            "e2e_latency": time.monotonic() - self._began,
        }
        if self._body.return_logprob:
            meta |= self._logprobs(prompt, ids, answer, of_prompt)
        return {"text": answer.text if generates else "", "output_ids": ids, "meta_info": meta}

    def _logprobs(
        self, prompt: int, ids: list[int], answer: Response, of_prompt: list[dict[int, float] | None] | None
    ) -> dict[str, Any]:
        start = self._body.logprob_start_len
        start = len(self.prompt_ids[prompt]) if start is None or start < 0 else start
        lists: dict[str, tuple[list[int], list[dict[int, float] | None]]] = {
            "input": (self.prompt_ids[prompt][start:], (of_prompt or [])[start:]),
            "output": (ids, [*(answer.logprobs or ())][: len(ids)]),
        }
        count = self._body.top_logprobs_num or 0
        found: dict[str, Any] = {}
        for name, (tokens, entries) in lists.items():
            pairs = list(zip(tokens, entries, strict=False))
            found[f"{name}_token_logprobs"] = [
                self._entry(token, None if entry is None else entry[token]) for token, entry in pairs
            ]
            if count:
                found[f"{name}_top_logprobs"] = [
                    None if entry is None else [self._entry(token, value) for token, value in ranked(entry, count)]
                    for _, entry in pairs
                ]
        return found

    def _entry(self, token: int, value: float | None) -> tuple[float | None, int, str | None]:
        return value, token, self._tokenizer.token_text(token) if self._body.return_text_in_logprobs else None


def _config(body: GenerateRequest, params: SamplingParams, service: Service) -> GenerationConfig:
    """Return the config of one prompt. Raises ApiError for fields that contradict each other, InvalidParameter for
    values out of range."""
    if (params.n or 1) > service.config.max_choices:
        raise _refused("n", f"n is {params.n}, and the server gives at most {service.config.max_choices} answers.")
    if not body.return_logprob and (body.logprob_start_len or 0) + 1 + (body.top_logprobs_num or 0) > 1:
        raise _refused("return_logprob", "logprob_start_len and top_logprobs_num need return_logprob: true.")
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    scores_prompt = logprobs is not None and body.logprob_start_len is not None and body.logprob_start_len >= 0
    fields = same_fields(params)
    if params.no_stop_trim:
        fields["include_stop_str_in_output"] = True
    return msgspec.structs.replace(
        service.defaults,
        max_new_tokens=GENERATE_TOKENS if params.max_new_tokens is None else max(1, params.max_new_tokens),
        min_new_tokens=params.min_new_tokens,
        random_seed=params.sampling_seed,
        logprobs=logprobs,
        response_format=sampling_format(params),
        prompt_logprobs=logprobs if scores_prompt else None,
        **fields,
    ).checked()


def _finish_reason(answer: Response, count: int) -> dict[str, Any] | None:
    match answer.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": count}
        case "stop":
            matched = answer.stop_reason
            return {"type": "stop", "matched": answer.token_ids[-1] if matched is None else matched}
        case reason:
            return {"type": "abort", "message": f"The answer ended by {reason}."}


class _Events:
    """One event per chunk, each with the whole text of its answer so far."""

    def __init__(self, form: _Form) -> None:
        self._form = form
        self._answers: dict[tuple[int, int], Response] = {}
        """(prompt, choice) -> the answer so far."""
        self._of_prompts: dict[int, list[dict[int, float] | None]] = {}
        """Log-probabilities of each prompt, which come with its first answer."""

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the event of one chunk."""
        form, prompt, choice = self._form, chunk.index, chunk.choice
        if chunk.prompt_logprobs is not None:
            self._of_prompts[prompt] = chunk.prompt_logprobs
        answer = self._answers.setdefault((prompt, choice), Response()).extend(chunk)
        made = form.answer(prompt, choice, answer, self._of_prompts.get(prompt))
        if form.numbered:
            made["index"] = form.number(prompt, choice)
        return event(encode(made))

    def size(self, chunk: Chunk) -> int:
        so_far = self._answers.get((chunk.index, chunk.choice))
        return size_of(chunk) + (0 if so_far is None else size_of(so_far))

    def closing(self) -> bytes:
        return b""
