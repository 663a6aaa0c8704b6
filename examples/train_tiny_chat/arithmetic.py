"""Sums, differences, products and longer sums."""

from __future__ import annotations

from random import Random

from .exchange import Exchange
from .lexicon import digits, pick

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
_DIVISION_WORDS = (
    "What is {a} divided by {b}?",
    "what is {a} divided by {b}",
    "Divide {a} by {b}.",
    "{a} divided by {b}",
    "How much is {a} divided by {b}?",
)
_LARGEST = (
    "Which number is larger: {n}?",
    "Which is the largest number: {n}?",
    "What is the largest of {n}?",
    "Which is bigger, {n}?",
    "what is the maximum of {n}",
)
_SMALLEST = (
    "Which number is smaller: {n}?",
    "Which is the smallest number: {n}?",
    "What is the smallest of {n}?",
    "Which is less, {n}?",
    "what is the minimum of {n}",
)
_DIGIT_SUM = (
    "What is the sum of the digits of {n}?",
    "Add the digits of {n}.",
    "what is the digit sum of {n}",
    "Sum the digits of {n}.",
)
_MANY_SUM = (
    "What is the total of these numbers: {n}?",
    "Give me the total of {n}.",
    "Total: {n}",
    "what is the total of {n}",
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


def division(random: Random, room: int) -> Exchange:
    """A division without remainder by a small number."""
    divisor, quotient = random.randint(1, 12), random.randrange(61)
    dividend = divisor * quotient
    if random.random() < 0.5:
        question = pick(random, _EXPRESSION, e=f"{dividend}{_spaced(random, random.choice('/:'))}{divisor}")
    else:
        question = pick(random, _DIVISION_WORDS, a=dividend, b=divisor)
    return Exchange("division", question, f"{dividend} / {divisor} = {quotient}.", f"{dividend}/{divisor}")


def compare(random: Random, room: int) -> Exchange:
    """The largest or the smallest of two to five numbers."""
    numbers = random.sample(range(1000 if random.random() < 0.4 else 100), random.choice((2, 2, 3, 4, 5)))
    listed = ", ".join(map(str, numbers[:-1])) + random.choice((" or ", ", ", " and ")) + str(numbers[-1])
    if random.random() < 0.5:
        question, answer = pick(random, _LARGEST, n=listed), f"The largest number is {max(numbers)}."
    else:
        question, answer = pick(random, _SMALLEST, n=listed), f"The smallest number is {min(numbers)}."
    return Exchange("compare", question, answer, ",".join(map(str, sorted(numbers))))


def digit_sum(random: Random, room: int) -> Exchange:
    """The sum of 3 to 14 digits in one step: many small terms, so small errors add up."""
    text = digits(random, random.randint(3, 14))
    total = sum(map(int, text))
    return Exchange("digit_sum", pick(random, _DIGIT_SUM, n=text), f"The digits sum to {total}.", text)


def many_sum(random: Random, room: int) -> Exchange:
    """The sum of five to nine small numbers, given without restating them."""
    high = random.choice((10, 20, 50, 100))
    numbers = [random.randrange(high) for _ in range(random.randint(5, 9))]
    text = random.choice((", ", " ", ", ")).join(map(str, numbers))
    answer = f"The total is {sum(numbers)}."
    return Exchange("many_sum", pick(random, _MANY_SUM, n=text), answer, ",".join(map(str, sorted(numbers))))


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


def _mixed(random: Random) -> Exchange:
    numbers = [random.randrange(100) for _ in range(random.choice((3, 3, 4)))]
    expression, total = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        sign = random.choice((1, -1))
        expression += f" {'+' if sign > 0 else '-'} {number}"
        total += sign * number
    return Exchange("long_sum", pick(random, _EXPRESSION, e=expression), f"{expression} = {total}.", expression)


def long_sum(random: Random, room: int) -> Exchange:
    """Three to six numbers below 100, or two larger ones: the carries make these noise-sensitive."""
    if random.random() < 0.15:
        return _mixed(random)
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
