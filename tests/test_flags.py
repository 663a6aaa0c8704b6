"""Options come from the settings: every field has one, and what it parses is checked like anything else."""

from __future__ import annotations

import pytest

from asyncllm import (
    ChatTemplateConfig,
    EngineConfig,
    GenerationConfig,
    InvalidParameter,
    ServerConfig,
)
from asyncllm.cli import flags
from asyncllm.config import DistributorConfig

CONFIGS = [EngineConfig, GenerationConfig, ChatTemplateConfig, ServerConfig, DistributorConfig]


def parse(config: type, *arguments: str) -> object:
    parser = flags.Parser(prog="test")
    flags.add(parser, config)
    return flags.load(parser.parse(arguments), config)


@pytest.mark.parametrize("config", CONFIGS)
def test_no_option_means_the_defaults(config: type) -> None:
    assert parse(config) == config()


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_an_option_with_its_description(config: type) -> None:
    parser = flags.Parser(prog="test")
    flags.add(parser, config)
    text = " ".join(parser.format_help().split())
    for name in config.__struct_fields__:
        assert f"--{name.replace('_', '-')}" in text
    assert text.count("Default: ") == len(config.__struct_fields__)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-new-tokens", "7"], GenerationConfig(max_new_tokens=7)),
        (["--max_new_tokens=7"], GenerationConfig(max_new_tokens=7)),
        (["--max-new-tokens", "none"], GenerationConfig(max_new_tokens=None)),
        (["--temperature", "0.5", "--top-k", "0"], GenerationConfig(temperature=0.5, top_k=0)),
        (["--ignore-eos", "--no-skip-special-tokens"], GenerationConfig(ignore_eos=True, skip_special_tokens=False)),
        (["--stop-words", "a b", "--stop-words", "c"], GenerationConfig(stop_words=["a b", "c"])),
        (["--stop-token-ids", "3", "--stop-token-ids", "4"], GenerationConfig(stop_token_ids=[3, 4])),
        (["--logit-bias", "5=-1.5", "--logit-bias", "6=2"], GenerationConfig(logit_bias={5: -1.5, 6: 2.0})),
        (["--random-seed", "-3"], GenerationConfig(random_seed=-3)),
    ],
)
def test_generation_options(arguments: list[str], expected: GenerationConfig) -> None:
    assert parse(GenerationConfig, *arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dtype", "bfloat16"], EngineConfig(dtype="bfloat16")),
        (["--quant-policy", "8"], EngineConfig(quant_policy=8)),
        (["--quant-policy", "fp8"], EngineConfig(quant_policy="fp8")),
        (["--use-logn-attn"], EngineConfig(use_logn_attn=True)),
        (["--no-enable-prefix-caching"], EngineConfig(enable_prefix_caching=False)),
        (["--hf-overrides", 'scaling={"factor": 2.0}'], EngineConfig(hf_overrides={"scaling": {"factor": 2.0}})),
        (["--hf-overrides", "name=plain"], EngineConfig(hf_overrides={"name": "plain"})),
        (["--cache-max-entry-count", "12"], EngineConfig(cache_max_entry_count=12.0)),
        (["--adapters", "a/b"], EngineConfig(adapters={"default": "a/b"})),
    ],
)
def test_engine_options(arguments: list[str], expected: EngineConfig) -> None:
    assert parse(EngineConfig, *arguments) == expected


def test_bounds_are_those_of_the_struct() -> None:
    with pytest.raises(InvalidParameter, match="temperature"):
        parse(GenerationConfig, "--temperature", "3")
    with pytest.raises(InvalidParameter, match="tp"):
        parse(EngineConfig, "--tp", "65")
    with pytest.raises(InvalidParameter, match=r"'tiny-chat' is not NAME=VALUE.*before the option"):
        parse(EngineConfig, "--adapters", "a=b", "--adapters", "tiny-chat")
    with pytest.raises(InvalidParameter, match="'a' is given twice"):
        parse(EngineConfig, "--adapters", "a=b", "--adapters", "a=c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--max-batch-size", "many"], "--max-batch-size: invalid int value: 'many'"),
        (["--hf-overrides", "{novalue"], "is not NAME=VALUE, nor a JSON object"),
        (["--max-batchsize", "3"], "did you mean --max-batch-size?"),
        (["--quant-policy", "5"], "invalid choice: '5'"),
        (["--max-batch", "3"], "unrecognized arguments"),
    ],
)
def test_bad_options_end_with_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(EngineConfig, *arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("param", "text"),
    [("top_k", "--top-k: odd"), ("url", "URL: odd"), ("chat_template_config", "odd"), (None, "odd")],
)
def test_error_names_the_option_or_the_place(param: str | None, text: str) -> None:
    parser = flags.Parser()
    parser.add_argument("url", metavar="URL")
    flags.add(parser, GenerationConfig)
    assert flags.refuse(InvalidParameter("odd", param), parser) == text
