"""The demo's text tasks: what each demo adapter was trained to do, as plain Python that can check its answers.

One task belongs to one adapter of the same name. An input is a line of two or three made-up words; every input
that `Task.sample` draws gives a different answer for every task, and none of the answers is the input itself, so
an answer tells which adapter wrote it. Training and checking never share an input: `split_of` decides by hash.

This file imports neither torch nor the mesh, so that every test and the command line can use it.
"""

from __future__ import annotations

import codecs
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "unseen"]

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
# Weights close to English, so that repeated letters are about as common as in real text.
VOWEL_WEIGHTS = (8, 12, 7, 8, 3)
CONSONANT_WEIGHTS = (2, 3, 4, 2, 2, 6, 1, 1, 4, 3, 7, 2, 1, 6, 6, 9, 1, 3, 1, 2, 1)

WORD_LENGTHS = (2, 3, 4, 5, 6, 7, 8)
WORD_LENGTH_WEIGHTS = (2, 4, 5, 5, 4, 3, 1)

CAPITALISED_SHARE = 0.25  # of words
PUNCTUATED_SHARE = 0.02  # of words
UNSEEN_ONE_IN = 8  # texts are never trained on


@dataclass(frozen=True, slots=True)
class Task:
    """A text task and the adapter that does it."""

    name: str
    summary: str
    expected: Callable[[str], str]

    @property
    def adapter(self) -> str:
        """Name of the adapter, which is also its folder under `examples/demo/adapters/`."""
        return self.name

    def prompt(self, text: str) -> str:
        """User message of a chat, or prompt of a plain completion, that asks for `expected(text)`.

        The line break ends the text in a plain completion; the chat template trims it away.
        """
        return f"{text}\n"

    def sample(self, rng: random.Random, split: Split = "unseen") -> str:
        """A text of the given split to try the task on."""
        return sample_text(rng, split)


def _caesar(text: str) -> str:
    return text.translate(_NEXT_LETTER)


def _drop_repeats(word: str) -> str:
    """Keep the first of each letter, upper and lower case being the same letter."""
    seen: set[str] = set()
    kept = []
    for letter in word:
        if letter.lower() not in seen:
            seen.add(letter.lower())
            kept.append(letter)
    return "".join(kept)


def _each_word(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: " ".join(change(word) for word in text.split(" "))


def _replace_vowels(replacement: str) -> Callable[[str], str]:
    return lambda text: "".join(replacement if letter.lower() in VOWELS else letter for letter in text)


_LOWER = "abcdefghijklmnopqrstuvwxyz"
_NEXT_LETTER = str.maketrans(_LOWER + _LOWER.upper(), _LOWER[1:] + _LOWER[0] + _LOWER[1:].upper() + _LOWER[0].upper())

TASKS: tuple[Task, ...] = (
    Task("upper-case", "every letter in upper case", str.upper),
    Task("reverse", "the whole text backwards", lambda text: text[::-1]),
    Task("rot13", "each letter thirteen places on in the alphabet", lambda text: codecs.encode(text, "rot13")),
    Task("drop-vowels", "the text without its vowels", _replace_vowels("")),
    Task("sort-letters", "the letters of each word in order", _each_word(lambda w: "".join(sorted(w.lower())))),
    Task("count-letters", "the number of letters of each word", _each_word(lambda w: str(len(w)))),
    Task("double-letters", "every letter twice", _each_word(lambda w: "".join(letter * 2 for letter in w))),
    Task("initials", "the first letter of each word", lambda text: "".join(w[0] for w in text.split(" "))),
    Task("swap-case", "upper case to lower case and the other way round", str.swapcase),
    Task("caesar", "each letter one place on in the alphabet", _caesar),
    Task("star-vowels", "every vowel replaced by a star", _replace_vowels("*")),
    Task("rotate", "the last letter of each word moved to its front", _each_word(lambda w: w[-1] + w[:-1])),
    Task("title-case", "every word with a capital, the rest in lower case", str.title),
    Task("drop-repeats", "each word with only the first of every letter", _each_word(_drop_repeats)),
    Task("word-order", "the words from last to first", lambda text: " ".join(reversed(text.split(" ")))),
    Task("snake-case", "lower case, words joined by underscores", lambda text: text.lower().replace(" ", "_")),
)

TASKS_BY_NAME: dict[str, Task] = {task.name: task for task in TASKS}


def sample_text(rng: random.Random, split: Split) -> str:
    """A text of two or three words of the given split, on which all tasks disagree (see `is_telling`).

    No word holds a letter three times, which is as rare in real words as it is hard for a model of this size.
    """
    while True:
        text = draw_text(rng, words=rng.randint(2, 3))
        most_repeats = max(word.count(letter) for word in text.lower().split(" ") for letter in word)
        if split_of(text) == split and most_repeats <= 2 and is_telling(text):
            return text


def draw_text(rng: random.Random, words: int) -> str:
    """A line of made-up words of two to eight letters, each with a vowel and a consonant, some capitalised."""
    return " ".join(_draw_word(rng) for _ in range(words))


def _draw_word(rng: random.Random) -> str:
    (length,) = rng.choices(WORD_LENGTHS, WORD_LENGTH_WEIGHTS)
    vowel_count = min(max(1, round(length * rng.uniform(0.2, 0.6))), length - 1)
    letters = rng.choices(VOWELS, VOWEL_WEIGHTS, k=vowel_count)
    letters += rng.choices(CONSONANTS, CONSONANT_WEIGHTS, k=length - vowel_count)
    rng.shuffle(letters)
    word = "".join(letters)
    if rng.random() < CAPITALISED_SHARE:
        word = word.capitalize()
    return word + rng.choice(",.!?") if rng.random() < PUNCTUATED_SHARE else word


def split_of(text: str) -> Split:
    """The split that a text belongs to, for ever and on every machine."""
    digest = hashlib.sha256(text.encode()).digest()
    return "unseen" if digest[0] % UNSEEN_ONE_IN == 0 else "train"


def is_telling(text: str) -> bool:
    """True when every task gives its own answer to the text, and none gives the text itself."""
    answers = {task.expected(text) for task in TASKS}
    return len(answers) == len(TASKS) and text not in answers
