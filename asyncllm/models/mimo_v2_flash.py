"""MiMo-V2: windows with sinks and more key heads in most layers, values narrower than keys, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from asyncllm.layers.attention import Attention
from asyncllm.layers.narrow_values import NarrowValueAttention
from asyncllm.models.config import ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, check_groups, grouped_routing, sparse_layers
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["MiMoV2Flash", "MiMoV2FlashConfig"]

_KINDS = ("full_attention", "sliding_attention")


class MiMoV2FlashConfig(ModelConfig, frozen=True, kw_only=True):
    """The config. `num_kv_heads` is that of layers without a window."""

    window_kv_heads: int
    value_dim: int
    value_scale: float


@register(MiMoV2FlashForCausalLM="MiMo-V2-Flash 309B-A15B", MiMoV2ForCausalLM="MiMo-V2.5, V2.6: the text model")
class MiMoV2Flash(DecoderLM):
    config: MiMoV2FlashConfig
    # As published, and as transformers has them in memory.
    weights = LLAMA_WEIGHTS.replaced(
        {
            **{key: row for key, row in DEEPSEEK_EXPERTS.items() if "shared" not in key},
            "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            "model.layers.{i}.self_attn.attention_sink_bias": "layers.{i}.attn.sinks:sinks",
            "model.layers.{i}.self_attn.sinks": "layers.{i}.attn.sinks:sinks",
            "model.layers.{i}.self_attn.qkv_proj": "layers.{i}.attn.qkv[q+k+v:by_group]",
        }
    ).skipping("model.mtp", "visual", "audio_encoder", "speech_embeddings")
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "mimo_v2_flash",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "v_head_dim": 16,
        "attention_bias": True,
        "attention_value_scale": 0.6,
        "max_position_embeddings": 128,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = _in_usual_words(hf)
        hf.expect("hidden_act", "silu")
        hf.expect("scoring_func", "sigmoid")
        hf.expect("topk_method", "noaux_tc")
        hf.expect("n_shared_experts", 0)
        hf.expect("add_full_attention_sink_bias", False)
        hf.expect("add_swa_attention_sink_bias", True)
        hf.expect("hybrid_block_size")
        # The names of the tensors tell these two apart.
        hf.expect("attention_projection_layout", "split", "fused_qkv")

        def read(kind: str) -> dict[str, Any]:
            return hf.of_layers(kind).decoder(
                architecture, max_position=131072, norm_eps=1e-5, head_dim=192, partial_rotary=0.334
            )

        full, sliding = map(read, _KINDS)
        num_layers, num_heads, head_dim = full["num_layers"], full["num_heads"], full["head_dim"]
        value_dim = hf.integer("v_head_dim", 128, maximum=head_dim)
        for name, size in (("num_attention_heads", num_heads), ("head_dim", head_dim), ("v_head_dim", value_dim)):
            hf.expect(f"swa_{name}", size)
        window_kv_heads = hf.integer("swa_num_key_value_heads", 2 * full["num_kv_heads"])
        if num_heads % window_kv_heads:
            hf.invalid("swa_num_key_value_heads", f"giving {window_kv_heads}, which does not divide {num_heads}")
        # The size of the published files leaves out the query's own position.
        window = hf.integer("sliding_window_size", hf.integer("sliding_window", 129) - 1) + 1
        full["windows"] = hf.windows(
            num_layers, window, [layer > 0 and (layer + 1) % 6 > 0 for layer in range(num_layers)]
        )
        count, routing = hf.integer("n_routed_experts", 256), grouped_routing(hf, top_k=8)
        check_groups(hf, count, routing)
        experts = ExpertsConfig(
            layers=sparse_layers(hf, num_layers),
            count=count,
            size=hf.integer("moe_intermediate_size", 2048),
            routing=routing,
            corrected=True,
            exact_router=True,
        )
        return MiMoV2FlashConfig(
            **full,
            layer_ropes=tuple((full if each is None else sliding)["rope"] for each in full["windows"]),
            qkv_bias=hf.flag("attention_bias", False),
            sinks=True,
            experts=experts,
            window_kv_heads=window_kv_heads,
            value_dim=value_dim,
            value_scale=hf.number("attention_value_scale", 1.0 if "attention_value_scale" in hf.fields else 0.707),
        )

    def attention(self, layer: int) -> Attention:
        config, heads = self.config, self.attention_config(layer)
        if heads.window is None:
            heads = replace(heads, sinks=False)
        else:
            heads = replace(heads, num_kv_heads=config.window_kv_heads)
        return NarrowValueAttention(
            layer,
            config.hidden_size,
            heads,
            value_dim=config.value_dim,
            value_scale=config.value_scale,
            # Layers with a window have more KV heads and the same groups.
            stored_groups=config.num_kv_heads,
        )


def _in_usual_words(hf: HFConfig) -> HFConfig:
    """Return the file with the entries that transformers writes in the place of the published ones."""
    hf = hf.named({"layernorm_epsilon": "rms_norm_eps"})
    words: dict[str, Any] = {}
    for name, kinds, usual in (
        ("hybrid_layer_pattern", _KINDS, "layer_types"),
        ("moe_layer_freq", ("dense", "sparse"), "mlp_layer_types"),
    ):
        pattern = hf.fields.get(name)
        if pattern is None or hf.fields.get(usual) is not None:
            continue
        if not isinstance(pattern, list) or not all(type(each) is int and each in (0, 1) for each in pattern):
            hf.invalid(name, "where a list of 0 and 1 belongs")
        words[usual] = [kinds[each] for each in pattern]
    rope = hf.fields.get("rope_parameters")
    if rope is None or (isinstance(rope, dict) and not any(isinstance(each, dict) for each in rope.values())):
        words["rope_parameters"] = _ropes_of_kinds(hf)
    return hf.changed(words)


def _ropes_of_kinds(hf: HFConfig) -> dict[str, Any]:
    """Return the rotations of both kinds of layers, of a file that has those of layers without a window in entries of
    its own or in rope_parameters. Raises UnsupportedModel, InvalidCheckpoint."""
    hf.expect("rope_scaling", {"rope_type": "default"}, {"type": "default"})
    given: dict[str, Any] = hf.fields.get("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        hf.unsupported("rope_parameters", "Rotations of layers without a window have to be plain ones.")
    full: dict[str, Any] = {
        "partial_rotary_factor": hf.number("partial_rotary_factor", 0.334),
        "rope_theta": hf.number("rope_theta", 5e6),
        **given,
        "rope_type": kind,
    }
    return {"full_attention": full, "sliding_attention": {**full, "rope_theta": hf.number("swa_rope_theta", 1e4)}}
