"""Names that other servers document and this one does not implement, each with its neutral values.

A name that is not a field of a route's body is looked up here. With a neutral value it is accepted, as the answer would
be the same without it; with any other it is refused. null is neutral for all. `docs/differences.md` shows the table,
and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.config.neutral import Neutral
from asyncllm.server.http.errors import ApiError

__all__ = ["NEUTRAL", "check_neutral"]

_GRAMMAR = "The route does not constrain answers. Leave it out, or use /v1/chat/completions or /v1/completions."
_LOOPS = "Use repetition_penalty or frequency_penalty against loops, or leave it out."
_DISAGGREGATION = "KV blocks are not handed to other servers. Leave it out."
_MEDIA = "The route has no such field. Send images as parts of messages to /v1/chat/completions, or leave it out."
_TOOLS = "The route takes no tools. Leave them out, or use /v1/chat/completions."
_ANSWERS = "Answers are text. Leave it out."
_ADAPTERS = "An adapter is named as the model. Send its name as model."
_SAMPLER = "This sampler is not implemented. Leave it out, or use temperature, top_p, top_k and min_p."
_BEAMS = "It belongs to beam search, which is not implemented. Leave it out."
_TRUNCATED = "Prompts are not truncated silently. Shorten the prompt yourself."
_REASONING = "Completions of raw text have no separate reasoning. Leave it out."
_CODE = "The server does not run code from requests. Leave it out."
_EXPERTS = "The chosen experts are not recorded. Leave it out."
_WAITS = "Answers are not computed in the background. Leave it out."
_STATES = "Hidden states are not returned. Leave it out."
_CONTEXT = "A full context is not shifted. Leave it out."
_TIMINGS = "Timings are in /metrics. Leave it out."
_ELSEWHERE = "The route does not implement it. Leave it out, or use /v1/chat/completions or /v1/completions."
_IN_CHATS = "The route does not implement it. Leave it out, or use /v1/chat/completions."
_IN_COMPLETIONS = "The route does not implement it. Leave it out, or use /v1/completions."
_MACHINE = "It is about the machine, which the server's owner has set up, and changes no answer."
_ABORTED = "The finish_reason of an answer that is ended is 'abort'. Leave it out."
_RECORDS = "It is for the provider's own records."
_CACHES = "A prefix cache changes no answer."
_VECTORS = "Vectors are float32, in base64 with the lowest byte first. Leave it out."
_RENDERED = "It is for routes that render prompts, which are not implemented."
_RANKS = "A request does not choose the rank that computes it. Leave it out."
_ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""What Claude Code sends: the prompt keeps all reasoning."""
_SPACES = "The tokenizer's own rule decides on spaces between special tokens, as with transformers' fast tokenizers."

NEUTRAL: Mapping[str, Neutral] = {
    # OpenAI
    "user": Neutral("OpenAI, LMDeploy, vLLM, SGLang", None, _RECORDS),
    "metadata": Neutral("OpenAI", None, _RECORDS),
    "store": Neutral("OpenAI", None, _RECORDS),
    "service_tier": Neutral("OpenAI", None, "There is one tier."),
    "safety_identifier": Neutral("OpenAI", None, _RECORDS),
    "prompt_cache_key": Neutral("OpenAI", None, _CACHES),
    "prompt_cache_options": Neutral("OpenAI", None, _CACHES),
    "prompt_cache_retention": Neutral("OpenAI", None, _CACHES),
    "prediction": Neutral("OpenAI", None, "It may speed up an answer, and does not change it."),
    "moderation": Neutral("OpenAI", None, "Moderation is the provider's."),
    "verbosity": Neutral("OpenAI", None, "It is a hint to models that were trained on it."),
    "parallel_tool_calls": Neutral("OpenAI, LMDeploy, vLLM", None, "Without tools there are no calls."),
    "tools": Neutral("OpenAI, LMDeploy, vLLM, SGLang, llama.cpp", ([],), _TOOLS),
    "tool_choice": Neutral("OpenAI, LMDeploy, vLLM, SGLang, llama.cpp", ("none", "auto"), _TOOLS),
    "functions": Neutral("OpenAI", ([],), "Send tools instead."),
    "function_call": Neutral("OpenAI", ("none", "auto"), "Send tool_choice instead."),
    "response_format": Neutral("OpenAI, LMDeploy, vLLM, SGLang, llama.cpp", ({"type": "text"},), _GRAMMAR),
    "audio": Neutral("OpenAI", (), _ANSWERS),
    "modalities": Neutral("OpenAI", (["text"],), _ANSWERS),
    "reasoning_effort": Neutral("OpenAI, LMDeploy, vLLM, SGLang", (), _IN_CHATS),
    "web_search_options": Neutral("OpenAI", (), "The server does not search the web. Leave it out."),
    "background": Neutral("OpenAI", (False,), _WAITS),
    "background_options": Neutral("OpenAI", (), _WAITS),
    "conversation": Neutral("OpenAI", (), "Send previous_response_id to /v1/responses, or the messages themselves."),
    "context_management": Neutral("OpenAI, Anthropic", ([], {"edits": []}, _ALL_THINKING), _TRUNCATED),
    "truncation": Neutral("OpenAI", ("disabled",), _TRUNCATED),
    "prompt": Neutral("OpenAI", (), "The route takes messages or input. No prompts are kept here."),
    "image": Neutral("OpenAI", (), _ANSWERS),
    "access_programs": Neutral("OpenAI", ([],), "The server has no such programs. Leave it out."),
    "client_metadata": Neutral("OpenAI", None, _RECORDS),
    "personality": Neutral("OpenAI", (), "There are no presets. Say it in instructions."),
    "max_tool_calls": Neutral("OpenAI", None, "It counts calls of the provider's own tools, of which there are none."),
    "suffix": Neutral("OpenAI, LMDeploy, vLLM", ("",), "Send it to /v1/completions, with a model that fills in."),
    "best_of": Neutral("OpenAI, vLLM", (1,), "Answers are not ranked. Ask for n answers instead."),
    # Anthropic
    "cache_control": Neutral("Anthropic", None, _CACHES),
    "container": Neutral("Anthropic", (), _CODE),
    "diagnostics": Neutral("Anthropic", (), "The server has no such reports. Leave it out."),
    "inference_geo": Neutral("Anthropic", (), "A request does not choose where it is computed. Leave it out."),
    "speed": Neutral("Anthropic", ("standard",), "There is one speed. Leave it out."),
    "user_profile_id": Neutral("Anthropic", None, _RECORDS),
    "betas": Neutral("Anthropic", None, "The fields of a beta feature that is not implemented are refused."),
    "billing_policy": Neutral("Anthropic", None, _RECORDS),
    "compaction": Neutral("Anthropic", (), _TRUNCATED),
    "fallbacks": Neutral("Anthropic", ([],), "No other model answers in place of the requested one. Leave it out."),
    "fallback_credit_token": Neutral("Anthropic", None, _RECORDS),
    "mcp_servers": Neutral("Anthropic", ([],), "The server runs no tools of its own. Leave it out."),
    "workspace_id": Neutral("Anthropic", None, _RECORDS),
    # LMDeploy
    "kwargs": Neutral("LMDeploy's APIClient", ({},), "It holds further fields, so it is a dict."),
    "spaces_between_special_tokens": Neutral("LMDeploy, vLLM", (True, False), _SPACES),
    "adapter_name": Neutral("LMDeploy", (), _ADAPTERS),
    "image_url": Neutral("LMDeploy", ("", []), _MEDIA),
    "image_data": Neutral("LMDeploy, SGLang, llama.cpp", ([],), _MEDIA),
    "media_io_kwargs": Neutral("LMDeploy, vLLM", ({},), _MEDIA),
    "mm_processor_kwargs": Neutral("LMDeploy, vLLM", ({},), _MEDIA),
    "migration_request": Neutral("LMDeploy", (), _DISAGGREGATION),
    "with_cache": Neutral("LMDeploy", (False,), _DISAGGREGATION),
    "preserve_cache": Neutral("LMDeploy", (False,), _DISAGGREGATION),
    "repetition_ngram_size": Neutral("LMDeploy", (0,), _LOOPS),
    "repetition_ngram_threshold": Neutral("LMDeploy", (0,), _LOOPS),
    "return_routed_experts": Neutral("LMDeploy, SGLang", (False,), _EXPERTS),
    # vLLM
    "add_special_tokens": Neutral("vLLM", (False,), "The chat template writes the special tokens. Leave it out."),
    "allowed_token_ids": Neutral("vLLM", (), _ELSEWHERE),
    "chat_template": Neutral("vLLM", (), "The server's owner chooses the template. Leave it out."),
    "documents": Neutral("vLLM", ([],), "Put the documents into a message."),
    "ec_transfer_params": Neutral("vLLM", (), _DISAGGREGATION),
    "embed_dtype": Neutral("vLLM", ("float32",), _VECTORS),
    "endianness": Neutral("vLLM", ("native", "little"), _VECTORS),
    "early_stopping": Neutral("vLLM", (False,), _BEAMS),
    "guided_choice": Neutral("vLLM", (), _GRAMMAR),
    "guided_decoding_backend": Neutral("vLLM", None, "There is one back end."),
    "guided_grammar": Neutral("vLLM", (), _GRAMMAR),
    "guided_json": Neutral("vLLM", (), _GRAMMAR),
    "guided_regex": Neutral("vLLM", (), _GRAMMAR),
    "guided_whitespace_pattern": Neutral("vLLM", (), _GRAMMAR),
    "include_reasoning": Neutral("vLLM", (True,), _REASONING),
    "kv_transfer_params": Neutral("vLLM", (), _DISAGGREGATION),
    "length_penalty": Neutral("vLLM", (1.0,), _BEAMS),
    "logprob_token_ids": Neutral("vLLM", (), "The most likely tokens are listed. Send top_logprobs instead."),
    "logits_processors": Neutral("vLLM", ([],), _CODE),
    "prompt_embeds": Neutral("vLLM", (), "Prompts are texts or token ids."),
    "repetition_detection": Neutral("vLLM", (), _LOOPS),
    "return_mm_kwargs": Neutral("vLLM", (True, False), _RENDERED),
    "finished_reason": Neutral("LMDeploy, SGLang", (), _ABORTED),
    "abort_message": Neutral("LMDeploy, SGLang", (), _ABORTED),
    "return_assistant_tokens_mask": Neutral("vLLM", (False,), _RENDERED),
    "stream_interval": Neutral("vLLM", None, "It only changes how a stream is cut into pieces."),
    "return_prompt_text": Neutral("vLLM", (False,), "Send the messages to /tokenize, and its tokens to /detokenize."),
    "return_token_offsets": Neutral("vLLM", (False,), _RENDERED),
    "routed_experts_prompt_start": Neutral("vLLM", (0,), _EXPERTS),
    "return_tokens_as_token_ids": Neutral("vLLM", (False,), "The route sends no log-probabilities of tokens."),
    "structural_tag": Neutral("vLLM, SGLang", (), "Send response_format instead."),
    "structured_outputs": Neutral("vLLM", (), _GRAMMAR),
    "truncate_prompt_tokens": Neutral(
        "vLLM", (), "The route truncates no prompts. Shorten it, or use /v1/completions."
    ),
    "truncation_side": Neutral(
        "vLLM", ("left",), "The route truncates no prompts. Leave it out, or use /v1/completions."
    ),
    "use_beam_search": Neutral("vLLM", (False,), "Beam search is not implemented. Ask for n answers instead."),
    "vllm_xargs": Neutral("vLLM", ({},), _CODE),
    "watermarking": Neutral("vLLM", (False,), "Answers have no watermark. Leave it out."),
    # SGLang
    "bootstrap_host": Neutral("SGLang", (), _DISAGGREGATION),
    "bootstrap_port": Neutral("SGLang", (), _DISAGGREGATION),
    "bootstrap_room": Neutral("SGLang", (), _DISAGGREGATION),
    "custom_labels": Neutral("SGLang", None, _RECORDS),
    "custom_logit_processor": Neutral("SGLang", (), _CODE),
    "custom_params": Neutral("SGLang", ({},), _CODE),
    "data_parallel_rank": Neutral("SGLang", (), _RANKS),
    "disagg_prefill_dp_rank": Neutral("SGLang", (), _RANKS),
    "ebnf": Neutral("SGLang", (), _GRAMMAR),
    "extra_key": Neutral("SGLang", (), "Send cache_salt instead."),
    "images_config": Neutral("SGLang", ({},), "Send mm_processor_kwargs instead."),
    "json_schema": Neutral("SGLang, llama.cpp", (), _GRAMMAR),
    "lora_path": Neutral("SGLang", (), _ADAPTERS),
    "max_dynamic_patch": Neutral("SGLang", (), "Send mm_processor_kwargs instead."),
    "min_dynamic_patch": Neutral("SGLang", (), "Send mm_processor_kwargs instead."),
    "ngram_corpus_id": Neutral("SGLang", (), "Speculative decoding is not implemented. Leave it out."),
    "no_stop_trim": Neutral("SGLang", (False,), "Send include_stop_str_in_output instead."),
    "regex": Neutral("SGLang", (), _GRAMMAR),
    "return_cached_tokens_details": Neutral(
        "SGLang", (False,), "usage.prompt_tokens_details counts cached tokens. Leave it out."
    ),
    "return_hidden_states": Neutral("SGLang", (False,), _STATES),
    "return_meta_info": Neutral("SGLang", (False,), "usage and finish_reason say it. Leave it out."),
    "return_prompt_token_ids": Neutral("SGLang", (False,), "Send return_token_ids instead."),
    "rid": Neutral("SGLang", (), "Send request_id instead."),
    "routed_dp_rank": Neutral("SGLang", (), _RANKS),
    "routed_experts_start_len": Neutral("SGLang", (0,), _EXPERTS),
    "separate_reasoning": Neutral("SGLang", (True, False), "Completions of raw text have no separate reasoning."),
    "session_params": Neutral("SGLang", (), "Sessions are those of /v1/chat/interactive. Leave it out."),
    "stop_regex": Neutral("SGLang", ([],), "Send stop with texts instead."),
    "stream_reasoning": Neutral("SGLang", (True,), "Reasoning is streamed as it is generated. Leave it out."),
    "task": Neutral("SGLang", (), "A request does not choose a task. Leave it out."),
    "use_audio_in_video": Neutral("SGLang", (False,), "Audio is not implemented. Leave it out."),
    # llama.cpp
    "cache_prompt": Neutral("llama.cpp", (True, False), _CACHES),
    "dry_allowed_length": Neutral("llama.cpp", (2,), _LOOPS),
    "dry_base": Neutral("llama.cpp", (1.75,), _LOOPS),
    "dry_multiplier": Neutral("llama.cpp", (0.0,), _LOOPS),
    "dry_penalty_last_n": Neutral("llama.cpp", (-1,), _LOOPS),
    "dynatemp_exponent": Neutral("llama.cpp", (1.0,), _SAMPLER),
    "dynatemp_range": Neutral("llama.cpp", (0.0,), _SAMPLER),
    "grammar": Neutral("llama.cpp", ("",), _GRAMMAR),
    "id_slot": Neutral("llama.cpp", (-1,), "Clients do not choose the row of the batch. Leave it out."),
    "lora": Neutral("llama.cpp", ([],), _ADAPTERS),
    "min_keep": Neutral("llama.cpp", (0,), _SAMPLER),
    "mirostat": Neutral("llama.cpp", (0,), _SAMPLER),
    "mirostat_eta": Neutral("llama.cpp", (0.1,), _SAMPLER),
    "mirostat_tau": Neutral("llama.cpp", (5.0,), _SAMPLER),
    "n_indent": Neutral("llama.cpp", (0,), "No indentation of lines is enforced. Leave it out."),
    "n_keep": Neutral("llama.cpp", (0,), _CONTEXT),
    "n_discard": Neutral("llama.cpp", (0,), _CONTEXT),
    "n_predict": Neutral("llama.cpp", (-1,), "Send max_tokens instead."),
    "n_probs": Neutral("llama.cpp", (0,), "Send logprobs instead."),
    "post_sampling_probs": Neutral("llama.cpp", (False,), "Send logprobs instead."),
    "reasoning_format": Neutral("llama.cpp", ("auto", "deepseek"), "Send separate_reasoning instead."),
    "repeat_last_n": Neutral("llama.cpp", (64, -1), "Penalties cover the whole text. Leave it out."),
    "repeat_penalty": Neutral("llama.cpp", (1.0,), "Send repetition_penalty instead."),
    "response_fields": Neutral("llama.cpp", ([],), "Answers have all of their fields. Leave it out."),
    "return_progress": Neutral("llama.cpp", (False,), _TIMINGS),
    "return_tokens": Neutral("llama.cpp", (False,), "Send return_token_ids instead."),
    "samplers": Neutral("llama.cpp", ([],), "The order of samplers is fixed. Leave it out."),
    "t_max_predict_ms": Neutral("llama.cpp", (0, -1), "Send timeout instead, in seconds."),
    "timings_per_token": Neutral("llama.cpp", (False,), _TIMINGS),
    "top_n_sigma": Neutral("llama.cpp", (-1.0,), _SAMPLER),
    "typical_p": Neutral("llama.cpp", (1.0,), _SAMPLER),
    "xtc_probability": Neutral("llama.cpp", (0.0,), _SAMPLER),
    "xtc_threshold": Neutral("llama.cpp", (0.1,), _SAMPLER),
    # Ollama
    "context": Neutral("Ollama", ([],), "Send the messages to /api/chat. Leave it out."),
    "template": Neutral("Ollama", ("",), "The server's owner chooses the template. Leave it out."),
    "truncate": Neutral("Ollama", (False,), _TRUNCATED),
    "width": Neutral("Ollama", (0,), _ANSWERS),
    "height": Neutral("Ollama", (0,), _ANSWERS),
    "steps": Neutral("Ollama", (0,), _ANSWERS),
    # Ollama's options
    "num_ctx": Neutral("Ollama", None, "The context is the server's own, and a prompt that does not fit is refused."),
    "num_keep": Neutral("Ollama", None, "A full context is not shifted, so nothing has to be kept."),
    "num_batch": Neutral("Ollama", None, _MACHINE),
    "num_gpu": Neutral("Ollama", None, _MACHINE),
    "main_gpu": Neutral("Ollama", None, _MACHINE),
    "num_thread": Neutral("Ollama", None, _MACHINE),
    "numa": Neutral("Ollama", None, _MACHINE),
    "low_vram": Neutral("Ollama", None, _MACHINE),
    "f16_kv": Neutral("Ollama", None, _MACHINE),
    "use_mmap": Neutral("Ollama", None, _MACHINE),
    "use_mlock": Neutral("Ollama", None, _MACHINE),
    "logits_all": Neutral("Ollama", (False,), "Send logprobs instead."),
    "vocab_only": Neutral("Ollama", (False,), "The model is loaded whole. Leave it out."),
    "embedding_only": Neutral("Ollama", (False,), "The model is loaded whole. Leave it out."),
    "penalize_newline": Neutral("Ollama", (True,), "Penalties treat line ends as any other token. Leave it out."),
    "tfs_z": Neutral("Ollama", (1.0,), _SAMPLER),
    # Implemented, though not by every route.
    "echo": Neutral("OpenAI, vLLM", (False,), _IN_COMPLETIONS),
    "frequency_penalty": Neutral("OpenAI, vLLM, SGLang", (0.0,), _ELSEWHERE),
    "logit_bias": Neutral("OpenAI, LMDeploy, vLLM", ({}, []), _ELSEWHERE),
    "logprobs": Neutral("OpenAI, LMDeploy, vLLM", (False, 0), _ELSEWHERE),
    "min_tokens": Neutral("vLLM, SGLang", (0,), _ELSEWHERE),
    "n": Neutral("OpenAI, LMDeploy, vLLM, SGLang", (1,), _ELSEWHERE),
    "presence_penalty": Neutral("OpenAI, vLLM, SGLang", (0.0,), _ELSEWHERE),
    "prompt_logprobs": Neutral("vLLM", (), _ELSEWHERE),
    "return_logprob": Neutral("LMDeploy", (False,), "Send logprobs instead."),
    "return_token_ids": Neutral("vLLM, SGLang, LMDeploy", (False,), _ELSEWHERE),
    "stream": Neutral("OpenAI", (False,), "The route does not stream. Leave it out."),
    "stream_options": Neutral("OpenAI, vLLM", (), _ELSEWHERE),
    "top_logprobs": Neutral("OpenAI, LMDeploy, vLLM", (0,), _IN_CHATS),
}


def check_neutral(name: str, value: Any) -> None:
    """Raise ApiError 400 for a value that is not neutral under a name of the table."""
    if not NEUTRAL[name].takes(value):
        raise ApiError(
            400,
            f"{name} is not supported with this value. {NEUTRAL[name].why}",
            code="unsupported_parameter",
            param=name,
        )
