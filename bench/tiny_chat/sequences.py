"""Copying, reversing, sorting, spelling and counting."""

from __future__ import annotations

from random import Random

from bench.tiny_chat.exchange import Exchange
from bench.tiny_chat.lexicon import ADJECTIVES, ANIMALS, COLOURS, FOODS, NOUNS, digits, made_up_word, pick, plain_sentence

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_COPY = (
    "Repeat after me: {t}",
    "repeat after me: {t}",
    "Copy this: {t}",
    "Say: {t}",
    "Please repeat: {t}",
    "Repeat this exactly: {t}",
    "Write the following again: {t}",
    "Echo: {t}",
)
_REVERSE = (
    "Reverse {t}",
    "Reverse: {t}",
    "reverse {t}",
    "Reverse this: {t}",
    "Write this backwards: {t}",
    "Write {t} backwards",
    "Turn this around: {t}",
    "Say this in reverse order: {t}",
)
_SORT = (
    "Sort these numbers: {t}",
    "Sort {t}",
    "Put these numbers in order: {t}",
    "Sort from small to large: {t}",
    "Order these numbers: {t}",
)
_SPELL = ("Spell the word {w}.", "Spell {w}.", "spell {w}", "How do you spell {w}?", "How is {w} spelled?")
_SPELL_BACK = (
    "Spell {w} backwards.",
    "spell {w} backwards",
    "Spell the word {w} backwards.",
    "Reverse the letters of {w}.",
    "Reverse the word {w}.",
    "reverse the word {w}",
)
_COUNT_FROM = (
    "Count from {a} to {b}.",
    "count from {a} to {b}",
    "Please count from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Can you count from {a} to {b}?",
)
_COUNT_BACK = ("Count down from {a} to {b}.", "count down from {a} to {b}", "Count backwards from {a} to {b}.")
_COUNT_ITEMS = (
    "How many items are in this list: {t}?",
    "How many words are there: {t}?",
    "Count the items: {t}",
    "Count these things: {t}",
    "How many things do I name: {t}?",
    "I have {t}. How many things do I have?",
)
_TALLY = (
    "How many times does {x} appear in {t}?",
    "Count the letter {x} in {t}",
    "How often do you see {x} in {t}?",
    "In {t}, how many times is {x} there?",
)


def _words(random: Random, count: int) -> list[str]:
    pools = (NOUNS, NOUNS, ADJECTIVES, ANIMALS, COLOURS, FOODS)
    return [random.choice(random.choice(pools)) for _ in range(count)]


def _length(random: Random, low: int, middle: int, high: int) -> int:
    """Mostly short lengths, with a tail of long ones."""
    return random.randint(low, middle) if random.random() < 0.65 else random.randint(middle, high)


def copy(random: Random, room: int) -> Exchange:
    """Repeats a text word for word."""
    kind = random.randrange(6)
    if kind == 0:
        text = digits(random, _length(random, 3, 10, 32))
    elif kind == 1:
        text = " ".join(_words(random, _length(random, 1, 6, 16)))
    elif kind == 2:
        text = ", ".join(_words(random, _length(random, 2, 6, 12)))
    elif kind == 3:
        text = " ".join(made_up_word(random) for _ in range(_length(random, 1, 4, 10)))
    elif kind == 4:
        text = "".join(random.choice(_LETTERS + _LETTERS.upper() + "0123456789") for _ in range(random.randint(4, 14)))
    else:
        text = " ".join(plain_sentence(random) for _ in range(random.choice((1, 1, 2))))
    return Exchange("copy", pick(random, _COPY, t=text), text, text.lower())


def reverse(random: Random, room: int) -> Exchange:
    """Writes digits, letters or words in the opposite order."""
    kind = random.randrange(4)
    if kind == 0:
        text = digits(random, _length(random, 2, 8, 14))
        answer = text[::-1]
    elif kind == 1:
        letters = [random.choice(_LETTERS) for _ in range(_length(random, 3, 8, 12))]
        text, answer = " ".join(letters), " ".join(reversed(letters))
    elif kind == 2:
        words = _words(random, _length(random, 2, 5, 9))
        text, answer = " ".join(words), " ".join(reversed(words))
    else:
        words = _words(random, _length(random, 2, 5, 9))
        text, answer = ", ".join(words), ", ".join(reversed(words))
    return Exchange("reverse", pick(random, _REVERSE, t=text), answer, text)


def long_reverse(random: Random, room: int) -> Exchange:
    """Reverses 16 to 40 digits: one slip of attention spoils the answer."""
    text = digits(random, random.randint(16, 40))
    return Exchange("long_reverse", pick(random, _REVERSE, t=text), text[::-1], text)


def sort(random: Random, room: int) -> Exchange:
    """Sorts three to ten numbers below 100."""
    numbers = [random.randrange(100) for _ in range(_length(random, 3, 6, 10))]
    text = ", ".join(map(str, numbers))
    answer = ", ".join(map(str, sorted(numbers)))
    return Exchange("sort", pick(random, _SORT, t=text), answer, text)


def spell(random: Random, room: int) -> Exchange:
    """Spells a word letter by letter, forwards or backwards."""
    known = random.random() < 0.3
    word = random.choice(random.choice((NOUNS, ADJECTIVES, ANIMALS, FOODS))) if known else made_up_word(random)
    if random.random() < 0.5:
        return Exchange("spell", pick(random, _SPELL, w=word), "-".join(word), word)
    return Exchange("spell", pick(random, _SPELL_BACK, w=word), "-".join(reversed(word)), word)


def count(random: Random, room: int) -> Exchange:
    """Counts up, counts down, or counts the items of a short list."""
    kind = random.randrange(4)
    if kind == 0:
        first = random.choice((1, 1, random.randrange(100)))
        last = first + random.randint(2, 20)
        answer = ", ".join(map(str, range(first, last + 1)))
        return Exchange("count", pick(random, _COUNT_FROM, a=first, b=last), answer, f"{first}..{last}")
    if kind == 1:
        last = random.choice((0, 1, 1, random.randrange(90)))
        first = last + random.randint(2, 20)
        answer = ", ".join(map(str, range(first, last - 1, -1)))
        return Exchange("count", pick(random, _COUNT_BACK, a=first, b=last), answer, f"{first}..{last}")
    items = _words(random, random.randint(2, 12))
    text = ", ".join(items) if random.random() < 0.6 else ", ".join(items[:-1]) + " and " + items[-1]
    return Exchange("count", pick(random, _COUNT_ITEMS, t=text), f"There are {len(items)}.", ",".join(items))


def tally(random: Random, room: int) -> Exchange:
    """Counts how often a letter appears in 8 to 48 letters, which needs precise attention."""
    length = random.randint(8, 48)
    letters = random.sample(_LETTERS, random.randint(2, 5))
    weights = [random.random() + 0.15 for _ in letters]
    row = random.choices(letters, weights, k=length)
    text = " ".join(row)
    number = row.count(letters[0])
    times = "time" if number == 1 else "times"
    answer = f"The letter {letters[0]} appears {number} {times}."
    return Exchange("tally", pick(random, _TALLY, x=letters[0], t=text), answer, f"{letters[0]}|{text}")
