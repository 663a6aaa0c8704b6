"""Published vision-language models, of which `hub_configs.jsonl` has the entries of config.json as the hub has them,
how many parameters they have and for how many positions. The counts of LLaVA's and its like are less the tower's last
norm (2,048 or 2,304), which nothing reads; factors of long contexts are ones there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from asyncllm import InvalidCheckpoint
from asyncllm.models.config import HFConfig
from asyncllm.models.registry import families, read_config
from asyncllm.models.vision_language import composed
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.vl.processor import open_processor
from tests.vl.checkpoints import folder_of, picture

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
