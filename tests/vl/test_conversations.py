"""Images in terminal conversations: they go with the next message only."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest

from asyncllm import APIClient, EngineConfig, GenerationConfig, InvalidMessage, cli, pipeline
from asyncllm.cli import commands
from asyncllm.cli.conversations import ClientConversation, LocalConversation, SessionConversation
from asyncllm.vl import load_image
from tests.vl.checkpoints import folder_of, picture


@pytest.fixture
def file(tmp_path: Path) -> str:
    picture(1).save(tmp_path / "image.png")
    return str(tmp_path / "image.png")


def test_with_a_model_in_this_process(file: str) -> None:
    short = GenerationConfig(max_new_tokens=3, ignore_eos=True)
    with pipeline(str(folder_of("llava")), backend_config=EngineConfig(num_gpu_blocks=32)) as pipe:
        conversation = LocalConversation(pipe, short)
        with pytest.raises(InvalidMessage, match="cannot be read"):
            conversation.attach("/absent.png")
        conversation.attach(file)
        first = list(conversation.answer("what?"))[-1].input_token_len
        second = list(conversation.answer("what?"))[-1].input_token_len
        assert first - second >= 16, "the image goes with one message"


class _Client:
    """Answers one word, and keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def chat_completions_v1(self, model: str, messages: Any, **options: Any) -> Iterator[Any]:
        self.sent.append(messages)
        yield {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}

    def chat_interactive_v1(self, prompt: str, image_url: Any = None, **options: Any) -> Iterator[Any]:
        self.sent.append((prompt, image_url))
        yield {"text": "yes", "finish_reason": "stop"}


def test_with_a_server(file: str) -> None:
    client = _Client()
    conversation = ClientConversation(cast(APIClient, client), "served")
    conversation.attach(file)
    list(conversation.answer("what?"))
    list(conversation.answer("and?"))
    first, _, second = client.sent[1]
    image, text = first["content"]
    assert text == {"type": "text", "text": "what?"}
    assert load_image(image["image_url"]["url"]).tobytes() == picture(1).tobytes()
    assert second["content"] == "and?"


def test_with_a_session_of_a_server(file: str) -> None:
    client = _Client()
    conversation = SessionConversation(cast(APIClient, client), 1)
    conversation.attach(file)
    list(conversation.answer("what?"))
    list(conversation.answer("and?"))
    (first, images), (second, none) = client.sent
    assert (first, second, none) == ("what?", "and?", None)
    assert load_image(images[0]).tobytes() == picture(1).tobytes()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["what?", "--image", "x.png"], ("tiny-vlm", "what?")),
        (["tiny-chat", "what?", "--image", "x.png"], ("tiny-chat", "what?")),
        (["tiny-vlm", "--image", "x.png"], ("tiny-vlm", "typed")),
        (["--image", "x.png"], ("tiny-vlm", "typed")),
        (["what?"], ("tiny-chat", "what?")),
        ([], ("tiny-chat", "typed")),
    ],
)
def test_which_model_answers(arguments: list[str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("typed\n"))
    options = commands._parser().parse(["run", *arguments])
    assert commands._model_and_prompt(options) == expected


def test_one_answer(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, options = str(folder_of("llava")), ["--num-gpu-blocks", "32", "--ignore-eos", "--max-new-tokens", "4"]
    assert cli.main(["run", model, "what?", "--image", file, "--image", file, *options]) == 0
    assert "cut after 4 tokens" in capsys.readouterr().err
    assert cli.main(["run", model, "what?", "--image", "/absent.png", *options]) == 1
    assert "cannot be read" in capsys.readouterr().err
