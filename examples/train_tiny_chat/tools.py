"""Tools that a user may offer, and requests that they answer: sums and products, the weather, telephone numbers,
properties of things, and whatever is asked for by a tool's own name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from .exchange import held_out_by
from .lexicon import ADJECTIVES, FOODS, NOUNS, any_word, digits, made_up_word, person_name, pick, words
from .out_of_scope import FALLBACK


@dataclass(frozen=True)
class Tool:
    """A function. `parameters`: names -> JSON types; `kind` says which questions it answers, `noun` about what."""

    name: str
    parameters: dict[str, str]
    description: str
    kind: str
    noun: str = ""

    def definition(self) -> dict[str, Any]:
        """Return the tool as OpenAI's API writes it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": schema}}

    def line(self) -> str:
        """Return the tool as the chat template writes it."""
        signature = ", ".join(f"{name}: {kind}" for name, kind in self.parameters.items())
        return f"{self.name}({signature})" + (f": {self.description}" if self.description else "")

    def call(self, *values: object) -> Call:
        """Return a call with the values in the order of the parameters."""
        return Call(self.name, dict(zip(self.parameters, values, strict=True)))


@dataclass(frozen=True)
class Call:
    """A call as the model writes it."""

    name: str
    arguments: dict[str, object]

    def written_arguments(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)

    def text(self) -> str:
        """Return the call between its marks."""
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {self.written_arguments()}}}\n</tool_call>'


@dataclass(frozen=True)
class Use:
    """A request, the calls that it wants, what the tools return, and the answer. Without calls it is answered at once.

    `content` is what the hold-out rule looks at, as of an `Exchange`.
    """

    skill: str
    question: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    answer: str
    content: str


_CITIES = words("Bern Paris London Berlin Rome Madrid Tokyo Vienna Oslo Boston Chicago Cairo Delhi Sydney Lisbon Kyoto")
_SKIES = words("sunny cloudy rainy windy foggy stormy snowy clear cold warm hot dry humid")
_PROPERTIES = words(
    "price height weight size distance temperature population capital status balance rating score speed author title "
    "length stock rank version age value cost level limit total volume depth width power route date duration"
)
_ADD_NAMES = words("add sum plus add_numbers add_two_numbers calculate_sum addition get_sum")
_MULTIPLY_NAMES = words("multiply times product multiply_numbers mul calculate_product multiplication get_product")
_WEATHER_NAMES = words("weather get_weather current_weather get_current_weather weather_in forecast get_forecast")
_PHONE_NAMES = words("phone_number get_phone_number find_number telephone lookup_phone phone find_phone_number")
_PAIRS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("n", "m"), ("one", "two"))
_PLACE_PARAMETERS = words("city city location place town name where city_name")
_NAME_PARAMETERS = words("name person name who contact of user")
_THING_PARAMETERS = words("name item thing of id key symbol product subject query what target")

_ADD = ("Adds two numbers.", "Add two numbers.", "The sum of two numbers.", "Sums two numbers.", "Add a and b.", "")
_MULTIPLY = ("Multiplies two numbers.", "Multiply two numbers.", "The product of two numbers.", "")
_WEATHER = (
    "The weather of a city.",
    "Get the weather in a city.",
    "Returns the weather in a place.",
    "Weather now.",
    "",
)
_PHONE = ("The phone number of a person.", "Finds the phone number of somebody.", "Look up a phone number.", "")
_NAMED = {
    "add": (_ADD_NAMES, _ADD),
    "multiply": (_MULTIPLY_NAMES, _MULTIPLY),
    "weather": (_WEATHER_NAMES, _WEATHER),
    "phone": (_PHONE_NAMES, _PHONE),
}
"""Kind -> names and descriptions that a tool of it may have."""

_PROPERTY = ("The {p} of something.", "Get the {p}.", "Returns the {p} of a thing.", "Looks up the {p}.", "")

_ADD_QUESTIONS = (
    "What is {a} + {b}?",
    "what is {a} + {b}",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "Compute {a} + {b}.",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "How much is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "Please add {a} and {b}.",
)
_MULTIPLY_QUESTIONS = (
    "What is {a} * {b}?",
    "what is {a} * {b}",
    "{a} * {b}",
    "{a} x {b}",
    "Compute {a} * {b}.",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Multiply {a} and {b}.",
    "What is the product of {a} and {b}?",
    "How much is {a} times {b}?",
    "What is {a} x {b}?",
)
_WEATHER_QUESTIONS = (
    "What is the weather in {c}?",
    "what is the weather in {c}",
    "What's the weather in {c}?",
    "What is the weather like in {c}?",
    "How is the weather in {c}?",
    "How is the weather in {c} today?",
    "Weather in {c}?",
    "Tell me the weather in {c}.",
    "What will the weather be in {c}?",
    "Please check the weather in {c}.",
    "Is it warm in {c}?",
    "Does it rain in {c}?",
)
_PHONE_QUESTIONS = (
    "What is the phone number of {n}?",
    "what is the phone number of {n}",
    "What is {n}'s phone number?",
    "Find the number of {n}.",
    "How can I call {n}?",
    "Tell me the phone number of {n}.",
    "Which number does {n} have?",
    "I want to call {n}.",
)
_PROPERTY_QUESTIONS = (
    "What is the {p} of {x}?",
    "what is the {p} of {x}",
    "Tell me the {p} of {x}.",
    "Find the {p} of {x}.",
    "Get the {p} of {x}.",
    "Look up the {p} of {x}.",
    "What's the {p} of {x}?",
    "I need the {p} of {x}.",
    "{x}: what is the {p}?",
)
_TWO_PLACES = (
    "What is the weather in {x} and in {y}?",
    "What is the weather in {x} and {y}?",
    "How is the weather in {x} and in {y}?",
    "Compare the weather in {x} and {y}.",
    "Tell me the weather in {x} and in {y}.",
)
_TWO_PEOPLE = (
    "What are the phone numbers of {x} and {y}?",
    "Find the numbers of {x} and {y}.",
    "Tell me the phone numbers of {x} and {y}.",
    "I want to call {x} and {y}.",
)
_TWO_THINGS = (
    "What is the {p} of {x} and of {y}?",
    "Tell me the {p} of {x} and the {p} of {y}.",
    "Compare the {p} of {x} and {y}.",
    "Look up the {p} of {x} and of {y}.",
)
_BY_NAME = (
    "Call {t}{v}.",
    "Use {t}{v}.",
    "Please call {t}{v}.",
    "Run {t}{v}.",
    "call {t}{v}",
    "Use the tool {t}{v}.",
    "Please use {t}{v}.",
    "What does {t} say{v}?",
)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _variant(random: Random, kind: str, parameters: dict[str, str]) -> Tool:
    names, about = _NAMED[kind]
    name = random.choice(names)
    return Tool(_camel(name) if random.random() < 0.08 else name, parameters, random.choice(about), kind)


def _two_numbers(random: Random) -> dict[str, str]:
    return dict.fromkeys(random.choice(_PAIRS), random.choice(("integer", "integer", "number")))


def _property_tool(random: Random) -> Tool:
    noun = random.choice(_PROPERTIES) if random.random() < 0.6 else made_up_word(random, random.choice((1, 2)))
    name = random.choice(("{p}", "get_{p}", "find_{p}", "{p}_of", "lookup_{p}", "read_{p}")).format(p=noun)
    parameters = {random.choice(_THING_PARAMETERS): "string"}
    return Tool(name, parameters, random.choice(_PROPERTY).format(p=noun), "property", noun)


def _any_tool(random: Random) -> Tool:
    """A tool of a made-up name with up to three parameters, which is called when it is asked for."""
    name = "_".join(_name_part(random) for _ in range(random.choice((1, 2, 2, 3))))
    parameters = {
        _name_part(random): random.choice(("string", "string", "integer", "integer", "number", "boolean"))
        for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3)))
    }
    about = f"{random.choice(ADJECTIVES).capitalize()} {random.choice(NOUNS)}." if random.random() < 0.6 else ""
    return Tool(_camel(name) if random.random() < 0.15 else name, parameters, about, "any")


def _name_part(random: Random) -> str:
    return random.choice(NOUNS) if random.random() < 0.5 else made_up_word(random, random.choice((1, 2)))


def draw_tool(random: Random) -> Tool:
    """Return a tool of any kind."""
    kind = random.choices(("add", "multiply", "weather", "phone", "property", "any"), (3, 2, 3, 2, 3, 3))[0]
    if kind in ("add", "multiply"):
        return _variant(random, kind, _two_numbers(random))
    if kind == "weather":
        return _variant(random, kind, {random.choice(_PLACE_PARAMETERS): "string"})
    if kind == "phone":
        return _variant(random, kind, {random.choice(_NAME_PARAMETERS): "string"})
    return _property_tool(random) if kind == "property" else _any_tool(random)


def draw_tools(random: Random) -> list[Tool]:
    """Return one to four tools, no two of one name or about the same; their order is arbitrary."""
    tools: list[Tool] = []
    count = random.choice((1, 1, 2, 2, 3, 4))
    while len(tools) < count:
        tool = draw_tool(random)
        if all(tool.name != other.name and (tool.kind, tool.noun) != (other.kind, other.noun) for other in tools):
            tools.append(tool)
    return tools


def _place(random: Random) -> str:
    chance = random.random()
    if chance < 0.3:
        return random.choice(_CITIES)
    name = made_up_word(random).capitalize()
    return name if chance < 0.85 else f"{random.choice(('New', 'San', 'Port', 'Old'))} {name}"


def _thing(random: Random) -> str:
    chance = random.random()
    if chance < 0.35:
        return any_word(random)
    if chance < 0.6:
        return person_name(random)
    if chance < 0.75:
        return f"{random.choice('ABCDEFGHKLMNPRSTXZ')}{digits(random, random.randint(1, 4))}"
    return random.choice(FOODS) if chance < 0.85 else f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"


def _amount(random: Random) -> str:
    number = digits(random, random.choice((1, 2, 2, 3, 4, 5)))
    chance = random.random()
    if chance < 0.15:
        return f"{number}.{random.randint(0, 9)}"
    if chance < 0.3:
        return f"{number} {random.choice(('metres', 'kg', 'euros', 'km', 'dollars', 'years', 'points', 'litres'))}"
    return f"-{number}" if chance < 0.35 else number


def _returned(random: Random, key: str, value: str) -> str:
    """Return a value as tools return it: as it is, or as an object with one key."""
    if random.random() < 0.7:
        return value
    key = random.choice((key, "result", "value", key)) or "result"
    return json.dumps({key: int(value) if value.isdecimal() and random.random() < 0.5 else value}, ensure_ascii=False)


def _weather_of(random: Random) -> tuple[str, str]:
    """Return what a tool returns, and how it is said."""
    sky, degrees = random.choice(_SKIES), random.randint(-15, 40)
    chance = random.random()
    if chance < 0.25:
        return json.dumps({"sky": sky, "degrees": degrees}), f"{sky}, {degrees}"
    said = random.choice((sky, f"{sky}, {degrees} degrees", f"{degrees} degrees and {sky}", f"{sky} and {degrees} C"))
    return _returned(random, "weather", said), said


def _arithmetic(random: Random, tool: Tool) -> Use:
    size = random.choice((1, 2, 2, 3, 3, 4, 5))
    a, b = random.randrange(10**size), random.randrange(10 ** random.choice((size, size, 1, 2)))
    adds = tool.kind == "add"
    value = a + b if adds else a * b
    if random.random() < 0.3:
        # The answer is what the tool returns, even where the model could compute it.
        value = random.randrange(10 ** len(str(value)))
    question = pick(random, _ADD_QUESTIONS if adds else _MULTIPLY_QUESTIONS, a=a, b=b)
    answer = f"{a} {'+' if adds else 'x'} {b} = {value}."
    content = f"{tool.kind}/{min(a, b)},{max(a, b)}"
    result = _returned(random, "sum" if adds else "product", str(value))
    return Use("tool_arithmetic", question, (tool.call(a, b),), (result,), answer, content)


def _weather(random: Random, tool: Tool) -> Use:
    city = _place(random)
    result, said = _weather_of(random)
    question = pick(random, _WEATHER_QUESTIONS, c=city)
    return Use("tool_weather", question, (tool.call(city),), (result,), f"The weather in {city} is {said}.", city)


def _phone(random: Random, tool: Tool) -> Use:
    name, number = person_name(random), _phone_number(random)
    question = pick(random, _PHONE_QUESTIONS, n=name)
    answer = f"The phone number of {name} is {number}."
    return Use("tool_phone", question, (tool.call(name),), (_returned(random, "phone", number),), answer, name)


def _phone_number(random: Random) -> str:
    return random.choice((digits(random, 6), f"{digits(random, 3)}-{digits(random, 4)}"))


def _property(random: Random, tool: Tool) -> Use:
    thing, value = _thing(random), _amount(random) if random.random() < 0.7 else any_word(random)
    question = pick(random, _PROPERTY_QUESTIONS, p=tool.noun, x=thing)
    answer = f"The {tool.noun} of {thing} is {value}."
    result = _returned(random, tool.noun, value)
    return Use("tool_property", question, (tool.call(thing),), (result,), answer, f"{tool.noun}/{thing}")


def _by_name(random: Random, tool: Tool) -> Use:
    values: list[object] = []
    for kind in tool.parameters.values():
        if kind == "boolean":
            values.append(random.random() < 0.5)
        elif kind == "string":
            values.append(_thing(random))
        else:
            number = int(digits(random, random.choice((1, 2, 3, 4))))
            values.append(number + 0.5 if kind == "number" and random.random() < 0.3 else number)
    written = [(name, json.dumps(value).strip('"')) for name, value in zip(tool.parameters, values, strict=True)]
    form, between = random.choice((("{} {}", " and "), ("{} = {}", ", "), ("{} {}", ", "), ("{}: {}", ", ")))
    given = between.join(form.format(*each) for each in written)
    question = pick(random, _BY_NAME, t=tool.name, v=f" with {given}" if given else "")
    value = _amount(random) if random.random() < 0.6 else any_word(random)
    # A tool without parameters, or with a boolean one, has few calls; what it returns makes them many.
    content = f"{tool.name}/{given}/{value}"
    result = _returned(random, "result", value)
    return Use("tool_by_name", question, (tool.call(*values),), (result,), f"The result is {value}.", content)


USES = {
    "add": _arithmetic,
    "multiply": _arithmetic,
    "weather": _weather,
    "phone": _phone,
    "property": _property,
    "any": _by_name,
}
TWICE = {"weather": _TWO_PLACES, "phone": _TWO_PEOPLE, "property": _TWO_THINGS}
"""Tools that may be called twice at once, and how that is asked for."""


def draw_use(random: Random, tool: Tool, held_out: bool) -> Use:
    """Return a use of the tool on the wanted side of the hold-out rule."""
    while True:
        use = USES[tool.kind](random, tool)
        if held_out_by(use.skill, use.content) == held_out:
            return use


def draw_double_use(random: Random, tool: Tool, held_out: bool) -> Use:
    """Return two calls of one tool of `TWICE` in one reply, both on the wanted side."""
    first, second = draw_use(random, tool, held_out), draw_use(random, tool, held_out)
    x, y = (next(iter(use.calls[0].arguments.values())) for use in (first, second))
    question = pick(random, TWICE[tool.kind], x=x, y=y, p=tool.noun)
    answer, content = f"{first.answer} {second.answer}", f"{first.content}|{second.content}"
    return Use("tool_twice", question, first.calls + second.calls, first.results + second.results, answer, content)


def draw_missed(random: Random, tools: list[Tool], held_out: bool) -> Use:
    """Return a request for which none of the tools is made."""
    while True:
        tool = draw_tool(random)
        if tool.kind in TWICE and all((tool.kind, tool.noun) != (other.kind, other.noun) for other in tools):
            use = draw_use(random, tool, held_out)
            return Use("tool_missing", use.question, (), (), FALLBACK, use.content)
