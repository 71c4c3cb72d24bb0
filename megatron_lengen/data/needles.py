"""Needles in a haystack, sized to a number of tokens: for training tiny models and for evaluation.

Two styles. `niah` is RULER's niah_single_1 (arXiv 2404.06654): repeated noise sentences, a sentence
with a magic number among them, a question and the beginning of its answer. `pairs` is easier and
shorter: lines `key=value` between lines of text, and a `key=` to complete; a model of a few hundred
thousand parameters can learn it at short training lengths.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass

from megatron_lengen.errors import BadInput, require

STYLES = ("niah", "pairs")
NOISE = (
    "The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
HEAD = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
ANSWER = " The special magic number for {key} mentioned in the provided text is"
QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?" + ANSWER
# Statements in one example, where the caller does not say.
DEFAULT_NEEDLES = {"niah": 1, "pairs": 4}

KEYS = tuple(
    """
    acorn actor album anchor angle apple apron arena arrow artist atlas autumn baker balloon banana
    basket beach beacon beaver bell berry bicycle bishop blanket bottle branch bread breeze bridge
    broom brush bucket butter button cabin cactus camel camera candle canoe canvas captain carpet
    carrot castle cattle cave cedar chair chalk cherry chess circle cliff clock cloud clover coast
    coffee collar comet copper coral corner cotton cousin cradle crane crater cricket crown crystal
    curtain cushion dancer desert diamond doctor dolphin donkey dragon drawer dream drum eagle
    easel echo elbow ember engine envelope falcon farmer feather fence ferry fiddle field finger
    flame flask flute forest fossil fountain fox friend frost garden garlic ginger glacier glove
    goat grape guitar hammer harbor harvest hazel helmet heron hill honey horse hotel island ivory
    jacket jewel jungle kettle kitchen kite knight ladder lake lantern leaf lemon letter lily lion
    lobster maple marble market meadow melon mirror monkey moon mountain museum needle nest oasis
    ocean olive onion orange orchard otter oven owl paddle palace panda paper parrot peach pearl
    pebble pencil pepper piano pigeon pillow pilot planet plum pocket pony potato puzzle rabbit
    radio raven ribbon river robin rocket saddle sailor salmon sandal school shadow shell silver
    spider spoon squirrel station stone summer swan table teacher temple thunder tiger timber tower
    train tulip tunnel turtle valley velvet village violin wagon walnut whale willow window winter
    wizard wolf yacht zebra
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class NeedleExample:
    """One question over a haystack.

    `prompt_text + answer_text` is the whole text of `tokens` tokens; `answer_text` is what follows
    the prompt directly (with its space), `value` the digits to look for in an answer. `depth` is
    the part of the haystack's lines that stands before the needle, from 0 to 1.
    """

    prompt_text: str
    answer_text: str
    depth: float
    key: str
    value: str
    tokens: int

    @property
    def text(self) -> str:
        """The example with its answer, as a training document."""
        return self.prompt_text + self.answer_text


@dataclass(frozen=True)
class _Plan:
    """Everything about an example except the length of its haystack.

    `needles` are (depth from 0 to 1, sentence); `lines` are the haystack's lines in small pieces,
    used again from the first when they are exhausted.
    """

    head: str
    needles: list[tuple[float, str]]
    lines: Sequence[Sequence[str]]
    separator: str
    tail: str
    answer: str

    def prompt(self, pieces: int) -> tuple[str, float]:
        """The prompt with `pieces` pieces of haystack, and the first needle's true depth."""
        hay: list[str] = []
        while pieces > 0:
            line = self.lines[len(hay) % len(self.lines)]
            hay.append("".join(line[:pieces]))
            pieces -= len(line)
        placed = [(round(depth * len(hay)), text) for depth, text in self.needles]
        true_depth = placed[0][0] / len(hay) if hay else 0.0
        # From the last place to the first, so that earlier places stay where they are.
        for place, text in sorted(placed, reverse=True):
            hay.insert(place, text)
        return self.head + self.separator.join(hay) + self.tail, true_depth


def needle_example(
    rng: random.Random,
    encode: Callable[[str], Sized],
    length: int,
    haystack: str | Sequence[str] = "noise",
    *,
    style: str = "niah",
    digits: int = 7,
    depth: float | None = None,
    needles: int | None = None,
    questions: int = 1,
    key_words: int = 1,
    separator: str | None = None,
) -> NeedleExample:
    """An example whose prompt and answer fill `length` tokens without exceeding them.

    Args:
        rng: decides keys, values and places; the same state gives the same example.
        encode: text to ids, without start or end token (`Tokenizer.encode`).
        haystack: `noise`, or sentences or lines to hide the needle between (repeated as needed).
        style: `niah` or `pairs`.
        digits: of each value, 1 to 7.
        depth: place of the asked needle, 0 (first) to 1 (last); None draws it.
        needles: statements in the haystack (default 1 for niah, 4 for pairs), one of them asked.
        questions: how many are asked in all, statement after statement; those before the last
            stand answered in the prompt, which gives a training document more to learn from.
        key_words: words in a key, joined by hyphens (RULER has two).
        separator: between lines; a newline for noise and pairs, else a space.
    Raises:
        BadInput: an argument out of range, or a length too small for the text without haystack.
    """
    needles = DEFAULT_NEEDLES.get(style, 1) if needles is None else needles
    _check(style, digits, depth, needles, questions)
    statements = _draw_statements(rng, needles, digits, key_words)
    places = [rng.random() for _ in statements]
    if depth is not None:
        places[0] = depth
    lines = _haystack_lines(haystack)
    if separator is None:
        separator = "\n" if style == "pairs" or haystack == "noise" else " "
    key, value = statements[0]
    earlier = [statements[i % needles] for i in range(1, questions)]
    if style == "niah":
        sentences = [NEEDLE.format(key=k, value=v) for k, v in statements]
        before = "".join(f"\n{ANSWER.strip().format(key=k)} {v}." for k, v in earlier)
        head, tail, answer = HEAD, before + QUESTION.format(key=key), f" {value}"
    else:
        sentences = [f"{k}={v}" for k, v in statements]
        before = "".join(f"\n{k}={v}" for k, v in earlier)
        head, tail, answer = "", f"{before}\n{key}=", value
    plan = _Plan(head, list(zip(places, sentences, strict=True)), lines, separator, tail, answer)
    pieces = _fill(plan, encode, length)
    prompt, true_depth = plan.prompt(pieces)
    tokens = len(encode(prompt + answer))
    return NeedleExample(prompt, answer, true_depth, key, value, tokens)


def _check(style: str, digits: int, depth: float | None, needles: int, questions: int) -> None:
    require(style in STYLES, f"style: found {style}; allowed: {', '.join(STYLES)}")
    require(1 <= digits <= 7, f"digits: found {digits}; allowed: 1 to 7")
    require(depth is None or 0 <= depth <= 1, f"depth: found {depth}; allowed: 0 to 1")
    require(1 <= needles <= len(KEYS), f"needles: found {needles}; allowed: 1 to {len(KEYS)}")
    require(questions >= 1, f"questions: found {questions}; allowed: 1 or more")


def _draw_statements(
    rng: random.Random, count: int, digits: int, key_words: int
) -> list[tuple[str, str]]:
    """`count` (key, value) pairs with different keys; the first is the asked one."""
    require(key_words in (1, 2), f"key_words: found {key_words}; allowed: 1, 2")
    keys = rng.sample(KEYS, count)
    if key_words == 2:
        keys = [f"{rng.choice(KEYS)}-{key}" for key in keys]
    lowest = 10 ** (digits - 1) if digits > 1 else 0
    return [(key, str(rng.randint(lowest, 10**digits - 1))) for key in keys]


def _haystack_lines(haystack: str | Sequence[str]) -> list[list[str]]:
    """Lines cut into the pieces by which a haystack grows: sentences of noise, else words."""
    if isinstance(haystack, str):
        require(haystack == "noise", f"haystack: found {haystack}; allowed: noise, or sentences")
        return [list(NOISE)]
    lines = [re.findall(r"\s*\S+", line) for line in haystack]
    lines = [line for line in lines if line]
    require(len(lines) > 0, "haystack: found no text in it")
    return lines


def _fill(plan: _Plan, encode: Callable[[str], Sized], length: int) -> int:
    """The most pieces of haystack with which the example has at most `length` tokens."""

    def size(pieces: int) -> int:
        return len(encode(plan.prompt(pieces)[0] + plan.answer))

    bare = size(0)
    if bare > length:
        raise BadInput(f"length: found {length}; allowed: {bare} tokens or more for this example")
    # Start from what the growth at small sizes promises, widen until the answer lies between, then
    # halve. `low` always fits, so a tokenizer whose counts are not quite monotonic does no harm.
    sample = 64
    guess = (length - bare) * sample // max(size(sample) - bare, 1)
    reach = max(guess // 16, 1)
    low, high = 0, guess + 1
    if size(guess) <= length:
        low, high = guess, guess + reach
        while size(high) <= length:
            low, reach = high, 2 * reach
            high += reach
    else:
        while high > 0 and size(high) > length:
            high, reach = high - reach, 2 * reach
        low, high = max(high, 0), max(high, 0) + reach // 2
    while high - low > 1:
        middle = (low + high) // 2
        if size(middle) <= length:
            low = middle
        else:
            high = middle
    return low
