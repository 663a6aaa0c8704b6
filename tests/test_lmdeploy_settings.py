"""LMDeploy's settings: honoured, taken where they ask for nothing, or refused with what to use; never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import (
    ChatTemplateConfig,
    EngineConfig,
    GenerationConfig,
    InvalidParameter,
    TurbomindEngineConfig,
    UnsupportedFeature,
    pipeline,
)
from asyncllm.cli import main
from asyncllm.config import DistributorConfig
from asyncllm.config.lmdeploy_settings import ANSWERS, COMMANDS, DISTRIBUTORS, ENGINES, PIPELINES, TEMPLATES

CONFIGS: list[tuple[type[Any], Any]] = [
    (EngineConfig, ENGINES),
    (GenerationConfig, ANSWERS),
    (ChatTemplateConfig, TEMPLATES),
    (DistributorConfig, DISTRIBUTORS),
]


@pytest.mark.parametrize(("config", "table"), CONFIGS)
def test_what_asks_for_nothing_is_taken_and_the_rest_is_refused(config: type[Any], table: Any) -> None:
    assert not set(table) & set(config.__struct_fields__)
    for name, each in table.items():
        for value in (None, *(each.values or ())):
            assert config(**{name: value}) == config.from_dict({name: value}) == config()
        if each.values is not None:
            with pytest.raises(UnsupportedFeature) as refused:
                config(**{name: "something"})
            assert refused.value.param == name
            assert each.why in str(refused.value)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    for make in (GenerationConfig, lambda **fields: GenerationConfig.from_dict(fields)):
        with pytest.raises(InvalidParameter, match=r"no field 'temperatur'\. Did you mean temperature\?"):
            make(temperatur=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "top_k"),
    [
        ({}, 1),
        ({"do_sample": None, "top_k": 7}, 7),
        ({"do_sample": False}, 1),
        ({"do_sample": False, "top_k": 40}, 1),
        ({"do_sample": True}, 50),
        ({"do_sample": True, "top_k": 40}, 40),
        ({"do_sample": True, "top_k": 0}, 0),
    ],
)
def test_do_sample(fields: dict[str, Any], top_k: int) -> None:
    assert GenerationConfig(**fields).top_k == top_k
    assert GenerationConfig.from_dict(fields).top_k == top_k


def test_do_sample_is_a_truth_value() -> None:
    with pytest.raises(InvalidParameter, match="do_sample must be None, False or True, not 'yes'"):
        GenerationConfig(do_sample="yes")  # type: ignore[call-arg]


def test_none_stands_for_the_default_where_lmdeploy_has_it() -> None:
    config = TurbomindEngineConfig(max_batch_size=None, model_name=None, max_prefill_iters=1)  # type: ignore[arg-type, call-arg]
    assert config == EngineConfig()


def test_a_template_that_lmdeploy_wrote() -> None:
    written = '{"model_name": "internlm2", "model_path": null, "tool": null, "eotool": null, "system": "S"}'
    assert ChatTemplateConfig.from_json(written) == ChatTemplateConfig(model_name="internlm2", system="S")


def test_a_pipeline_of_lmdeploys() -> None:
    neutral = {name: each.values[0] if each.values else None for name, each in PIPELINES.items()}
    config = GenerationConfig(do_sample=False, top_k=40, max_new_tokens=4)  # type: ignore[call-arg]
    with pipeline("tiny-chat", log_level="ERROR", **neutral) as pipe:
        answers = pipe.infer(["What is 17 + 25?"], config)
        assert answers == pipe.batch_infer(["What is 17 + 25?"], gen_config=config)
        assert answers[0].cached_tokens == answers[0].cached_token_len  # type: ignore[index]
    for arguments, says in (
        ({"speculative_config": "eagle"}, "Speculative decoding"),
        ({"nonsense": 1}, "not implemented"),
        ({"model_name": EngineConfig()}, "backend_config"),
    ):
        with pytest.raises((UnsupportedFeature, InvalidParameter), match=says):
            pipeline("tiny-chat", log_level="ERROR", **arguments)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("serve tiny-chat --eager-mode", "leave it out"),
        ("serve tiny-chat --dp 2", "one replica"),
        ("chat tiny-chat --speculative-algorithm eagle", "Speculative decoding"),
        ("lite auto_awq nothing-there --trust-remote-code", "nothing-there"),
        ("serve gradio tiny-chat --server-port 6006", "a page to chat"),
        ("serve proxy --serving-strategy DistServe", "not transferred to other servers"),
        ("serve proxy --migration-protocol NVLINK", "not transferred to other servers"),
        ("convert internlm2 folder", "is not needed"),
        ("convert internlm2 folder --dst-path workspace --tp 2 --trust-remote-code", "is not needed"),
    ],
)
def test_commands_that_are_refused(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 1
    assert says in capsys.readouterr().err


def test_commands_of_lmdeploys(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("trust_remote_code", "thread_safe", "enable_metrics", "enable_abort_handling")
    neutral = [f"--{name.replace('_', '-')}" for name in flags]
    neutral += ["--dp", "1", "--async", "1", "--communicator", "nccl", "--max-log-len", "10"]
    aliases = ["--device", "cpu", "--cap", "completion", "--backend", "turbomind", "--max-new-tokens", "2"]
    assert (
        main(["run", *neutral, *aliases, "--hf-overrides", '{"max_position_embeddings": 512}', "tiny-chat", "Hi"]) == 0
    )
    assert capsys.readouterr().out.strip()
    assert set(COMMANDS) >= set(ENGINES)
