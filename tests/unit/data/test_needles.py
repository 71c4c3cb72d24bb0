"""Needle examples: they fill their length, hold one answer where they say, repeat with a seed."""

from __future__ import annotations

import inspect
import random
import re

import pytest
from made_tokenizers import make_hf_folder, source_texts

from megatron_lengen.data.needles import KEYS, needle_example
from megatron_lengen.data.sentencepiece_tools import train_sentencepiece
from megatron_lengen.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lengen.errors import BadInput


@pytest.fixture(scope="module", params=["byte", "sentencepiece", "huggingface"])
def tokenizer(request, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sentencepiece":
        train_sentencepiece(source_texts(), 600, folder / "tokenizer.model")
    elif request.param == "huggingface":
        make_hf_folder(folder)
    return build_tokenizer("byte" if request.param == "byte" else folder)


def code_lines() -> list[str]:
    return inspect.getsource(random).splitlines()


@pytest.mark.parametrize("length", [96, 256, 1000, 4096])
@pytest.mark.parametrize("style", ["niah", "pairs"])
@pytest.mark.parametrize("haystack", ["noise", "lines"])
def test_fills_its_length(tokenizer: Tokenizer, length: int, style: str, haystack: str) -> None:
    rng = random.Random(length)
    hay = "noise" if haystack == "noise" else code_lines()
    if style == "niah":
        # The question alone takes about 300 characters.
        length += 600 if tokenizer.kind == "byte" else 300
    for _ in range(10):
        example = needle_example(rng, tokenizer.encode, length, hay, style=style)
        count = len(tokenizer.encode(example.prompt_text + example.answer_text))
        assert count == example.tokens
        assert 0.9 * length <= count <= length


@pytest.mark.parametrize("length", [63, 64, 65, 200, 333])
def test_one_more_piece_would_be_too_long(length: int) -> None:
    """Against a search that tries every size: characters as tokens, single words as pieces."""
    lines = ["a bb ccc", "dddd"]
    example = needle_example(
        random.Random(1), list, length, lines, style="pairs", needles=1, digits=3
    )
    rest = example.text.replace(f"{example.key}={example.value}\n", "", 1)
    hay = rest[: -len(f"\n{example.key}={example.value}")]
    words = re.findall(r"\S+", hay)
    assert words == (["a", "bb", "ccc", "dddd"] * length)[: len(words)]
    following = ["a", "bb", "ccc", "dddd"][len(words) % 4]
    assert example.tokens <= length < example.tokens + 1 + len(following)


def test_niah_is_rulers_text() -> None:
    """Whole, at a length for exactly two lines of noise, by the definition of niah_single_1."""
    noise = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    key, value = "apple", "1234567"
    expected = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards.\n"
        f"{noise}\nOne of the special magic numbers for {key} is: {value}.\n{noise}\n"
        f"What is the special magic number for {key} mentioned in the provided text? The special "
        f"magic number for {key} mentioned in the provided text is {value}"
    )

    class Fixed(random.Random):
        def sample(self, population, k, **_):
            return [key]

        def randint(self, a, b):
            assert (a, b) == (1_000_000, 9_999_999)
            return int(value)

    example = needle_example(Fixed(), list, len(expected), depth=0.5)
    assert example.text == expected
    assert example.answer_text == f" {value}" and example.depth == 0.5


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("style", ["niah", "pairs"])
def test_needle_stands_at_its_depth(depth: float, style: str) -> None:
    encode = build_tokenizer("byte").encode
    example = needle_example(random.Random(3), encode, 8000, style=style, depth=depth)
    assert abs(example.depth - depth) < 0.02
    context = example.prompt_text[: example.prompt_text.rindex("\n")]
    place = re.search(rf"{example.key}\D{{1,6}}{example.value}", context)
    assert abs(place.start() / len(context) - depth) < 0.05


def test_random_depths_cover_the_haystack() -> None:
    rng = random.Random(0)
    encode = build_tokenizer("byte").encode
    depths = [needle_example(rng, encode, 3000).depth for _ in range(300)]
    fifths = [sum(i / 5 <= depth < (i + 1) / 5 for depth in depths) for i in range(5)]
    assert min(fifths) > 30


@pytest.mark.parametrize("style", ["niah", "pairs"])
@pytest.mark.parametrize("digits", [1, 3, 7])
def test_the_answer_is_stated_once_and_asked(style: str, digits: int) -> None:
    rng = random.Random(digits)
    encode = build_tokenizer("byte").encode
    for _ in range(20):
        example = needle_example(rng, encode, 1500, style=style, digits=digits, needles=3)
        assert re.fullmatch(rf"\d{{{digits}}}", example.value)
        assert example.answer_text.strip() == example.value and example.key in KEYS
        stated = re.findall(r"(?:for (\w+) is: (\d+)\.$|^(\w+)=(\d+)$)", example.prompt_text, re.M)
        pairs = [(a or c, b or d) for a, b, c, d in stated]
        assert len(pairs) == len(dict(pairs)) == 3
        assert dict(pairs)[example.key] == example.value
        assert example.prompt_text.endswith(
            f"for {example.key} mentioned in the provided text is"
            if style == "niah"
            else f"\n{example.key}="
        )


def test_more_questions_are_answered_in_the_prompt() -> None:
    encode = build_tokenizer("byte").encode
    example = needle_example(
        random.Random(5), encode, 400, code_lines(), style="pairs", digits=4, needles=4, questions=4
    )
    stated = re.findall(r"^([a-z]+)=(\d{4})$", example.text, re.M)
    assert len(stated) == 8
    # The last four repeat the first four, and the last is the example's own question.
    assert sorted(stated[:4]) == sorted(stated[4:])
    assert stated[-1] == (example.key, example.value)


def test_a_number_is_asked_for_more_than_once() -> None:
    encode = build_tokenizer("byte").encode
    example = needle_example(random.Random(5), encode, 900, digits=4, questions=3)
    asked = re.findall(r"mentioned in the provided text is (\d{4})", example.text)
    assert asked == [example.value] * 3
    assert example.text.endswith(example.answer_text)


def test_same_seed_same_example_and_other_seed_another() -> None:
    encode = build_tokenizer("byte").encode
    first, again, other = (
        needle_example(random.Random(seed), encode, 900).text for seed in (1, 1, 2)
    )
    assert first == again != other


def test_keys_of_two_words() -> None:
    encode = build_tokenizer("byte").encode
    example = needle_example(random.Random(0), encode, 900, key_words=2)
    assert all(word in KEYS for word in example.key.split("-")) and example.key.count("-") == 1


def test_keys_are_distinct_plain_words() -> None:
    assert len(KEYS) == len(set(KEYS)) >= 200
    assert all(re.fullmatch("[a-z]+", key) for key in KEYS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"style": "other"}, "style: found other; allowed: niah, pairs"),
        ({"digits": 0}, "digits: found 0"),
        ({"digits": 8}, "digits: found 8"),
        ({"depth": 1.5}, "depth: found 1.5"),
        ({"questions": 0}, "questions: found 0; allowed: 1 or more"),
        ({"needles": 0}, "needles: found 0"),
        ({"haystack": "essay"}, "haystack: found essay"),
        ({"haystack": ["", " "]}, "haystack: found no text"),
        ({"length": 50}, r"length: found 50; allowed: \d{3} tokens or more"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    settings = {"length": 1000, **arguments}
    with pytest.raises(BadInput, match=message):
        needle_example(random.Random(0), build_tokenizer("byte").encode, **settings)
