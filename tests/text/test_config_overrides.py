"""hf_overrides reach the part of a model that they name, or that has the entry; others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.errors import InvalidParameter
from asyncllm.text.config_overrides import overridden

TEXT = {"hidden_size": 64, "rope_theta": 1e4}
VISION = {"depth": 2, "patch_size": 14}
INTERN = {"architectures": ["InternVLChatModel"], "llm_config": TEXT, "vision_config": VISION}
OMNI = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "thinker_config": {"text_config": TEXT, "vision_config": VISION, "image_token_id": 5},
    "talker_config": {"hidden_size": 3},
}
DENSE = {"architectures": ["LlamaForCausalLM"], **TEXT}
EARLY = {"architectures": ["Qwen2VLForConditionalGeneration"], **TEXT, "vision_config": VISION}
MOLMO = {"architectures": ["MolmoForCausalLM"], **TEXT}


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 7e4},
        {"text_config": {"rope_theta": 7e4}},
        {"thinker_config": {"rope_theta": 7e4}},
        {"thinker_config": {"text_config": {"rope_theta": 7e4}}},
        {"rope_theta": 1.0, "text_config": {"rope_theta": 7e4}},
    ],
)
def test_parts_within_parts_are_reached(overrides: dict[str, Any]) -> None:
    thinker = {**OMNI["thinker_config"], "text_config": {**TEXT, "rope_theta": 7e4}}
    assert overridden(OMNI, overrides) == {**OMNI, "thinker_config": thinker}


@pytest.mark.parametrize(
    "overrides", [{"vision_config": {"depth": 3}}, {"thinker_config": {"vision_config": {"depth": 3}}}]
)
def test_the_tower_within_a_part_is_reached(overrides: dict[str, Any]) -> None:
    assert overridden(OMNI, overrides)["thinker_config"]["vision_config"] == {**VISION, "depth": 3}


def test_entries_of_groups_are_replaced_one_by_one() -> None:
    fields = {"architectures": ["DbrxForCausalLM"], "attn_config": {"kv_n_heads": 2, "rope_theta": 5000.0}}
    changed = overridden(fields, {"attn_config": {"rope_theta": 7e4}})
    assert changed["attn_config"] == {"kv_n_heads": 2, "rope_theta": 7e4}


@pytest.mark.parametrize(
    ("fields", "part", "parts"),
    [
        (DENSE, "text_config", r"\(none\)"),
        (DENSE, "vision_config", r"\(none\)"),
        (EARLY, "text_config", "vision_config"),
        (INTERN, "text_config", "llm_config, vision_config"),
        (OMNI, "language_config", "thinker_config"),
        (MOLMO, "text_config", r"\(none\)"),
        ({**DENSE, "text_config": None}, "text_config", r"\(none\)"),
    ],
)
def test_parts_that_there_are_not_are_refused(fields: dict[str, Any], part: str, parts: str) -> None:
    with pytest.raises(InvalidParameter, match=f"no {part} in this place, where its parts are {parts}. Name one"):
        overridden(fields, {part: {"rope_theta": 7e4}})


def test_a_tower_that_a_file_leaves_out_may_be_changed() -> None:
    assert overridden(MOLMO, {"vision_config": {"image_size": 28}}) == {**MOLMO, "vision_config": {"image_size": 28}}


@pytest.mark.parametrize("fields", [INTERN, DENSE])
def test_a_part_may_be_taken_away(fields: dict[str, Any]) -> None:
    assert overridden(fields, {"vision_config": None})["vision_config"] is None


def test_other_entries_are_replaced_whole() -> None:
    quantized = {**INTERN, "quantization_config": {"bits": 4, "group_size": 128}}
    assert overridden(quantized, {"quantization_config": {"bits": 8}})["quantization_config"] == {"bits": 8}
    assert overridden(DENSE, {"quantization_config": {"bits": 8}})["quantization_config"] == {"bits": 8}
