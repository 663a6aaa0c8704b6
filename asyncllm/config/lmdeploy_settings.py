"""LMDeploy's settings without a counterpart in asyncllm. A neutral value, which changes nothing here, is accepted, so
that programs written for LMDeploy run. Any other value is refused with a message that names the alternative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.config.unsupported import Unsupported
from asyncllm.errors import UnsupportedFeature, short

__all__ = ["ANSWERS", "CALLS", "COMMANDS", "DISTRIBUTORS", "ENGINES", "PIPELINES", "TEMPLATES", "without_unsupported"]


_NO_TRANSFER = "KV blocks are not transferred to other servers; leave it out."


def _each(names: str, values: tuple[Any, ...] | None, why: str) -> dict[str, Unsupported]:
    return {name: Unsupported("LMDeploy", values, why) for name in names.split()}


ENGINES: Mapping[str, Unsupported] = {
    **_each("thread_safe", (False, True), "Calls from several threads are always safe."),
    **_each("dp dp_rank cp nnodes node_rank", (0, 1), "An engine is one replica on one machine; shard it with tp."),
    **_each(
        "device_num attn_tp_size attn_cp_size attn_dp_size mlp_tp_size mlp_dp_size moe_tp_size outer_dp_size",
        (),
        "All layers are sharded alike; set tp, and ep to distribute whole experts.",
    ),
    **_each("devices", (), "Ranks use the GPUs of CUDA_VISIBLE_DEVICES in order; set that."),
    **_each("distributed_executor_backend", ("uni",), "Ranks are child processes of the engine; leave it out."),
    **_each("dist_init_addr", (), "Ranks are on one machine and find each other; leave it out."),
    **_each("communicator", ("nccl",), "The algorithm of all-reduce is chosen by size; leave it out."),
    **_each("enable_mp_engine", (False,), "Set isolated=True to run the model in its own process."),
    **_each("mp_engine_backend", ("mp",), "Set isolated=True to run the model in its own process."),
    **_each("enable_transfer_obj_ref", (False,), "Ray is not used; leave it out."),
    **_each("eager_mode", (False,), "Decode steps use CUDA graphs on a GPU and none on a CPU; leave it out."),
    **_each("cudagraph_capture_batch_sizes", (), "The sizes follow from max_batch_size; set that."),
    **_each("kernel_block_size", (-1,), "Kernels use the cache's block size; set block_size."),
    **_each("cache_chunk_size", (-1,), "The pool of blocks is allocated once; set cache_max_entry_count."),
    **_each("max_prefill_iters", (1,), "A prompt takes as many steps as it needs; set max_prefill_token_num."),
    **_each("max_context_token_num", (1,), "Set max_prefill_token_num."),
    **_each("async_", (1,), "The next step is always scheduled while one runs; leave it out."),
    **_each("use_context_fmha", (1,), "Prefill has one attention kernel; leave it out."),
    **_each("use_dynamic_ntk", (False,), "Set rope_scaling_factor."),
    **_each("group_size", (0, 128), "The checkpoint's config.json defines it; leave it out."),
    **_each("kv_bits", (8,), "Set quant_policy."),
    **_each(
        "custom_module_map",
        (),
        "Set plugin to a file with asyncllm.models.replaces (docs/extending.md).",
    ),
    **_each("empty_init", (False,), "Load the checkpoint, and replace its weights with update_weights."),
    **_each("enable_microbatch enable_eplb", (False,), "Experts are not moved between ranks; leave it out."),
    **_each("enable_metrics", (True,), "Metrics are always counted; --disable-metrics hides /metrics."),
    **_each("language_model_only", (False,), "A vision tower is loaded with its model; leave it out."),
    **_each(
        "logprobs_mode", ("raw_logprobs",), "Log-probabilities are those of the model, before sampling changes them."
    ),
    **_each("enable_return_routed_experts", (False,), "The choice of experts is not recorded; leave it out."),
    **_each("prefix_cache_state_budget prefix_cache_decode_state_interval", (0,), "States are cached like blocks."),
    **_each("cache_checkpoint_interval", (4096,), "States are cached like blocks; leave it out."),
    **_each("cache_prompt cache_generation", ("auto",), "Set enable_prefix_caching."),
    **_each("cache_prompt_boundary_skip", (1,), "Set enable_prefix_caching."),
    **_each("role", ("Hybrid",), _NO_TRANSFER),
    **_each("migration_backend", ("DLSlime",), _NO_TRANSFER),
    **_each("dllm_block_length dllm_denoising_steps", (), "Diffusion language models are not implemented."),
    **_each("dllm_unmasking_strategy", ("low_confidence_dynamic",), "Diffusion language models are not implemented."),
    **_each("dllm_confidence_threshold", (0.85,), "Diffusion language models are not implemented."),
}
"""Settings of PytorchEngineConfig and TurbomindEngineConfig."""

_SCORES = "Call get_logits, get_ppl or embed with the token ids."
_LOOPS = "Use repetition_penalty or frequency_penalty against loops."

ANSWERS: Mapping[str, Unsupported] = {
    **_each("spaces_between_special_tokens", (False, True), "The tokenizer decides about such spaces."),
    **_each("output_logits output_last_hidden_state", (), _SCORES),
    **_each("return_ppl", (False,), _SCORES),
    **_each("logits_processors", ([],), "Use logit_bias, bad_words, penalties or response_format."),
    **_each("repetition_ngram_size repetition_ngram_threshold", (0,), _LOOPS),
    **_each("return_routed_experts", (False,), "The choice of experts is not recorded; leave it out."),
    **_each("with_cache preserve_cache", (False,), _NO_TRANSFER),
    **_each("migration_request", (), _NO_TRANSFER),
}
"""Settings of GenerationConfig."""

TEMPLATES: Mapping[str, Unsupported] = _each(
    "tool eotool", (), "Tool results are rendered by a Jinja template: the checkpoint's, or chat_template."
)
"""Settings of ChatTemplateConfig."""

PIPELINES: Mapping[str, Unsupported] = {
    **_each("trust_remote_code", (False, True), "No code of a checkpoint is run."),
    **_each("max_log_len", None, "Prompts are not logged."),
    **_each("speculative_config", (), "Speculative decoding is not implemented."),
    **_each("allowed_media_domains", (), "A program chooses the URLs it fetches; the server has such a list."),
}
"""Arguments of pipeline()."""

CALLS: Mapping[str, Unsupported] = _each("log_level max_log_len", None, "The log is that of pipeline().")
"""Arguments of a call of a pipeline, which have no effect in LMDeploy either."""

COMMANDS: Mapping[str, Unsupported] = {
    **ENGINES,
    **{name: PIPELINES[name] for name in ("trust_remote_code", "max_log_len")},
    **_each(
        "speculative_algorithm speculative_draft_model speculative_num_draft_tokens",
        (),
        "Speculative decoding is not implemented.",
    ),
    **_each("enable_abort_handling", (False, True), "The server always has /abort_request."),
}
"""Options of `lmdeploy chat` and `lmdeploy serve api_server`."""


DISTRIBUTORS: Mapping[str, Unsupported] = {
    **_each("serving_strategy", ("Hybrid",), f"Each node computes prompts and answers. {_NO_TRANSFER}"),
    **_each("dummy_prefill disable_gdr", (False,), _NO_TRANSFER),
    **_each("migration_protocol", ("RDMA",), _NO_TRANSFER),
    **_each("link_type", ("RoCE",), _NO_TRANSFER),
    **_each("disable_cache_status", (False, True), "Nodes are asked for their state, and no copy of it is cached."),
}
"""Options of `lmdeploy serve proxy`."""


def without_unsupported(table: Mapping[str, Unsupported], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` without the settings in `table`. Raises UnsupportedFeature for a value that is not neutral."""
    for name, value in fields.items():
        if name in table and not table[name].takes(value):
            raise UnsupportedFeature(f"LMDeploy's {name}={short(value)} is not supported. {table[name].why}", name)
    return {name: value for name, value in fields.items() if name not in table}
