"""RequestOptions: a request's user, priority and timeout, and how its messages are rendered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from asyncllm.config.generation import GenerationConfig
from asyncllm.config.settings import MAX_COUNT, Settings
from asyncllm.config.tools import MAX_TOOLS, ToolChoice, check_tools, choice_of
from asyncllm.errors import InvalidParameter

__all__ = ["RequestKeywords", "RequestOptions", "TemplateVariables", "Tools"]

MAX_TEMPLATE_VARIABLES = 32


TemplateVariables = Annotated[
    dict[Annotated[str, Meta(max_length=64)], str | int | float | bool | None],
    Meta(
        max_length=MAX_TEMPLATE_VARIABLES,
        description="Variables of the checkpoint's chat template, such as enable_thinking.",
    ),
]


Tools = Annotated[
    list[dict[str, Any]],
    Meta(max_length=MAX_TOOLS, description="Tools that the model may call, in OpenAI's format."),
]


class RequestOptions(Settings, frozen=True, kw_only=True):
    """The keywords of every call that makes a request: user, priority, timeout and so on, and for calls with a chat
    template, how messages are rendered."""

    priority: Annotated[
        int, Meta(ge=-MAX_COUNT, le=MAX_COUNT, description="Lower values are served earlier; arrival breaks ties.")
    ] = 0
    timeout: Annotated[
        float | None,
        Meta(description="Seconds from the first await to the last token; then DeadlineExceeded. None: no limit."),
    ] = None
    user_id: Annotated[
        str | None, Meta(description="The user in the QoS file whose quota the request uses; None: the user 'default'.")
    ] = None
    cache_salt: Annotated[
        str | None,
        Meta(description="Only requests with equal salt share cached prefixes, which timing can reveal."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        Meta(description="Begin the assistant's turn after the messages. None: yes, unless the last is continued."),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        Meta(
            description="Continue the last message, which is the assistant's. None: if the last message is the "
            "assistant's and add_generation_prompt is also None."
        ),
    ] = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(
            description="auto: the model chooses. none: it sees the tools but calls none. required: it calls at least "
            "one. A function's name or allowed_tools: it calls one of these. None: auto."
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="False: the answer ends after its first call. None: there may be several.")
    ] = None
    thinking_budget: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_COUNT,
                description="Maximum number of reasoning tokens before the answer. None: no limit.",
            ),
        ]
        | None
    ) = None
    mm_processor_kwargs: Annotated[
        dict[str, int | float | str] | None,
        Meta(
            description="How images and videos are prepared, unless their own message part says otherwise: "
            "min_pixels, max_pixels, max_dynamic_patch, detail, fps, as far as the model's family supports them."
        ),
    ] = None
    separate_reasoning: Annotated[
        bool, Meta(description="Separate the model's reasoning from its answer, if its format is known.")
    ] = True

    @classmethod
    def own_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        for name in fields:
            if name in GenerationConfig.__struct_fields__:
                raise InvalidParameter(
                    f"{name} is a field of GenerationConfig. Pass gen_config=GenerationConfig({name}=...).", name
                )
            if name in ("enable_thinking", "reasoning_effort"):
                raise InvalidParameter(
                    f"{name} is a variable of the chat template. Pass chat_template_kwargs={{{name!r}: ...}}.", name
                )
        return super().own_fields(fields)

    @property
    def continues(self) -> bool | None:
        """Whether the last message is continued; None: if it is the assistant's."""
        if self.continue_final_message is None and self.add_generation_prompt is not None:
            return False
        return self.continue_final_message

    @property
    def choice(self) -> ToolChoice | None:
        """The tools that may be called; None: none of them."""
        return choice_of(self.tool_choice, self.tools)

    def template_field(self) -> str | None:
        """Return the first set field that concerns the chat template; None if there is none."""
        names = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "thinking_budget")
        return next((name for name in names if getattr(self, name) not in (None, {}, [])), None)

    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template besides the messages."""
        variables: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.tools:
            variables["tools"] = self.tools
        return variables

    def _check(self) -> None:
        self._check_texts("user_id", "cache_salt")
        if "tools" in (self.chat_template_kwargs or {}):
            raise InvalidParameter(
                "tools are not an entry of chat_template_kwargs. Pass them as tools=[...].", "chat_template_kwargs"
            )
        if self.tools:
            check_tools(self.tools)
        choice_of(self.tool_choice, self.tools)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt contradict each other: the answer goes on with the "
                "last message, or begins a new one. Set one of them.",
                "continue_final_message",
            )
        if self.timeout is not None and not (math.isfinite(self.timeout) and self.timeout > 0):
            raise InvalidParameter(
                f"timeout must be None or a number of seconds above 0 (given: {self.timeout}).", "timeout"
            )
        if self.cache_salt == "":
            raise InvalidParameter(
                "cache_salt is empty, which separates no prefixes. Use None, or some text.", "cache_salt"
            )


class RequestKeywords(TypedDict, total=False):
    """The fields of RequestOptions as keywords of a call."""

    priority: int
    timeout: float | None
    user_id: str | None
    cache_salt: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, str | int | float | bool | None] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    thinking_budget: int | None
    mm_processor_kwargs: Mapping[str, int | float | str] | None
    separate_reasoning: bool
