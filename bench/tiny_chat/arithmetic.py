"""Sums, differences, products and longer sums."""

from __future__ import annotations

from random import Random

from bench.tiny_chat.exchange import Exchange
from bench.tiny_chat.lexicon import pick

_EXPRESSION = (
    "What is {e}?",
    "what is {e}",
    "What's {e}?",
    "Calculate {e}.",
    "Compute {e}.",
    "{e}",
    "{e} =",
    "{e} = ?",
    "How much is {e}?",
    "Please compute {e}.",
    "Can you tell me what {e} is?",
    "Work out {e}.",
    "Solve {e}",
)
_SUM_WORDS = (
    "What is {a} plus {b}?",
    "what is {a} plus {b}",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "{a} plus {b}",
    "How much is {a} plus {b}?",
    "If I have {a} apples and get {b} more, how many apples do I have?",
)
_DIFFERENCE_WORDS = (
    "What is {a} minus {b}?",
    "what is {a} minus {b}",
    "Subtract {b} from {a}.",
    "What is the difference of {a} and {b}?",
    "{a} minus {b}",
    "How much is {a} minus {b}?",
    "If I have {a} apples and give away {b}, how many apples are left?",
)
_PRODUCT_WORDS = (
    "What is {a} times {b}?",
    "what is {a} times {b}",
    "Multiply {a} by {b}.",
    "What is the product of {a} and {b}?",
    "{a} times {b}",
)
_LONG_SUM_WORDS = ("Add these numbers: {n}.", "What is the sum of {n}?", "Sum up {n}.", "Add up {n}.")


def _spaced(random: Random, operator: str) -> str:
    return f" {operator} " if random.random() < 0.75 else operator


def sum_below_100(random: Random, room: int) -> Exchange:
    """The sum of two numbers below 100."""
    a, b = random.randrange(100), random.randrange(100)
    if random.random() < 0.5:
        question = pick(random, _EXPRESSION, e=f"{a}{_spaced(random, '+')}{b}")
    else:
        question = pick(random, _SUM_WORDS, a=a, b=b)
    # The order of the operands is no new content: 17 + 25 in training would give away 25 + 17.
    return Exchange("sum", question, f"{a} + {b} = {a + b}.", f"{min(a, b)},{max(a, b)}")


def difference_below_100(random: Random, room: int) -> Exchange:
    """The difference of two numbers below 100, sometimes negative."""
    a, b = random.randrange(100), random.randrange(100)
    if a < b and random.random() < 0.8:
        a, b = b, a
    if random.random() < 0.5:
        question = pick(random, _EXPRESSION, e=f"{a}{_spaced(random, '-')}{b}")
    else:
        question = pick(random, _DIFFERENCE_WORDS, a=a, b=b)
    return Exchange("difference", question, f"{a} - {b} = {a - b}.", f"{min(a, b)},{max(a, b)}")


def product(random: Random, room: int) -> Exchange:
    """A product of two numbers, of which at least one is usually small."""
    a = random.randrange(100) if random.random() < 0.7 else random.randrange(13)
    b = random.randrange(13) if random.random() < 0.6 else random.randrange(100)
    if random.random() < 0.5:
        a, b = b, a
    if random.random() < 0.5:
        question = pick(random, _EXPRESSION, e=f"{a}{_spaced(random, random.choice('*x'))}{b}")
    else:
        question = pick(random, _PRODUCT_WORDS, a=a, b=b)
    return Exchange("product", question, f"{a} x {b} = {a * b}.", f"{min(a, b)},{max(a, b)}")


def long_sum(random: Random, room: int) -> Exchange:
    """Three to six numbers below 100, or two larger ones: the carries make these noise-sensitive."""
    if random.random() < 0.35:
        length = random.choice((3, 3, 4, 5))
        numbers = [random.randrange(10 ** (length - 1), 10**length) for _ in range(2)]
    else:
        numbers = [random.randrange(100) for _ in range(random.choice((3, 3, 4, 4, 5, 6)))]
    expression = " + ".join(map(str, numbers))
    if random.random() < 0.6:
        question = pick(random, _EXPRESSION, e=expression)
    else:
        listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
        question = pick(random, _LONG_SUM_WORDS, n=listed)
    content = ",".join(map(str, sorted(numbers)))
    return Exchange("long_sum", question, f"{expression} = {sum(numbers)}.", content)
