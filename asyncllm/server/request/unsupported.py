"""Names that other servers document and this one does not implement, each with its neutral values.

A name that is not a field of a route's body is looked up here. With a neutral value it is accepted, as the answer would
be the same without it; with any other it is refused. null is neutral for all. `docs/differences.md` shows the table,
and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.config.unsupported import Unsupported
from asyncllm.server.http.errors import ApiError

__all__ = ["UNSUPPORTED", "check_unsupported"]

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

UNSUPPORTED: Mapping[str, Unsupported] = {
    # OpenAI
    "user": Unsupported("OpenAI, LMDeploy, vLLM, SGLang", None, _RECORDS),
    "metadata": Unsupported("OpenAI", None, _RECORDS),
    "store": Unsupported("OpenAI", None, _RECORDS),
    "service_tier": Unsupported("OpenAI", None, "There is one tier."),
    "safety_identifier": Unsupported("OpenAI", None, _RECORDS),
    "prompt_cache_key": Unsupported("OpenAI", None, _CACHES),
    "prompt_cache_options": Unsupported("OpenAI", None, _CACHES),
    "prompt_cache_retention": Unsupported("OpenAI", None, _CACHES),
    "prediction": Unsupported("OpenAI", None, "It may speed up an answer, and does not change it."),
    "moderation": Unsupported("OpenAI", None, "Moderation is the provider's."),
    "verbosity": Unsupported("OpenAI", None, "It is a hint to models that were trained on it."),
    "parallel_tool_calls": Unsupported("OpenAI, LMDeploy, vLLM", None, "Without tools there are no calls."),
    "tools": Unsupported("OpenAI, LMDeploy, vLLM, SGLang, llama.cpp", ([],), _TOOLS),
    "tool_choice": Unsupported("OpenAI, LMDeploy, vLLM, SGLang, llama.cpp", ("none", "auto"), _TOOLS),
    "functions": Unsupported("OpenAI", ([],), "Send tools instead."),
    "function_call": Unsupported("OpenAI", ("none", "auto"), "Send tool_choice instead."),
    "response_format": Unsupported("OpenAI, LMDeploy, vLLM, SGLang, llama.cpp", ({"type": "text"},), _GRAMMAR),
    "audio": Unsupported("OpenAI", (), _ANSWERS),
    "modalities": Unsupported("OpenAI", (["text"],), _ANSWERS),
    "reasoning_effort": Unsupported("OpenAI, LMDeploy, vLLM, SGLang", (), _IN_CHATS),
    "web_search_options": Unsupported("OpenAI", (), "The server does not search the web. Leave it out."),
    "background": Unsupported("OpenAI", (False,), _WAITS),
    "background_options": Unsupported("OpenAI", (), _WAITS),
    "conversation": Unsupported(
        "OpenAI", (), "Send previous_response_id to /v1/responses, or the messages themselves."
    ),
    "context_management": Unsupported("OpenAI, Anthropic", ([], {"edits": []}, _ALL_THINKING), _TRUNCATED),
    "truncation": Unsupported("OpenAI", ("disabled",), _TRUNCATED),
    "prompt": Unsupported("OpenAI", (), "The route takes messages or input. No prompts are kept here."),
    "image": Unsupported("OpenAI", (), _ANSWERS),
    "access_programs": Unsupported("OpenAI", ([],), "The server has no such programs. Leave it out."),
    "client_metadata": Unsupported("OpenAI", None, _RECORDS),
    "personality": Unsupported("OpenAI", (), "There are no presets. Say it in instructions."),
    "max_tool_calls": Unsupported(
        "OpenAI", None, "It counts calls of the provider's own tools, of which there are none."
    ),
    "suffix": Unsupported("OpenAI, LMDeploy, vLLM", ("",), "Send it to /v1/completions, with a model that fills in."),
    "best_of": Unsupported("OpenAI, vLLM", (1,), "Answers are not ranked. Ask for n answers instead."),
    # Anthropic
    "cache_control": Unsupported("Anthropic", None, _CACHES),
    "container": Unsupported("Anthropic", (), _CODE),
    "diagnostics": Unsupported("Anthropic", (), "The server has no such reports. Leave it out."),
    "inference_geo": Unsupported("Anthropic", (), "A request does not choose where it is computed. Leave it out."),
    "speed": Unsupported("Anthropic", ("standard",), "There is one speed. Leave it out."),
    "user_profile_id": Unsupported("Anthropic", None, _RECORDS),
    "betas": Unsupported("Anthropic", None, "The fields of a beta feature that is not implemented are refused."),
    "billing_policy": Unsupported("Anthropic", None, _RECORDS),
    "compaction": Unsupported("Anthropic", (), _TRUNCATED),
    "fallbacks": Unsupported("Anthropic", ([],), "No other model answers in place of the requested one. Leave it out."),
    "fallback_credit_token": Unsupported("Anthropic", None, _RECORDS),
    "mcp_servers": Unsupported("Anthropic", ([],), "The server runs no tools of its own. Leave it out."),
    "workspace_id": Unsupported("Anthropic", None, _RECORDS),
    # LMDeploy
    "kwargs": Unsupported("LMDeploy's APIClient", ({},), "It holds further fields, so it is a dict."),
    "spaces_between_special_tokens": Unsupported("LMDeploy, vLLM", (True, False), _SPACES),
    "adapter_name": Unsupported("LMDeploy", (), _ADAPTERS),
    "image_url": Unsupported("LMDeploy", ("", []), _MEDIA),
    "image_data": Unsupported("LMDeploy, SGLang, llama.cpp", ([],), _MEDIA),
    "media_io_kwargs": Unsupported("LMDeploy, vLLM", ({},), _MEDIA),
    "mm_processor_kwargs": Unsupported("LMDeploy, vLLM", ({},), _MEDIA),
    "migration_request": Unsupported("LMDeploy", (), _DISAGGREGATION),
    "with_cache": Unsupported("LMDeploy", (False,), _DISAGGREGATION),
    "preserve_cache": Unsupported("LMDeploy", (False,), _DISAGGREGATION),
    "repetition_ngram_size": Unsupported("LMDeploy", (0,), _LOOPS),
    "repetition_ngram_threshold": Unsupported("LMDeploy", (0,), _LOOPS),
    "return_routed_experts": Unsupported("LMDeploy, SGLang", (False,), _EXPERTS),
    # vLLM
    "add_special_tokens": Unsupported("vLLM", (False,), "The chat template writes the special tokens. Leave it out."),
    "allowed_token_ids": Unsupported("vLLM", (), _ELSEWHERE),
    "chat_template": Unsupported("vLLM", (), "The server's owner chooses the template. Leave it out."),
    "documents": Unsupported("vLLM", ([],), "Put the documents into a message."),
    "ec_transfer_params": Unsupported("vLLM", (), _DISAGGREGATION),
    "embed_dtype": Unsupported("vLLM", ("float32",), _VECTORS),
    "endianness": Unsupported("vLLM", ("native", "little"), _VECTORS),
    "early_stopping": Unsupported("vLLM", (False,), _BEAMS),
    "guided_choice": Unsupported("vLLM", (), _GRAMMAR),
    "guided_decoding_backend": Unsupported("vLLM", None, "There is one back end."),
    "guided_grammar": Unsupported("vLLM", (), _GRAMMAR),
    "guided_json": Unsupported("vLLM", (), _GRAMMAR),
    "guided_regex": Unsupported("vLLM", (), _GRAMMAR),
    "guided_whitespace_pattern": Unsupported("vLLM", (), _GRAMMAR),
    "include_reasoning": Unsupported("vLLM", (True,), _REASONING),
    "kv_transfer_params": Unsupported("vLLM", (), _DISAGGREGATION),
    "length_penalty": Unsupported("vLLM", (1.0,), _BEAMS),
    "logprob_token_ids": Unsupported("vLLM", (), "The most likely tokens are listed. Send top_logprobs instead."),
    "logits_processors": Unsupported("vLLM", ([],), _CODE),
    "prompt_embeds": Unsupported("vLLM", (), "Only /v1/completions takes embeddings instead of tokens."),
    "repetition_detection": Unsupported("vLLM", (), _LOOPS),
    "return_mm_kwargs": Unsupported("vLLM", (True, False), _RENDERED),
    "finished_reason": Unsupported("LMDeploy, SGLang", (), _ABORTED),
    "abort_message": Unsupported("LMDeploy, SGLang", (), _ABORTED),
    "return_assistant_tokens_mask": Unsupported("vLLM", (False,), _RENDERED),
    "stream_interval": Unsupported("vLLM", None, "It only changes how a stream is cut into pieces."),
    "return_prompt_text": Unsupported(
        "vLLM", (False,), "Send the messages to /tokenize, and its tokens to /detokenize."
    ),
    "return_token_offsets": Unsupported("vLLM", (False,), _RENDERED),
    "routed_experts_prompt_start": Unsupported("vLLM", (0,), _EXPERTS),
    "return_tokens_as_token_ids": Unsupported("vLLM", (False,), "The route sends no log-probabilities of tokens."),
    "structural_tag": Unsupported("vLLM, SGLang", (), "Send response_format instead."),
    "structured_outputs": Unsupported("vLLM", (), _GRAMMAR),
    "truncate_prompt_tokens": Unsupported(
        "vLLM", (), "The route truncates no prompts. Shorten it, or use /v1/completions."
    ),
    "truncation_side": Unsupported(
        "vLLM", ("left",), "The route truncates no prompts. Leave it out, or use /v1/completions."
    ),
    "use_beam_search": Unsupported("vLLM", (False,), "Beam search is not implemented. Ask for n answers instead."),
    "vllm_xargs": Unsupported("vLLM", ({},), _CODE),
    "watermarking": Unsupported("vLLM", (False,), "Answers have no watermark. Leave it out."),
    # SGLang
    "bootstrap_host": Unsupported("SGLang", (), _DISAGGREGATION),
    "bootstrap_port": Unsupported("SGLang", (), _DISAGGREGATION),
    "bootstrap_room": Unsupported("SGLang", (), _DISAGGREGATION),
    "custom_labels": Unsupported("SGLang", None, _RECORDS),
    "custom_logit_processor": Unsupported("SGLang", (), _CODE),
    "custom_params": Unsupported("SGLang", ({},), _CODE),
    "data_parallel_rank": Unsupported("SGLang", (), _RANKS),
    "disagg_prefill_dp_rank": Unsupported("SGLang", (), _RANKS),
    "ebnf": Unsupported("SGLang", (), _GRAMMAR),
    "extra_key": Unsupported("SGLang", (), "Send cache_salt instead."),
    "images_config": Unsupported("SGLang", ({},), "Send mm_processor_kwargs instead."),
    "json_schema": Unsupported("SGLang, llama.cpp", (), _GRAMMAR),
    "lora_path": Unsupported("SGLang", (), _ADAPTERS),
    "max_dynamic_patch": Unsupported("SGLang", (), "Send mm_processor_kwargs instead."),
    "min_dynamic_patch": Unsupported("SGLang", (), "Send mm_processor_kwargs instead."),
    "ngram_corpus_id": Unsupported("SGLang", (), "Speculative decoding is not implemented. Leave it out."),
    "no_stop_trim": Unsupported("SGLang", (False,), "Send include_stop_str_in_output instead."),
    "regex": Unsupported("SGLang", (), _GRAMMAR),
    "return_cached_tokens_details": Unsupported(
        "SGLang", (False,), "usage.prompt_tokens_details counts cached tokens. Leave it out."
    ),
    "return_hidden_states": Unsupported("SGLang", (False,), _STATES),
    "return_meta_info": Unsupported("SGLang", (False,), "usage and finish_reason say it. Leave it out."),
    "return_prompt_token_ids": Unsupported("SGLang", (False,), "Send return_token_ids instead."),
    "rid": Unsupported("SGLang", (), "Send request_id instead."),
    "routed_dp_rank": Unsupported("SGLang", (), _RANKS),
    "routed_experts_start_len": Unsupported("SGLang", (0,), _EXPERTS),
    "separate_reasoning": Unsupported("SGLang", (True, False), "Completions of raw text have no separate reasoning."),
    "session_params": Unsupported("SGLang", (), "Sessions are those of /v1/chat/interactive. Leave it out."),
    "stop_regex": Unsupported("SGLang", ([],), "Send stop with texts instead."),
    "stream_reasoning": Unsupported("SGLang", (True,), "Reasoning is streamed as it is generated. Leave it out."),
    "task": Unsupported("SGLang", (), "A request does not choose a task. Leave it out."),
    "use_audio_in_video": Unsupported("SGLang", (False,), "Audio is not implemented. Leave it out."),
    # llama.cpp
    "cache_prompt": Unsupported("llama.cpp", (True, False), _CACHES),
    "dry_allowed_length": Unsupported("llama.cpp", (2,), _LOOPS),
    "dry_base": Unsupported("llama.cpp", (1.75,), _LOOPS),
    "dry_multiplier": Unsupported("llama.cpp", (0.0,), _LOOPS),
    "dry_penalty_last_n": Unsupported("llama.cpp", (-1,), _LOOPS),
    "dynatemp_exponent": Unsupported("llama.cpp", (1.0,), _SAMPLER),
    "dynatemp_range": Unsupported("llama.cpp", (0.0,), _SAMPLER),
    "grammar": Unsupported("llama.cpp", ("",), _GRAMMAR),
    "id_slot": Unsupported("llama.cpp", (-1,), "Clients do not choose the row of the batch. Leave it out."),
    "lora": Unsupported("llama.cpp", ([],), _ADAPTERS),
    "min_keep": Unsupported("llama.cpp", (0,), _SAMPLER),
    "mirostat": Unsupported("llama.cpp", (0,), _SAMPLER),
    "mirostat_eta": Unsupported("llama.cpp", (0.1,), _SAMPLER),
    "mirostat_tau": Unsupported("llama.cpp", (5.0,), _SAMPLER),
    "n_indent": Unsupported("llama.cpp", (0,), "No indentation of lines is enforced. Leave it out."),
    "n_keep": Unsupported("llama.cpp", (0,), _CONTEXT),
    "n_discard": Unsupported("llama.cpp", (0,), _CONTEXT),
    "n_predict": Unsupported("llama.cpp", (-1,), "Send max_tokens instead."),
    "n_probs": Unsupported("llama.cpp", (0,), "Send logprobs instead."),
    "post_sampling_probs": Unsupported("llama.cpp", (False,), "Send logprobs instead."),
    "reasoning_format": Unsupported("llama.cpp", ("auto", "deepseek"), "Send separate_reasoning instead."),
    "repeat_last_n": Unsupported("llama.cpp", (64, -1), "Penalties cover the whole text. Leave it out."),
    "repeat_penalty": Unsupported("llama.cpp", (1.0,), "Send repetition_penalty instead."),
    "response_fields": Unsupported("llama.cpp", ([],), "Answers have all of their fields. Leave it out."),
    "return_progress": Unsupported("llama.cpp", (False,), _TIMINGS),
    "return_tokens": Unsupported("llama.cpp", (False,), "Send return_token_ids instead."),
    "samplers": Unsupported("llama.cpp", ([],), "The order of samplers is fixed. Leave it out."),
    "t_max_predict_ms": Unsupported("llama.cpp", (0, -1), "Send timeout instead, in seconds."),
    "timings_per_token": Unsupported("llama.cpp", (False,), _TIMINGS),
    "top_n_sigma": Unsupported("llama.cpp", (-1.0,), _SAMPLER),
    "typical_p": Unsupported("llama.cpp", (1.0,), _SAMPLER),
    "xtc_probability": Unsupported("llama.cpp", (0.0,), _SAMPLER),
    "xtc_threshold": Unsupported("llama.cpp", (0.1,), _SAMPLER),
    # Ollama
    "context": Unsupported("Ollama", ([],), "Send the messages to /api/chat. Leave it out."),
    "template": Unsupported("Ollama", ("",), "The server's owner chooses the template. Leave it out."),
    "truncate": Unsupported("Ollama", (False,), _TRUNCATED),
    "width": Unsupported("Ollama", (0,), _ANSWERS),
    "height": Unsupported("Ollama", (0,), _ANSWERS),
    "steps": Unsupported("Ollama", (0,), _ANSWERS),
    # Ollama's options
    "num_ctx": Unsupported(
        "Ollama", None, "The context is the server's own, and a prompt that does not fit is refused."
    ),
    "num_keep": Unsupported("Ollama", None, "A full context is not shifted, so nothing has to be kept."),
    "num_batch": Unsupported("Ollama", None, _MACHINE),
    "num_gpu": Unsupported("Ollama", None, _MACHINE),
    "main_gpu": Unsupported("Ollama", None, _MACHINE),
    "num_thread": Unsupported("Ollama", None, _MACHINE),
    "numa": Unsupported("Ollama", None, _MACHINE),
    "low_vram": Unsupported("Ollama", None, _MACHINE),
    "f16_kv": Unsupported("Ollama", None, _MACHINE),
    "use_mmap": Unsupported("Ollama", None, _MACHINE),
    "use_mlock": Unsupported("Ollama", None, _MACHINE),
    "logits_all": Unsupported("Ollama", (False,), "Send logprobs instead."),
    "vocab_only": Unsupported("Ollama", (False,), "The model is loaded whole. Leave it out."),
    "embedding_only": Unsupported("Ollama", (False,), "The model is loaded whole. Leave it out."),
    "penalize_newline": Unsupported("Ollama", (True,), "Penalties treat line ends as any other token. Leave it out."),
    "tfs_z": Unsupported("Ollama", (1.0,), _SAMPLER),
    # Implemented, though not by every route.
    "echo": Unsupported("OpenAI, vLLM", (False,), _IN_COMPLETIONS),
    "frequency_penalty": Unsupported("OpenAI, vLLM, SGLang", (0.0,), _ELSEWHERE),
    "logit_bias": Unsupported("OpenAI, LMDeploy, vLLM", ({}, []), _ELSEWHERE),
    "logprobs": Unsupported("OpenAI, LMDeploy, vLLM", (False, 0), _ELSEWHERE),
    "min_tokens": Unsupported("vLLM, SGLang", (0,), _ELSEWHERE),
    "n": Unsupported("OpenAI, LMDeploy, vLLM, SGLang", (1,), _ELSEWHERE),
    "presence_penalty": Unsupported("OpenAI, vLLM, SGLang", (0.0,), _ELSEWHERE),
    "prompt_logprobs": Unsupported("vLLM", (), _ELSEWHERE),
    "return_logprob": Unsupported("LMDeploy", (False,), "Send logprobs instead."),
    "return_token_ids": Unsupported("vLLM, SGLang, LMDeploy", (False,), _ELSEWHERE),
    "stream": Unsupported("OpenAI", (False,), "The route does not stream. Leave it out."),
    "stream_options": Unsupported("OpenAI, vLLM", (), _ELSEWHERE),
    "top_logprobs": Unsupported("OpenAI, LMDeploy, vLLM", (0,), _IN_CHATS),
}


def check_unsupported(name: str, value: Any) -> None:
    """Raise ApiError 400 for a value that is not neutral under a name of the table."""
    if not UNSUPPORTED[name].takes(value):
        raise ApiError(
            400,
            f"{name} is not supported with this value. {UNSUPPORTED[name].why}",
            code="unsupported_parameter",
            param=name,
        )
