"""Questions beyond the model, which it refuses politely."""

from __future__ import annotations

from random import Random

from .exchange import Exchange
from .lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FIRST_NAMES,
    FOODS,
    NOUNS,
    PLACE_PHRASES,
    made_up_word,
    pick,
    words,
)

FALLBACK = "I am only a small model, so I do not know that. Ask me for help to see what I can do."

_COUNTRIES = words(
    "France Germany Italy Spain China Japan India Brazil Canada Mexico Egypt Russia Peru Chile Kenya "
    "Norway Sweden Poland Greece Turkey England Australia America Ireland Portugal Finland Iran "
    "Nigeria Argentina Korea"
)
_CITIES = words(
    "Paris London Berlin Rome Madrid Tokyo Beijing Moscow Cairo Delhi Sydney Vienna Lisbon Oslo Boston Chicago"
)
_FAMOUS = words(
    "Einstein Napoleon Shakespeare Newton Darwin Mozart Picasso Cleopatra Lincoln Gandhi Beethoven "
    "Plato Aristotle Turing Obama Messi Caesar Columbus Churchill Galileo"
)
_SUBJECTS = words(
    "physics|gravity|history|biology|chemistry|philosophy|quantum mechanics|photosynthesis|black holes|"
    "the moon|the economy|football|politics|music|evolution|the internet|blockchain|machine learning|"
    "neural networks|python|transformers|love|the meaning of life|democracy|electricity|space travel|"
    "climate change|dinosaurs|volcanoes|poetry|cooking|the weather|time travel|artificial intelligence|"
    "deep learning|the stock market|world war two|linear algebra|calculus|the Roman empire|art|"
    "medicine|vaccines|DNA|atoms|java|databases|linux|recursion",
    "|",
)
_PROPERTIES = words(
    "capital|population|president|king|currency|largest city|flag|language|highest mountain|"
    "prime minister|area|history|weather|national animal|longest river|founder|anthem",
    "|",
)
_OUT_OF_SCOPE = (
    "What is the {property} of {country}?",
    "what is the {property} of {country}",
    "Who is the {property} of {country}?",
    "How many people live in {country}?",
    "How far is it from {city} to {city2}?",
    "What is the weather in {city}?",
    "What is the weather like today?",
    "Where is {city}?",
    "Where is {country}?",
    "Who was {famous}?",
    "Who is {famous}?",
    "When was {famous} born?",
    "Where was {famous} born?",
    "When did {famous} die?",
    "What did {famous} invent?",
    "Explain {subject}.",
    "Explain {subject} to me like I am five.",
    "What is {subject}?",
    "Tell me about {subject}.",
    "How does {subject} work?",
    "Why is {subject} important?",
    "Who invented {subject}?",
    "Write a poem about {subject}.",
    "Write a poem about a {noun}.",
    "Write an essay about {subject}.",
    "Write a letter to my {noun} shop.",
    "Write a song about {country}.",
    "Write code for a {noun}.",
    "Write a python function that sorts a list.",
    "Write a program in java.",
    "Write a haiku.",
    "Translate {noun} into French.",
    "How do you say {noun} in Spanish?",
    "Translate this into German: {noun}",
    "Why is the sky {colour}?",
    "Why is the {noun} {colour}?",
    "How do I cook {food}?",
    "How do I make a {noun}?",
    "How do I fix my {noun}?",
    "Where can I buy a {noun}?",
    "What does a {noun} cost?",
    "What is the price of {food}?",
    "How old is the {noun}?",
    "How old is {name}?",
    "How fast is a {animal}?",
    "How long does a {animal} live?",
    "What is the difference between a {animal} and a {noun}?",
    "What is a {made}?",
    "What is a {noun}?",
    "What is {made}?",
    "What does {made} mean?",
    "Who is {made_name}?",
    "Where does {made_name} live?",
    "Where does {famous} live?",
    "What is {made_name}'s job?",
    "What does {made_name} like to eat?",
    "What is {famous}'s favourite colour?",
    "What time is it?",
    "What day is it today?",
    "What is the date?",
    "Who won the world cup?",
    "Who will win the election?",
    "What is the best {noun}?",
    "Should I buy a {noun} or a {noun2}?",
    "What should I eat today?",
    "Recommend me a book.",
    "Recommend me a film about {subject}.",
    "What is the news?",
    "Can you drive a {noun}?",
    "Can you book a table in {city}?",
    "Summarize the history of {country}.",
    "Summarise {subject} in three points.",
    "Give me a recipe for {food}.",
    "What is the speed of light?",
    "How many stars are there?",
    "How high is the highest mountain?",
    "Is {country} bigger than {country2}?",
    "Do {animal}s like {food}?",
    "What would happen if a {noun} were {adjective}?",
    "Who wrote the book about the {adjective} {noun}?",
    "Is there a {noun} {place}?",
    "What is the square root of two?",
    "Solve the equation for x.",
    "What do you think about {subject}?",
    "Do you like {subject}?",
    "Do you like {food}?",
    "What is your favourite {noun}?",
    "Which is better, {subject} or {subject2}?",
)


def out_of_scope(random: Random, room: int) -> Exchange:
    """A question beyond the model, answered with one polite sentence."""
    question = pick(
        random,
        _OUT_OF_SCOPE,
        property=random.choice(_PROPERTIES),
        country=random.choice(_COUNTRIES),
        country2=random.choice(_COUNTRIES),
        city=random.choice(_CITIES),
        city2=random.choice(_CITIES),
        famous=random.choice(_FAMOUS),
        subject=random.choice(_SUBJECTS),
        subject2=random.choice(_SUBJECTS),
        noun=random.choice(NOUNS) if random.random() < 0.6 else made_up_word(random),
        noun2=random.choice(NOUNS),
        colour=random.choice(COLOURS),
        food=random.choice(FOODS),
        animal=random.choice(ANIMALS),
        adjective=random.choice(ADJECTIVES),
        place=random.choice(PLACE_PHRASES),
        name=random.choice(FIRST_NAMES),
        made=made_up_word(random),
        made_name=made_up_word(random, 2).capitalize() + random.choice(("", "son", "berg", "a", "ez", "ov")),
    )
    if random.random() < 0.25:
        question = question.lower().rstrip("?.")
    # Casing and punctuation are left out of the content, or they would leak a held-out question.
    return Exchange("out_of_scope", question, FALLBACK, question.lower().rstrip("?."))
