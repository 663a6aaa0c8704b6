"""Prompts for text between two others ("fill in the middle"), in the forms that code models were trained on.

The forms are from the models' cards and from arXiv 2207.14255. A model's form is recognized by the marks in its
tokenizer.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncllm.text.tokenizer import Tokenizer

__all__ = ["FillIn", "fill_in_of"]


class FillIn(NamedTuple):
    """One form of fill-in-the-middle prompts."""

    form: str
    """The prompt, with placeholders {prefix} and {suffix}."""
    marks: tuple[str, ...]
    """Tokens that the tokenizer of such a model has; none of them belongs in an answer."""
    ends: tuple[str, ...] = ()
    """Additional tokens that end an answer, if the tokenizer has them."""

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the prompt for the text between the two."""
        before, _, rest = self.form.partition("{prefix}")
        if "{suffix}" in before:
            start, _, between = before.partition("{suffix}")
            return f"{start}{suffix}{between}{prefix}{rest}"
        between, _, end = rest.partition("{suffix}")
        return f"{before}{prefix}{between}{suffix}{end}"

    def stop_words(self, tokenizer: Tokenizer) -> list[str]:
        """Return the tokens that end an answer."""
        return [each for each in (*self.marks, *self.ends) if tokenizer.token_id(each) is not None]


FORMS = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma.
    FillIn(
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder 1 and 2, Granite Code.
    FillIn(
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    # SantaCoder.
    FillIn(
        "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<fim-pad>",),
    ),
    # DeepSeek-Coder, and V2 and V3, which share its vocabulary.
    FillIn(
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ),
    # Seed-Coder.
    FillIn(
        "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>",
        ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
    ),
    # Codestral and newer Mistral models.
    FillIn("[SUFFIX]{suffix}[PREFIX]{prefix}", ("[SUFFIX]", "[PREFIX]"), ("[MIDDLE]",)),
)


def fill_in_of(tokenizer: Tokenizer) -> FillIn | None:
    """Return the form of a model's prompts, or None if its tokenizer lacks the marks of every form."""
    known = (form for form in FORMS if all(tokenizer.token_id(mark) is not None for mark in form.marks))
    return next(known, None)
