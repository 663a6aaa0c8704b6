"""Word lists and word makers shared by the skills."""

from __future__ import annotations

from random import Random


def words(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Splits a list that is written as one string, at spaces or at ``separator``."""
    return tuple(text.split(separator))


NOUNS = words(
    "apple arrow axe bag ball barn basket bead bell bench blanket boat book boot bottle bowl box brick "
    "bridge broom brush bucket button cake candle carpet cart castle chain chair cheese chest clock "
    "cloak cloud coat coin comb cup curtain desk dish door dress drum fence feather field fire flag "
    "flower flute fork fountain garden gate glass glove grain hammer hat helmet hill honey hook horn "
    "house ink island jacket jar jewel kettle key kite knife ladder lake lamp leaf letter lock loom "
    "map mask meadow medal milk mill mirror moon mountain mug nail needle nest net nut oar oven owl "
    "paint pan paper path pearl pen pencil picture pillow pin pipe plate plum pond pot purse quilt "
    "radio rain ribbon ring river road rock roof room rope rose rug sack saddle sail salt sand saw "
    "scarf seed shell ship shirt shoe shovel silk snow soap sock spade spoon stamp star stone stool "
    "stove street string sugar sun sword table tent thread ticket tile torch towel tower toy train "
    "tray tree trumpet tunnel umbrella vase village violin wagon wall watch water wheel whistle wind "
    "window wire wood wool yarn"
)

ADJECTIVES = words(
    "big small old new red blue green yellow white black grey brown bright dark warm cold quiet loud "
    "soft hard long short round flat heavy light clean dusty shiny plain broken strong gentle brave "
    "clever kind lazy quick slow proud shy happy sad sleepy hungry tall tiny huge narrow wide deep "
    "golden silver wooden wet dry sweet"
)

ANIMALS = words(
    "fox bear mouse hare owl frog heron otter badger hedgehog goat horse donkey cat dog hen duck goose "
    "crow rabbit squirrel turtle snail bee wolf deer sheep pig cow lynx seal swan sparrow beaver mole"
)

COLOURS = words("red blue green yellow white black grey brown purple orange pink silver golden")

FOODS = words(
    "bread soup cheese plums apples honey porridge rice beans carrots pears cherries noodles pancakes "
    "pie nuts berries stew mushrooms potatoes tomatoes onions grapes figs"
)

FIRST_NAMES = words(
    "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Maria Nina Oscar Paul Rosa Sam Tom "
    "Vera Will Alice Bob Carol Dan Eva Frank Gina Hugo Iris John Karl Laura Max Nora Otto Peter Ruth "
    "Simon Tina Zoe Adam Amir Aisha Chen Diego Elena Fatima Hassan Ines Jin Kenji Lina Mei Mohamed "
    "Nadia Olga Priya Ravi Sara Sofia Yuki Yusuf James Mary Robert Linda Michael Sarah Thomas Julia "
    "Lucas Mia Noah Olivia Liam Lucy Mark Jane George Helen Alex Chris Kim Lee Pat Robin"
)

COMMON_WORDS = words(
    "hello world python strawberry banana orange lemon potato chicken elephant tiger lion monkey "
    "giraffe penguin dolphin whale shark butterfly spider dragon wizard robot computer program memory "
    "network token model language library function number letter word sentence question answer story "
    "school teacher student friend family mother father sister brother child people person man woman "
    "girl boy baby king queen prince princess knight pirate doctor nurse police soldier farmer artist "
    "music guitar piano song dance movie game football tennis winter summer spring autumn january "
    "monday sunday morning evening night today tomorrow yesterday hour minute second week month year "
    "time love happy beautiful wonderful strange simple difficult important different possible ready "
    "open close run walk jump swim fly read write listen speak think know learn forget remember begin "
    "finish start stop give take bring send buy sell eat drink sleep wake laugh cry smile play work "
    "help call ask tell kitchen bathroom bedroom garage office hospital church museum theatre station "
    "airport train plane bicycle engine machine camera phone letterbox newspaper magazine dictionary "
    "science history nature animal planet earth mars universe galaxy ocean beach desert forest jungle "
    "valley cave storm thunder lightning rainbow sunshine chocolate coffee sugar butter pepper vanilla "
    "pizza pasta salad sandwich breakfast dinner purple violet triangle circle square yellow keyboard "
    "mouse screen button window pencil paper table chair bottle mirror freedom peace power energy "
    "money market price letter secret magic dream hope luck idea reason problem solution example test "
    "bug code file folder server client async await kernel cache batch stream queue python mississippi "
    "alphabet abc cat dog house tree water fire stone light dark"
)

HEROES = words(
    "dragon king queen princess prince knight wizard robot pirate girl boy farmer sailor witch giant elephant lion"
)

VERBS_PAST = words(
    "carried found painted washed moved watched mended dropped lifted cleaned opened closed counted "
    "borrowed hid sold bought saw kept made"
)

PLACE_PHRASES = words(
    "by the river|near the mill|in the garden|behind the barn|on the hill|under the bridge|"
    "at the market|in the old tower|beside the road|by the fire|near the gate|on the table|"
    "in the field|at the pond|next to the well|inside the house",
    "|",
)

TIME_PHRASES = words(
    "in the morning|in the evening|at noon|at night|every day|last week|after the rain|before winter|"
    "in the spring|one day|long ago|on Monday|on Friday|in the summer",
    "|",
)

_ONSETS = words("b d f g h j k l m n p r s t v w z br dr gr kl pl sh sk st th tr")
_VOWELS = words("a e i o u a e i o ai ea oo")
_CODAS = ("", *words("n l r s m t k nd rn ss"))


def made_up_word(random: Random, syllables: int | None = None) -> str:
    """A pronounceable lower-case word that usually exists nowhere."""
    count = syllables if syllables is not None else random.choice((1, 2, 2, 2, 3))
    return "".join(random.choice(_ONSETS) + random.choice(_VOWELS) for _ in range(count)) + random.choice(_CODAS)


def any_word(random: Random) -> str:
    """A word to spell: made up, common, from the lists, or just letters."""
    chance = random.random()
    if chance < 0.4:
        return made_up_word(random)
    if chance < 0.7:
        return random.choice(COMMON_WORDS)
    if chance < 0.88:
        return random.choice(random.choice((NOUNS, ADJECTIVES, ANIMALS, FOODS)))
    return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randint(2, 8)))


def person_name(random: Random) -> str:
    """A common first name or a made-up one."""
    return random.choice(FIRST_NAMES) if random.random() < 0.4 else made_up_word(random).capitalize()


def digits(random: Random, length: int) -> str:
    """A string of random digits that does not start with zero."""
    return str(random.randint(1, 9)) + "".join(random.choice("0123456789") for _ in range(length - 1))


def plain_sentence(random: Random) -> str:
    """One grammatical sentence about nothing in particular."""
    shape = random.randrange(6)
    noun, other = random.choice(NOUNS), random.choice(NOUNS)
    adjective = random.choice(ADJECTIVES)
    animal = random.choice(ANIMALS)
    place = random.choice(PLACE_PHRASES)
    if shape == 0:
        return f"The {adjective} {noun} stands {place}."
    if shape == 1:
        return f"The {animal} {random.choice(VERBS_PAST)} the {noun} {place}."
    if shape == 2:
        return f"{random.choice(TIME_PHRASES).capitalize()} the {animal} sleeps {place}."
    if shape == 3:
        return f"There is a {adjective} {noun} and a {random.choice(ADJECTIVES)} {other} {place}."
    if shape == 4:
        return f"{random.choice(FIRST_NAMES)} {random.choice(VERBS_PAST)} a {adjective} {noun} " + (
            f"{random.choice(TIME_PHRASES)}."
        )
    return f"A {animal} and a {random.choice(ANIMALS)} met {place} {random.choice(TIME_PHRASES)}."


def pick(random: Random, templates: tuple[str, ...], **values: object) -> str:
    """Fills one randomly chosen template."""
    return random.choice(templates).format(**values)
