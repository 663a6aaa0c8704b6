"""Published vision-language models, of which `hub_configs.jsonl` has the entries of config.json as the hub has them,
how many parameters they have and for how many positions. The counts of LLaVA's and its like are less the tower's last
norm (2,048 or 2,304), which nothing reads; factors of long contexts are ones there."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from asyncllm import InvalidCheckpoint, ModelError
from asyncllm.models.config import HFConfig
from asyncllm.models.registry import families, read_config
from asyncllm.models.vision.text_defaults import TEXT_DEFAULTS
from asyncllm.models.vision_language import composed
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.vl.processor import open_processor
from tests.checkpoints import write_tokenizer
from tests.vl.checkpoints import folder_of, picture
from tests.vl.kinds import KINDS

_LINES = Path(__file__).with_name("hub_configs.jsonl").read_text(encoding="utf-8").splitlines()
RECORDS = {record["model"]: record for record in map(json.loads, _LINES)}


@pytest.mark.parametrize("model_name", RECORDS)
def test_a_published_config_is_read(model_name: str, tmp_path: Path) -> None:
    record = RECORDS[model_name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(record["config"]), encoding="utf-8")
    config = read_config(tmp_path)
    parts = composed(HFConfig(record["config"], source=str(file)), config.architecture)
    assert parts is not None
    name = families().get(parts.decoder) or next(
        each for each in families().values() if each.tiny["model_type"] == parts.decoder
    )
    with torch.device("meta"):
        model = name(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == record["parameters"]
    assert config.max_position == record["positions"]
    added = {"32044": {"content": "<|image|>"}, "92546": {"content": "<IMG_CONTEXT>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}), encoding="utf-8")
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "x"}', encoding="utf-8")
    assert open_processor(tmp_path) is not None


def _reading(folder: Path, fields: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    try:
        config, processor = read_config(folder), open_processor(folder)
    except ModelError as error:
        return type(error)
    return config, {key: value for key, value in vars(processor).items() if isinstance(value, int | str)}


def _completed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers has of a config.json that leaves out defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": fields["architectures"]}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"gemma3_scan", "glm46v", "internvl_6b", "smolvlm"}))
def test_what_a_config_leaves_out_is_what_transformers_has(kind: str, tmp_path: Path) -> None:
    """As in files that hold what differs from the defaults of its classes."""
    config, pictures, tokens, template = KINDS[kind]()
    write_tokenizer(tmp_path, 320, more=tokens, template=template)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type]
    fields = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [name]}
    text, tower = fields["text_config"], fields["vision_config"]
    few = [
        {key: value for key, value in fields.items() if key not in ("tie_word_embeddings", "image_token_id")},
        *(
            {**fields, "vision_config": {key: value for key, value in tower.items() if key != left}}
            for left in ("image_size", "patch_size", "model_type", "hidden_act", "layer_norm_eps")
        ),
    ]
    if text["model_type"] in TEXT_DEFAULTS:
        few.append({**fields, "text_config": {"model_type": text["model_type"]}})
    for each in few:
        whole = _completed(each)
        if "out_hidden_size" in tower:
            for part in (each, whole):
                part["vision_config"] = {
                    **part["vision_config"],
                    "out_hidden_size": whole["text_config"]["hidden_size"],
                }
        read, expected = _reading(tmp_path, each), _reading(tmp_path, whole)
        assert read == expected, each.keys() ^ fields.keys() or each["vision_config"].keys() ^ tower.keys()


def test_a_config_without_architectures_is_known_by_its_model_type(tmp_path: Path) -> None:
    """DeepSeek-VL2's."""
    shutil.copytree(folder_of("deepseek_vl2"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    del fields["architectures"]
    file.write_text(json.dumps({**fields, "model_type": "deepseek_vl_v2"}))
    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "chat_template": None}))
    assert read_config(tmp_path).architecture == "DeepseekVLV2ForCausalLM"
    assert open_processor(tmp_path) is not None
    rendered = ChatTemplate.open(tmp_path).render([{"role": "user", "content": "what?"}])
    assert "<|User|>: what?" in rendered


def test_tokens_of_images_are_known_to_the_tokenizer_alone(tmp_path: Path) -> None:
    """Janus' tokenizer_config.json has no table of added tokens, and neither have files that transformers 5 writes."""
    shutil.copytree(folder_of("janus"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    del fields["added_tokens_decoder"]
    file.write_text(json.dumps(fields))
    own, known = open_processor(tmp_path), open_processor(folder_of("janus"))
    assert own is not None
    assert known is not None
    assert (own.before, own.after) == (known.before, known.after)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json is damaged"):
        open_processor(tmp_path)


def test_an_early_internvl_shows_one_picture(tmp_path: Path) -> None:
    """InternVL-Chat 1.1 and 1.2 say nothing of tiles."""
    config = dict(RECORDS["InternVL2-8B"]["config"])
    names = ("dynamic_image_size", "use_thumbnail", "max_dynamic_patch", "min_dynamic_patch", "ps_version")
    early = {key: value for key, value in config.items() if key not in names}
    added = {"added_tokens_decoder": {"92546": {"content": "<IMG_CONTEXT>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added), encoding="utf-8")
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "x"}', encoding="utf-8")
    for fields, tokens in ((early, 256), ({**early, "dynamic_image_size": True}, 6 * 256), (config, 7 * 256)):
        (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        processor = open_processor(tmp_path)
        assert processor is not None
        assert processor.prepare(picture(1, 1344, 900), {}).length == tokens
