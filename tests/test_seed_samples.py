"""Programs written for LMDeploy run after changing the import and the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import ChatTemplateConfig, Response, pipeline
from asyncllm.text.templates.registry import MODELS
from tests.seed_samples import CUSTOM_TEMPLATE, LONG_SAMPLES, SAMPLES, TEMPLATE_JSON

Runner = Callable[..., dict[str, Any]]

LOCAL_LIMITS = {"tp=2": "tp=1", "session_len=160000": "session_len=16000", "session_len=1000000": "session_len=20000"}
"""What goes with the replaced model: it has 8192 positions."""


@pytest.fixture
def run(tiny_checkpoint: Path) -> Iterator[Runner]:
    """Runs a sample with the package's and the model's name replaced; closes its pipeline afterwards."""
    namespaces: list[dict[str, Any]] = []

    def run(source: str, *replacements: tuple[str, str]) -> dict[str, Any]:
        for old, new in (("lmdeploy", "asyncllm"), *replacements):
            assert old in source
            source = source.replace(old, new)
        source, count = re.subn(r"(pipeline|from_pretrained)\(\s*(['\"]).*?\2", rf"\1({str(tiny_checkpoint)!r}", source)
        assert count == 1
        namespaces.append({})
        exec(compile(source, "sample", "exec"), namespaces[-1])
        return namespaces[-1]

    yield run
    for namespace in namespaces:
        if "pipe" in namespace:
            namespace["pipe"].close()


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_runs(name: str, run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(SAMPLES[name], *((old, new) for old, new in LOCAL_LIMITS.items() if old in SAMPLES[name]))
    if "response" in names:
        response = names["response"]
        answers = response if isinstance(response, list) else [response]
        assert all(isinstance(answer, Response) and answer.generate_token_len > 0 for answer in answers)
        assert [answer.session_id for answer in answers] == list(range(len(answers)))
    elif "ppl" in names:
        assert names["ppl"] > 1
    else:
        assert "Chunk(" in capsys.readouterr().out


def test_a_sample_with_two_ranks(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    run(SAMPLES["tensor parallel"])
    assert "Response(" in capsys.readouterr().out


def test_long_context_sample(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    shorter = [("session_len = 160000", "session_len = 2000"), ("(session_len, 5)", "(session_len, 1)")]
    run(LONG_SAMPLES["passkey retrieval"], *shorter)
    assert "Response(" in capsys.readouterr().out


def test_registered_template_sample(run: Runner) -> None:
    try:
        names = run(CUSTOM_TEMPLATE)
        assert names["response"].finish_reason == "stop"
        prompt = names["pipe"].prepare_inputs("who are you?")["input_ids"]
        text = names["pipe"].tokenizer.decode(prompt, skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nYou are a robot developed by ")
    finally:
        MODELS.users.pop("customized_model", None)


def test_json_template_sample(tmp_path: Path, tiny_checkpoint: Path) -> None:
    file = tmp_path / "template.json"
    file.write_text(TEMPLATE_JSON, encoding="utf-8")
    assert ChatTemplateConfig.from_json(file) == ChatTemplateConfig.from_json(TEMPLATE_JSON)
    with pipeline(str(tiny_checkpoint), chat_template_config=ChatTemplateConfig.from_json(str(file))) as pipe:
        prompt = pipe.prepare_inputs("hi")["input_ids"]
        assert pipe.tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|im_start|>system\nYou are a robot developed by LMDeploy.<|im_end|>\n"
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert pipe("hi", request_output_len=4).generate_token_len <= 4
