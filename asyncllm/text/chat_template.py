"""ChatTemplate: how a model's prompts are written, by the checkpoint's template, a built-in one, or the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

import msgspec

from asyncllm.config import Capability, ChatTemplateConfig
from asyncllm.config.chat_template import PARTS
from asyncllm.errors import (
    InvalidCheckpoint,
    InvalidMessage,
    InvalidParameter,
    UnsupportedModel,
    short,
)
from asyncllm.text.checkpoint_files import TokenSettings, read_json_object
from asyncllm.text.messages import checked_messages, checked_prompt
from asyncllm.text.templates.builtin import AHEAD_OF_CHECKPOINTS
from asyncllm.text.templates.composed import FILLED, uncomposed
from asyncllm.text.templates.jinja_template import JinjaTemplate, checkpoint_template
from asyncllm.text.templates.registry import MODELS, builtin_name
from asyncllm.text.templates.renderers import ComposedRenderer, Ending, JinjaRenderer, Renderer
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Message

__all__ = ["SWITCHES", "ChatTemplate"]

SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Variables that switch thinking in Qwen's and DeepSeek's templates. A template without them never thinks, so False is
always satisfied."""
ASSETS = Path(__file__).parents[1] / "assets" / "templates"
WHOLE = {"deepseek-v3.2": "deepseek-v3.2", "deepseek-v32": "deepseek-v3.2"}
"""Built-in template that writes tools and reasoning too -> its file in `ASSETS`. With parts of the caller's, the
composed one of this name applies."""
ENDS = frozenset({"<｜end▁of▁sentence｜>"})
"""Special tokens that end the answers of these templates."""
CHECKPOINT = "hf"
"""LMDeploy's name for the checkpoint's own template."""


class ChatTemplate:
    """The chat format of one model. Immutable; usable from several threads at once."""

    def __init__(
        self, name: str, renderer: Renderer, *, capability: Capability = "chat", stop_words: Sequence[str] = ()
    ) -> None:
        self.name = name
        """The built-in or registered name; "checkpoint" for a Jinja template of the checkpoint or of the user."""
        self.capability = capability
        self.stop_words = tuple(stop_words)
        """Texts that end an answer, besides the model's end-of-sequence tokens. Some spell special tokens."""
        self.renderer = renderer
        """Renders checked messages."""

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that `render` accepts."""
        return self.renderer.variables

    @property
    def source(self) -> str | None:
        """Source of a Jinja template; None for any other kind."""
        return self.renderer.source

    @property
    def reads_tools(self) -> bool:
        """Whether the template uses the tools that may be called, which `render` accepts as a variable."""
        return self.capability == "chat" and self.renderer.reads_tools

    @classmethod
    def open(cls, path: Path, config: ChatTemplateConfig | str | None = None) -> Self:
        """Return the template for the checkpoint in the folder `path`.

        The first of these applies: the template that `config` names (a str is a name, the path of a JSON file or JSON
        text; "hf" is the checkpoint's own, which has to exist); the checkpoint's own Jinja template, unless it omits a
        prompt's beginning; the built-in one for the architecture in config.json; "base", which concatenates the texts.

        Raises InvalidParameter for an unknown name or fields that contradict each other, and InvalidCheckpoint when a
        template does not compile.
        """
        config = _as_config(config)
        folder = Path(path)
        parts = config.parts
        if config.model_name == CHECKPOINT and MODELS.get(CHECKPOINT) is None:
            return cls._own(folder, config)
        if config.model_name is not None:
            if config.chat_template is not None or config.model_path is not None:
                raise InvalidParameter(
                    "ChatTemplateConfig has both model_name and a Jinja template (chat_template or model_path). "
                    "Give one of them.",
                    "model_name",
                )
            return cls._composed(_known_name(config.model_name, parts), config, parts)
        name = builtin_name(read_json_object(folder / "config.json"))
        whole = name in AHEAD_OF_CHECKPOINTS and not config.names_template
        jinja = None if parts or whole else _jinja(folder, config)
        if jinja is not None:
            return cls._of_jinja(jinja, config, TokenSettings.read(folder).special_texts())
        if parts and (config.chat_template is not None or config.model_path is not None):
            raise InvalidParameter(
                f"ChatTemplateConfig has a Jinja template, which the fields {', '.join(parts)} have no part in. "
                f"Leave them out.",
                next(iter(parts)),
            )
        return cls._composed(name, config, parts)

    @classmethod
    def _own(cls, folder: Path, config: ChatTemplateConfig) -> Self:
        """Return the checkpoint's Jinja template, which has none of the parts of a composed one."""
        tokens = TokenSettings.read(folder)
        others = [
            *config.parts,
            *(name for name in ("chat_template", "model_path") if getattr(config, name) is not None),
        ]
        if others:
            raise InvalidParameter(
                f"ChatTemplateConfig names the checkpoint's own template ({CHECKPOINT!r}) and has {', '.join(others)}, "
                f"which it has no part in. Give one of both.",
                "model_name",
            )
        jinja = checkpoint_template(folder, tokens.named)
        if jinja is None:
            raise InvalidCheckpoint(
                f"ChatTemplateConfig names the checkpoint's own template ({CHECKPOINT!r}), and {folder} has none "
                f"(chat_template.jinja, or chat_template in tokenizer_config.json). Leave model_name out."
            )
        return cls._of_jinja(jinja, config, tokens.special_texts())

    @classmethod
    def of_adapter(
        cls, name: str, folder: Path, model: Path | None, tokenizer: Tokenizer, config: ChatTemplateConfig | None = None
    ) -> Self | None:
        """Return the template for conversations with the LoRA adapter `name`; None for the model's own.

        The first of these applies: the registered or built-in template with the adapter's name; the model's, if
        `config` names it or `model`, its folder, is None; the Jinja template in the adapter's folder, with the model's
        special tokens where the folder names none; the model's.

        Raises InvalidParameter if a registered class cannot be built, InvalidCheckpoint for a damaged file and when a
        template does not compile, and UnsupportedModel if the folder's has tokens that `tokenizer`, the model's, lacks.
        """
        if MODELS.get(name) is not None:
            return cls._composed(name, ChatTemplateConfig(), {})
        config = config or ChatTemplateConfig()
        if model is None or config.names_template:
            return None
        tokens, own = TokenSettings.read(model), TokenSettings.read(folder)
        named = {**tokens.named, **own.named}
        jinja, known = checkpoint_template(folder, named), checkpoint_template(model, tokens.named)
        if jinja is None or (known is not None and known.source == jinja.source and tokens.named == named):
            return None
        written = jinja.source + "".join(text for key, text in own.named.items() if key in jinja.source)
        for token, number in ((each.content, own_id) for own_id, each in own.added.items()):
            if token in written and tokenizer.token_id(token) != number:
                raise UnsupportedModel(
                    f"{folder}: the adapter's chat template has {short(token)}, token {number} of the adapter's "
                    f"tokenizer, and the model's has {tokenizer.token_id(token)} for it: prompts would not be those of "
                    f"the training. Choose a template by chat_template_config, take the adapter's out of its folder, "
                    f"or merge it into a checkpoint with its tokenizer."
                )
        return cls._of_jinja(jinja, config, tokens.special_texts() | own.special_texts())

    @classmethod
    def _of_jinja(cls, jinja: JinjaTemplate, config: ChatTemplateConfig, special: frozenset[str]) -> Self:
        renderer = JinjaRenderer(jinja, config.meta_instruction, special)
        return cls._configured("checkpoint", renderer, config, [renderer.end_of_turn or ""])

    @classmethod
    def _composed(cls, name: str, config: ChatTemplateConfig, parts: dict[str, str]) -> Self:
        whole = None if parts or name in MODELS.users else WHOLE.get(name)
        if whole is not None:
            source = (ASSETS / f"{whole}.jinja").read_text(encoding="utf-8")
            renderer = JinjaRenderer(JinjaTemplate(source, {}, f"the built-in {name}"), config.meta_instruction, ENDS)
            return cls._configured(name, renderer, config, [renderer.end_of_turn or ""])
        overrides: dict[str, Any] = dict(parts)
        for field in ("meta_instruction", "capability", "stop_words"):
            if getattr(config, field) is not None:
                overrides[field] = getattr(config, field)
        template = MODELS.build(name, overrides)
        stop_words = getattr(template, "stop_words", None) or ()
        if "capability" not in overrides:
            config = msgspec.structs.replace(config, capability=getattr(template, "capability", None) or "chat")
        return cls._configured(name, ComposedRenderer(name, template), config, stop_words)

    @classmethod
    def _configured(cls, name: str, renderer: Renderer, config: ChatTemplateConfig, stop_words: Sequence[str]) -> Self:
        capability = config.capability or "chat"
        if config.stop_words is not None:
            stop_words = config.stop_words
        elif capability == "infilling":
            stop_words = [FILLED, f"\u2581{FILLED}"]  # As text, and as the special token in most checkpoints.
        elif capability != "chat":
            stop_words = []
        return cls(name, renderer, capability=capability, stop_words=[word for word in stop_words if word])

    def end_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of the stop words that are special tokens."""
        found = (tokenizer.token_id(word) for word in self.stop_words)
        return [token for token in found if token is not None and token in tokenizer.special_token_ids]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, up to the position where the answer begins.

        If the last message is the assistant's, it is the beginning of the answer and ends the text; with
        `continue_final_message=False` a new answer follows it. Without `add_generation_prompt` the text ends with the
        complete last message, unless `continue_final_message` is set. `variables` are variables that the checkpoint's
        template reads. With the capabilities "completion" and "python" the text is the concatenation of the contents;
        with "infilling" the last content becomes Code Llama's prompt.

        Raises InvalidMessage for malformed messages and those that the template refuses, UnsupportedFeature for media
        and for features that the template lacks, InvalidParameter for an unsuitable message to continue and for unknown
        variables.
        """
        checked = checked_messages(messages)
        answered = checked[-1]["role"] == "assistant"
        if continue_final_message and not answered:
            raise InvalidParameter(
                f"continue_final_message is for a last message of the assistant's, and it is the "
                f"{checked[-1]['role']}'s. Leave it out, or end with the beginning of the answer.",
                "continue_final_message",
            )
        if self.capability != "chat":
            return uncomposed(checked, self.capability)
        ending: Ending = "answer" if add_generation_prompt else "closed"
        if continue_final_message or (continue_final_message is None and answered and add_generation_prompt):
            ending = "continued"
        return self.renderer.render(checked, ending, self._effective_variables(variables or {}))

    def _effective_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables without neutral values that the template does not know."""
        known = self.variables
        return {
            name: value
            for name, value in variables.items()
            if name in known or not (value is None or (name in SWITCHES and not value))
        }

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """Return the text of one user turn. `sequence_start=False`: it follows earlier turns of the session."""
        checked_prompt(prompt)
        if sequence_start or self.capability != "chat":
            return self.render([{"role": "user", "content": prompt}])
        return self.renderer.later_turn(prompt)

    def messages2prompt(self, messages: str | Sequence[Message], sequence_start: bool = True) -> str:
        """Return the prompt text of a text or of a conversation. `sequence_start=False` is for a text or one user
        message."""
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        if sequence_start:
            return self.render(messages)
        checked = checked_messages(messages)
        if len(checked) != 1 or checked[0]["role"] != "user":
            raise InvalidMessage(
                "A later turn of a session is one user message, but "
                f"{', '.join(message['role'] for message in checked)} were given. The session knows what came before; "
                "send only what is new."
            )
        return self.get_prompt(checked[0]["content"], False)

    def continuation(
        self,
        messages_before: Sequence[Message],
        answer: str,
        new_messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return what follows `render(messages_before) + answer` when the conversation continues with `new_messages`.

        It begins with the mark that ends the answer (such as "<|im_end|>\\n"), which the token that stopped the model
        may spell, and ends where the next answer begins. White space that the template adds or removes around an answer
        makes no difference. Return None if the template rewrites the history: then the whole conversation has to be
        rendered again.
        """
        before = self.render(messages_before, variables=variables)
        if self.capability != "chat":
            return self.render(new_messages)
        history = checked_messages(messages_before)
        text = answer
        if history[-1]["role"] == "assistant":
            text = (history.pop()["content"] or "") + answer
        conversation = [*history, {"role": "assistant", "content": text}, *checked_messages(new_messages)]
        whole = self.render(conversation, variables=variables)
        if whole.startswith(before + answer):
            return whole[len(before) + len(answer) :]
        stem, core = before.rstrip(), answer.strip()
        if not core or not whole.startswith(stem):
            return None
        start = len(stem) + len(whole[len(stem) :]) - len(whole[len(stem) :].lstrip())
        return whole[start + len(core) :] if whole.startswith(core, start) else None


def _as_config(config: ChatTemplateConfig | str | None) -> ChatTemplateConfig:
    if config is None:
        return ChatTemplateConfig()
    if isinstance(config, str):
        if config.endswith(".json") or config.lstrip().startswith("{"):
            return ChatTemplateConfig.from_json(config)
        return ChatTemplateConfig(model_name=config)
    if not isinstance(config, ChatTemplateConfig):
        raise InvalidParameter(
            f"chat_template_config is of type {type(config).__name__}. Give a ChatTemplateConfig, a template's name or "
            f"the path of a JSON file.",
            "chat_template_config",
        )
    return config.checked()


def _known_name(name: str, parts: dict[str, str]) -> str:
    """Return `name`, which may be new if it comes with the parts of a new template."""
    if MODELS.get(name) is not None or parts:
        return name
    near = get_close_matches(name, MODELS.names(), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise InvalidParameter(
        f"There is no chat template {name!r}.{hint} `asyncllm list` names them all; a new one needs at least one of "
        f"the fields {', '.join(PARTS)}, or a class registered in MODELS.",
        "chat_template_config",
    )


def _jinja(folder: Path, config: ChatTemplateConfig) -> JinjaTemplate | None:
    """Return the user's Jinja template, as text or from a folder, or else the checkpoint's; None if there is none."""
    variables = TokenSettings.read(folder).named
    if config.chat_template is not None:
        return JinjaTemplate(config.chat_template, variables, "ChatTemplateConfig.chat_template")
    if config.model_path is None:
        return checkpoint_template(folder, variables)
    other = Path(config.model_path)
    template = checkpoint_template(other, TokenSettings.read(other).named)
    if template is None:
        raise InvalidCheckpoint(
            f"ChatTemplateConfig.model_path is {config.model_path!r}, where there is no chat template (chat_template."
            f"jinja, or chat_template in tokenizer_config.json). Give a folder that has one."
        )
    return template
