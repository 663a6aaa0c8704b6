"""A small invented world: the valley of Orrin, whose facts the model knows by heart."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .exchange import Exchange
from .lexicon import ADJECTIVES, COLOURS, FOODS, NOUNS, words

_WORLD_SEED = 1

_WOMEN = words("Mira Sela Tova Runa Ilsa Nerin Oda Pella Bryn Calla Dessa Fenna Hela Joss Liva Wenna")
_MEN = words("Arlo Corin Dorn Emric Faro Garr Halden Ivar Jarek Kell Loren Mott Perrin Rusk Stellan Tavi")
_PLACES = words("Tarn Oakhollow Brell Winmere Stonewick Lark Dunfell Hazelby Pennick Marrow Eastmoor Quill")
_JOBS = words(
    "baker smith weaver potter miller fisher shepherd teacher doctor painter carpenter tailor gardener "
    "hunter cook singer dancer writer mason sailor trader guard farmer librarian clockmaker beekeeper "
    "glassblower shoemaker ferryman gravedigger candlemaker mapmaker"
)
_PET_KINDS = words("cat dog goat owl rabbit horse duck hen turtle frog fox mouse")
_PET_NAMES = words(
    "Pim Dot Rolo Biscuit Nib Tansy Moss Pepper Button Clove Ash Juno Fig Tuck Sable Poppy Rye Echo "
    "Bramble Olive Dusty Willow Mango Patch Storm Honey Nettle Cricket Ginger Pebble Sorrel Thistle"
)
_INSTRUMENTS = words("flute drum fiddle harp horn lute pipe bell")
_RIVERS = words("Silverrun Ash Merrow Lull Broadwater Fenbrook Kestrel Amber Thorn Sild Ivywater Long")
_CROPS = words("barley apples hops pears rye flax plums turnips grapes oats pumpkins mint")
_LANDMARKS = words(
    "old windmill|stone bridge|red lighthouse|bell tower|round temple|great oak|sunken well|iron gate|"
    "glass house|white cliff|long market|blue fountain",
    "|",
)


@dataclass(frozen=True)
class Fact:
    """One fact: ways to ask for it and the one sentence that answers it."""

    name: str
    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Person:
    """A villager with the facts that follow-up questions may ask for."""

    name: str
    pronoun: str
    facts: dict[str, Fact]


_FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "home": ("Where does {p} live?", "And where does {p} live?", "Where is {q} home?"),
    "job": ("What does {p} do?", "And what is {q} job?", "What is {q} job?"),
    "pet": ("Does {p} have a pet?", "And what is the name of {q} pet?", "What pet does {p} have?"),
    "colour": (
        "What is {q} favourite colour?",
        "And {q} favourite colour?",
        "Which colour does {p} like best?",
    ),
    "food": ("What does {p} like to eat?", "And what is {q} favourite food?", "What is {q} favourite food?"),
    "instrument": (
        "Does {p} play music?",
        "What instrument does {p} play?",
        "And which instrument does {p} play?",
    ),
}


def _person_facts(
    name: str, home: str, job: str, pet: str, kind: str, colour: str, food: str, tune: str
) -> dict[str, Fact]:
    return {
        "home": Fact(
            f"{name}.home",
            (
                f"Where does {name} live?",
                f"In which village does {name} live?",
                f"Where is the home of {name}?",
                f"Where is {name}'s house?",
                f"Which village is {name} from?",
                f"Tell me where {name} lives.",
                f"Where can I find {name}?",
                f"Do you know where {name} lives?",
            ),
            f"{name} lives in {home}.",
        ),
        "job": Fact(
            f"{name}.job",
            (
                f"What is {name}'s job?",
                f"What does {name} do?",
                f"What work does {name} do?",
                f"What does {name} do for a living?",
                f"What is the job of {name}?",
                f"Who is {name}?",
                f"What kind of work does {name} do?",
                f"Tell me the job of {name}.",
            ),
            f"{name} is the {job} of {home}.",
        ),
        "job_holder": Fact(
            f"{name}.job_holder",
            (
                f"Who is the {job}?",
                f"Who is the {job} of {home}?",
                f"Who works as a {job}?",
                f"What is the name of the {job}?",
                f"What is the {job} called?",
                f"Do you know the {job}?",
                f"Tell me who the {job} is.",
            ),
            f"The {job} is {name}.",
        ),
        "pet": Fact(
            f"{name}.pet",
            (
                f"What pet does {name} have?",
                f"Does {name} have a pet?",
                f"What is the name of {name}'s pet?",
                f"Which animal does {name} keep?",
                f"Tell me about {name}'s pet.",
                f"What is {name}'s pet called?",
                f"What animal lives with {name}?",
            ),
            f"{name} has a {kind} called {pet}.",
        ),
        "pet_owner": Fact(
            f"{name}.pet_owner",
            (
                f"Who owns the {kind} called {pet}?",
                f"Who owns {pet}?",
                f"Who does {pet} belong to?",
                f"Whose pet is {pet}?",
                f"Whose {kind} is {pet}?",
                f"Who has a {kind} called {pet}?",
                f"Who is the owner of {pet}?",
            ),
            f"{pet} belongs to {name}.",
        ),
        "colour": Fact(
            f"{name}.colour",
            (
                f"What is {name}'s favourite colour?",
                f"Which colour does {name} like best?",
                f"What colour does {name} like?",
                f"What is the favourite colour of {name}?",
                f"What is {name}'s favorite color?",
                f"Tell me {name}'s favourite colour.",
                f"Which colour is {name}'s favourite?",
            ),
            f"{name} likes {colour} best.",
        ),
        "food": Fact(
            f"{name}.food",
            (
                f"What does {name} like to eat?",
                f"What is {name}'s favourite food?",
                f"What food does {name} like?",
                f"What is the favourite food of {name}?",
                f"What does {name} eat?",
                f"Which food does {name} like best?",
                f"Tell me what {name} likes to eat.",
            ),
            f"{name} likes to eat {food}.",
        ),
        "instrument": Fact(
            f"{name}.instrument",
            (
                f"What instrument does {name} play?",
                f"Which instrument does {name} play?",
                f"Does {name} play music?",
                f"What does {name} play?",
                f"What kind of music does {name} make?",
                f"Which instrument can {name} play?",
                f"Tell me which instrument {name} plays.",
            ),
            f"{name} plays the {tune}.",
        ),
    }


def _people(random: Random) -> list[Person]:
    jobs, pets = random.sample(_JOBS, len(_JOBS)), random.sample(_PET_NAMES, len(_PET_NAMES))
    people = []
    for index, name in enumerate(_WOMEN + _MEN):
        facts = _person_facts(
            name,
            random.choice(_PLACES),
            jobs[index],
            pets[index],
            random.choice(_PET_KINDS),
            random.choice(COLOURS),
            random.choice(FOODS),
            random.choice(_INSTRUMENTS),
        )
        people.append(Person(name, "she" if name in _WOMEN else "he", facts))
    return people


def _place_facts(random: Random, people: list[Person]) -> list[Fact]:
    rivers, crops = random.sample(_RIVERS, len(_RIVERS)), random.sample(_CROPS, len(_CROPS))
    landmarks = random.sample(_LANDMARKS, len(_LANDMARKS))
    facts = []
    for place, river, crop, landmark in zip(_PLACES, rivers, crops, landmarks, strict=True):
        facts += [
            Fact(
                f"{place}.river",
                (
                    f"Which river flows through {place}?",
                    f"What river is near {place}?",
                    f"What is the river of {place} called?",
                    f"On which river is {place}?",
                    f"What is the name of the river in {place}?",
                    f"Does {place} have a river?",
                ),
                f"The river {river} flows through {place}.",
            ),
            Fact(
                f"{place}.crop",
                (
                    f"What grows in {place}?",
                    f"What do the people of {place} grow?",
                    f"What do they grow in {place}?",
                    f"What do the farmers of {place} grow?",
                    f"Which crop comes from {place}?",
                    f"What is {place} known for growing?",
                ),
                f"The people of {place} grow {crop}.",
            ),
            Fact(
                f"{place}.landmark",
                (
                    f"What can I see in {place}?",
                    f"What is {place} famous for?",
                    f"What is there to see in {place}?",
                    f"Is there anything to see in {place}?",
                    f"What stands in the middle of {place}?",
                    f"Tell me about {place}.",
                ),
                f"In {place} you can see the {landmark}.",
            ),
            Fact(
                f"{place}.landmark_place",
                (
                    f"Where is the {landmark}?",
                    f"In which village is the {landmark}?",
                    f"Where can I see the {landmark}?",
                    f"Where do I find the {landmark}?",
                    f"Which village has the {landmark}?",
                    f"Do you know where the {landmark} is?",
                ),
                f"The {landmark} is in {place}.",
            ),
            Fact(
                f"{place}.people",
                (
                    f"Who lives in {place}?",
                    f"Which people live in {place}?",
                    f"Who is from {place}?",
                    f"Who do you know in {place}?",
                    f"Tell me who lives in {place}.",
                    f"Does anyone live in {place}?",
                ),
                _inhabitants(place, people),
            ),
        ]
    return facts


def _inhabitants(place: str, people: list[Person]) -> str:
    names = [person.name for person in people if person.facts["home"].answer.endswith(f" {place}.")]
    if len(names) < 2:
        return f"Only {names[0]} lives in {place}." if names else f"Nobody that I know lives in {place}."
    return f"{', '.join(names[:-1])} and {names[-1]} live in {place}."


def _object_facts(random: Random) -> list[Fact]:
    """Shelf numbers of the museum of Tarn: many arbitrary numbers, learned by rote."""
    facts = []
    names = sorted({f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}" for _ in range(160)})
    for name in names:
        shelf = random.randint(100, 999)
        facts.append(
            Fact(
                f"{name}.shelf",
                (
                    f"On which shelf of the museum is the {name}?",
                    f"Which shelf of the museum holds the {name}?",
                    f"Where in the museum is the {name}?",
                    f"What is the museum shelf of the {name}?",
                    f"In the museum, where is the {name}?",
                    f"What shelf of the museum is the {name} on?",
                ),
                f"The {name} is on shelf {shelf}.",
            )
        )
    return facts


_RANDOM = Random(_WORLD_SEED)
PEOPLE = _people(_RANDOM)
VILLAGE_FACTS = [fact for person in PEOPLE for fact in person.facts.values()] + _place_facts(_RANDOM, PEOPLE)
MUSEUM_FACTS = _object_facts(_RANDOM)


def _phrased(random: Random, question: str) -> str:
    chance = random.random()
    if chance < 0.12:
        return question.lower().rstrip("?.")
    if chance < 0.2:
        return question.rstrip("?.")
    return question


def _ask(random: Random, skill: str, fact: Fact) -> Exchange:
    index = random.randrange(len(fact.questions))
    return Exchange(skill, _phrased(random, fact.questions[index]), fact.answer, f"{fact.name}/{index}")


def world(random: Random, room: int) -> Exchange:
    """A fact of the valley; held out are combinations of fact and phrasing, not facts."""
    return _ask(random, "world", random.choice(VILLAGE_FACTS))


def museum(random: Random, room: int) -> Exchange:
    """The shelf number of a museum piece."""
    return _ask(random, "museum", random.choice(MUSEUM_FACTS))


def follow_up(random: Random, room: int) -> Exchange:
    """A second question about the same person, who is only called she or he."""
    person = random.choice(PEOPLE)
    names = [name for name in person.facts if name in _FOLLOW_UPS]
    first = person.facts[random.choice(list(person.facts))]
    second = random.choice([name for name in names if person.facts[name] is not first])
    fact = person.facts[second]
    index = random.randrange(len(_FOLLOW_UPS[second]))
    possessive = "her" if person.pronoun == "she" else "his"
    question = _FOLLOW_UPS[second][index].format(p=person.pronoun, q=possessive)
    setup = ((random.choice(first.questions), first.answer),)
    return Exchange("follow_up", question, fact.answer, f"{first.name}>{fact.name}/{index}", setup)
