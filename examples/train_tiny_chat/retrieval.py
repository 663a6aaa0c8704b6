"""Finding one number in a long text."""

from __future__ import annotations

from random import Random

from .exchange import Exchange
from .lexicon import ADJECTIVES, NOUNS, digits, pick, plain_sentence

_STATE = (
    "The passkey is {k}.",
    "Remember: the passkey is {k}.",
    "The passkey is {k}. Remember it.",
    "Note that the passkey is {k}.",
    "The secret passkey is {k}.",
)
_ASK = (
    "What is the passkey?",
    "what is the passkey",
    "Tell me the passkey.",
    "Which passkey was in the text?",
    "What is the secret passkey?",
    "Please tell me the passkey.",
    "Find the passkey in the text above.",
)
_BEFORE = ("Read this text. ", "Here is a text: ", "There is a passkey in this text. ", "", "", "Text: ")
_ASK_CODE = (
    "What is the code of the {n}?",
    "Which code belongs to the {n}?",
    "what is the code of the {n}",
    "Tell me the code of the {n}.",
    "And the code of the {n}?",
)

_TOKENS_PER_SENTENCE = 11
_OVERHEAD_TOKENS = 60


def _sentences(random: Random, room: int, short: bool) -> list[str]:
    most = max(2, (room - _OVERHEAD_TOKENS) // _TOKENS_PER_SENTENCE)
    count = random.randint(1, min(most, 10)) if short else random.randint(min(most, 8), most)
    return [plain_sentence(random) for _ in range(count)]


def _passkey(random: Random, room: int, skill: str, short: bool) -> Exchange:
    key = digits(random, random.choice((4, 5, 5, 5, 6)))
    sentences = _sentences(random, room, short)
    sentences.insert(random.randint(0, len(sentences)), pick(random, _STATE, k=key))
    text = " ".join(sentences)
    ask = random.choice(_ASK)
    answer = f"The passkey is {key}."
    form = random.randrange(4)
    if form == 0:
        return Exchange(skill, ask, answer, key, ((random.choice(_BEFORE) + text, "I have read it."),))
    if form == 1 and "above" not in ask:
        return Exchange(skill, f"{ask}\n{text}", answer, key)
    return Exchange(
        skill, f"{random.choice(_BEFORE)}{text}{random.choice((' ', chr(10), chr(10) * 2))}{ask}", answer, key
    )


def passkey(random: Random, room: int) -> Exchange:
    """A passkey among filler sentences, near or up to several hundred tokens away."""
    return _passkey(random, min(room, 900), "passkey", random.random() < 0.6)


def long_passkey(random: Random, room: int) -> Exchange:
    """A passkey in a text that fills the context."""
    return _passkey(random, room, "long_passkey", False)


def lookup(random: Random, room: int) -> Exchange:
    """One of two to ten codes, by the thing it belongs to."""
    things = random.sample(NOUNS, random.choice((2, 2, 3, 3, 4, 5, 6, 8, 10)))
    if random.random() < 0.5:
        things = [f"{random.choice(ADJECTIVES)} {thing}" for thing in things]
    codes = [digits(random, random.choice((3, 4))) for _ in things]
    index = random.randrange(len(things))
    shape = random.randrange(3)
    if shape == 0:
        text = " ".join(f"The code of the {t} is {c}." for t, c in zip(things, codes, strict=True))
    elif shape == 1:
        text = "Codes: " + ", ".join(f"{t} {c}" for t, c in zip(things, codes, strict=True)) + "."
    else:
        text = "\n".join(f"{t}: {c}" for t, c in zip(things, codes, strict=True))
    ask = pick(random, _ASK_CODE, n=things[index])
    answer = f"The code of the {things[index]} is {codes[index]}."
    content = f"{things[index]}={codes[index]}"
    if random.random() < 0.3:
        return Exchange("lookup", ask, answer, content, ((text, "I have read it."),))
    return Exchange("lookup", f"{text} {ask}" if shape < 2 else f"{text}\n{ask}", answer, content)
