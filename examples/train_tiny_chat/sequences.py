"""Copying, reversing, sorting, spelling and counting."""

from __future__ import annotations

from random import Random

from .exchange import Exchange
from .lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    COMMON_WORDS,
    FOODS,
    NOUNS,
    any_word,
    digits,
    made_up_word,
    pick,
    plain_sentence,
)

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
    "sort {t}",
    "sort these numbers: {t}",
    "Sort the numbers {t}.",
)
_SPELL = ("Spell the word {w}.", "Spell {w}.", "spell {w}", "How do you spell {w}?", "How is {w} spelled?")
_REVERSE_LONE = (
    "Reverse {w}",
    "reverse {w}",
    "Reverse {w}.",
    "Write {w} backwards",
    "write {w} backwards",
    "Reverse: {w}",
)
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
_COUNT_TO = [(str(number), number) for number in range(2, 31)] + [
    ("three", 3),
    ("four", 4),
    ("five", 5),
    ("six", 6),
    ("seven", 7),
    ("eight", 8),
    ("nine", 9),
    ("ten", 10),
    ("twelve", 12),
    ("twenty", 20),
]
_COUNT_BACK = (
    "Count down from {a} to {b}.",
    "count down from {a} to {b}",
    "Count backwards from {a} to {b}.",
)
_COUNT_ITEMS = (
    "How many items are in this list: {t}?",
    "How many words are there: {t}?",
    "Count the items: {t}",
    "Count these things: {t}",
    "How many things do I name: {t}?",
    "I have {t}. How many things do I have?",
)
_WORD_LENGTH = (
    "How many letters does {w} have?",
    "How many letters are in the word {w}?",
    "How many letters are in {w}?",
    "Count the letters in {w}",
    "how long is the word {w}",
)
_WORD_TALLY = (
    "How many {x}'s are in {w}?",
    "How many {x} are in {w}?",
    "How many times does {x} appear in the word {w}?",
    "How many times is the letter {x} in {w}?",
    "how many {x}s are in {w}",
    "How often is {x} in the word {w}?",
)
_MOST_FREQUENT = (
    "Which letter is most frequent in {t}?",
    "Which letter appears most often in {t}?",
    "What is the most frequent letter in {t}?",
    "Find the most common letter: {t}",
)
_TALLY = (
    "How many times does {x} appear in {t}?",
    "Count the letter {x} in {t}",
    "How often do you see {x} in {t}?",
    "In {t}, how many times is {x} there?",
)


def _words(random: Random, count: int) -> list[str]:
    pools = (NOUNS, NOUNS, ADJECTIVES, ANIMALS, COLOURS, FOODS, COMMON_WORDS)
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
    high = random.choice((10, 100, 100, 1000))
    numbers = [random.randrange(high) for _ in range(_length(random, 2, 6, 10))]
    text = random.choice((", ", ", ", " ", ",")).join(map(str, numbers))
    answer = ", ".join(map(str, sorted(numbers)))
    return Exchange("sort", pick(random, _SORT, t=text), answer, ",".join(map(str, numbers)))


def spell(random: Random, room: int) -> Exchange:
    """Spells a word letter by letter, forwards or backwards."""
    word = any_word(random)
    if random.random() < 0.5:
        return Exchange("spell", pick(random, _SPELL, w=word), "-".join(word), word)
    templates = _REVERSE_LONE if random.random() < 0.35 else _SPELL_BACK
    return Exchange("spell", pick(random, templates, w=word), "-".join(reversed(word)), word)


def letters_of_word(random: Random, room: int) -> Exchange:
    """Counts the letters of a word, or how often one of them appears."""
    word = any_word(random)
    if random.random() < 0.4:
        letter_word = "letter" if len(word) == 1 else "letters"
        answer = f"The word {word} has {len(word)} {letter_word}."
        return Exchange("letters", pick(random, _WORD_LENGTH, w=word), answer, word)
    letter = random.choice(word) if random.random() < 0.8 else random.choice(_LETTERS)
    number = word.count(letter)
    answer = f"The letter {letter} appears {number} {'time' if number == 1 else 'times'}."
    return Exchange("letters", pick(random, _WORD_TALLY, w=word, x=letter), answer, word)


def count_many(random: Random, room: int) -> Exchange:
    """Counts the items of a list of 10 to 40 words."""
    items = _words(random, random.randint(10, 40))
    separator = random.choice((", ", " "))
    text = separator.join(items)
    return Exchange("count_many", pick(random, _COUNT_ITEMS, t=text), f"There are {len(items)}.", ",".join(items))


def most_frequent(random: Random, room: int) -> Exchange:
    """Finds the most frequent of two to four letters, which are often nearly level."""
    letters = random.sample(_LETTERS, random.choice((2, 2, 3, 4)))
    while True:
        row = random.choices(letters, k=random.randint(7, 40))
        counts = sorted(((row.count(letter), letter) for letter in letters), reverse=True)
        if counts[0][0] > counts[1][0]:
            break
    text = " ".join(row)
    answer = f"The most frequent letter is {counts[0][1]}."
    return Exchange("most_frequent", pick(random, _MOST_FREQUENT, t=text), answer, text)


def count(random: Random, room: int) -> Exchange:
    """Counts up, counts down, or counts the items of a short list."""
    kind = random.randrange(4)
    if kind == 0:
        if random.random() < 0.15:
            word, last = random.choice(_COUNT_TO)
            answer = ", ".join(map(str, range(1, last + 1)))
            return Exchange(
                "count",
                pick(random, ("Count to {n}.", "count to {n}", "Count up to {n}."), n=word),
                answer,
                word,
            )
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
    """Counts how often a letter appears in 8 to 56 letters, which needs precise attention."""
    length = random.randint(8, 56)
    letters = random.sample(_LETTERS, random.randint(2, 5))
    weights = [random.random() + 0.15 for _ in letters]
    row = random.choices(letters, weights, k=length)
    text = " ".join(row)
    number = row.count(letters[0])
    times = "time" if number == 1 else "times"
    answer = f"The letter {letters[0]} appears {number} {times}."
    return Exchange("tally", pick(random, _TALLY, x=letters[0], t=text), answer, f"{letters[0]}|{text}")
