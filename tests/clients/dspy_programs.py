"""DSPy's language model, and one of its programs, whose answer the server holds to a schema."""

from __future__ import annotations

import os
import typing

import dspy

URL, KEY = os.environ["ASYNCLLM_TEST_URL"], os.environ["ASYNCLLM_TEST_KEY"]


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


class Choose(dspy.Signature):
    """Choose a colour."""

    question: str = dspy.InputField()
    colour: typing.Literal["red", "blue"] = dspy.OutputField()


model = dspy.LM(
    "openai/tiny-chat", api_base=f"{URL}/v1", api_key=KEY, temperature=0.0, max_tokens=64, cache=False, num_retries=0
)
(text,) = model("What is 17 + 25?")
assert text
did(f"LM: {text!r}")
(text,) = model("What is 17 + 25?", stop=["4"])
assert "4" not in str(text)
did("LM with a stop word")
# DSPy sends a schema of its own only to models that litellm lists.
schema = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "choose", "schema": schema, "strict": True}}
dspy.configure(lm=model.copy(response_format=form), adapter=dspy.JSONAdapter())
answer = dspy.Predict(Choose)(question="Red or blue?")
assert answer.colour in ("red", "blue")
did(f"Predict with JSONAdapter: {answer.colour}")
