"""Things the user says about themselves, asked for again some turns later."""

from __future__ import annotations

from random import Random

from .exchange import Exchange
from .lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FOODS,
    NOUNS,
    digits,
    made_up_word,
    person_name,
    pick,
)

_TELL_NAME = (
    "My name is {v}.",
    "my name is {v}",
    "Hi, I am {v}.",
    "Hello, my name is {v}.",
    "I'm {v}.",
    "Call me {v}.",
    "Hi! My name is {v}",
    "You can call me {v}.",
)
_ASK_NAME = (
    "What is my name?",
    "what is my name",
    "What's my name?",
    "Do you remember my name?",
    "Who am I?",
    "Can you tell me my name?",
    "Tell me my name.",
    "Do you know my name?",
    "What am I called?",
)
_OTHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "colour": (
        ("My favourite colour is {v}.", "I like {v} best of all colours.", "my favorite color is {v}"),
        ("What is my favourite colour?", "Which colour do I like best?", "what's my favorite color?"),
        "Your favourite colour is {v}.",
    ),
    "food": (
        ("I like to eat {v}.", "My favourite food is {v}.", "I love {v}."),
        ("What do I like to eat?", "What is my favourite food?", "which food do I like"),
        "You like to eat {v}.",
    ),
    "pet": (
        ("I have a {k} called {v}.", "My {k} is called {v}.", "My {k}'s name is {v}."),
        ("What is my {k} called?", "What is the name of my {k}?", "Do you remember the name of my {k}?"),
        "Your {k} is called {v}.",
    ),
    "number": (
        ("My lucky number is {v}.", "Remember the number {v}.", "Please remember this number: {v}"),
        ("What is my number?", "Which number did I tell you?", "What number should you remember?"),
        "Your number is {v}.",
    ),
    "place": (
        ("I live in {v}.", "My home is in {v}.", "I come from {v}."),
        ("Where do I live?", "Where is my home?", "where do I come from?"),
        "You live in {v}.",
    ),
    "thing": (
        ("I lost my {v}.", "I am looking for my {v}.", "I cannot find my {v}."),
        ("What did I lose?", "What am I looking for?", "What can I not find?"),
        "You are looking for your {v}.",
    ),
}


def name_recall(random: Random, room: int) -> Exchange:
    """The user's own name."""
    name = person_name(random)
    tell, ask = random.choice(_TELL_NAME), random.choice(_ASK_NAME)
    setup = ((tell.format(v=name), f"Nice to meet you, {name}."),)
    return Exchange("name_recall", ask, f"Your name is {name}.", name, setup)


def recall(random: Random, room: int) -> Exchange:
    """Another personal fact: a colour, a food, a pet, a number, a home or a lost thing."""
    kind = random.choice(list(_OTHERS))
    tell, ask, answer = _OTHERS[kind]
    animal = random.choice(ANIMALS)
    if kind == "colour":
        value = random.choice(COLOURS)
    elif kind == "food":
        value = random.choice(FOODS)
    elif kind == "number":
        value = digits(random, random.randint(1, 5))
    elif kind == "thing":
        value = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    elif kind == "place":
        value = made_up_word(random).capitalize()
    else:
        value = person_name(random)
    told, asked = random.randrange(len(tell)), random.randrange(len(ask))
    setup = ((tell[told].format(v=value, k=animal), "I will remember that."),)
    question = ask[asked].format(k=animal)
    return Exchange("recall", question, answer.format(v=value, k=animal), f"{kind}/{value}/{told}/{asked}", setup)


def name_at_once(random: Random, room: int) -> Exchange:
    """Name and question in one message."""
    name = person_name(random)
    question = f"{random.choice(_TELL_NAME).format(v=name).rstrip('.')}. {random.choice(_ASK_NAME)}"
    return Exchange("name_recall", question, f"Your name is {name}.", name)


def unknown_name(random: Random, room: int) -> Exchange:
    """The user's name before it was told; only right as the first question of a conversation."""
    ask = random.choice(_ASK_NAME)
    return Exchange("unknown_name", ask, "You have not told me your name.", ask, exact=False)


def two_names(random: Random, room: int) -> Exchange:
    """A name that the user corrects: the last one counts."""
    first, second = person_name(random), person_name(random)
    correct = pick(random, ("No, my name is {v}.", "Sorry, I meant {v}.", "Actually, my name is {v}."), v=second)
    setup = (
        (random.choice(_TELL_NAME).format(v=first), f"Nice to meet you, {first}."),
        (correct, f"Nice to meet you, {second}."),
    )
    return Exchange("name_recall", random.choice(_ASK_NAME), f"Your name is {second}.", second, setup)


def any_name_recall(random: Random, room: int) -> Exchange:
    """Name recall, sometimes with a correction in between."""
    chance = random.random()
    if chance < 0.08:
        return name_at_once(random, room)
    return two_names(random, room) if chance < 0.2 else name_recall(random, room)
