"""Ready rewards that read the text alone: length, keywords, patterns, readability, sentiment, JSON
fields.

Each takes `beta`, `on`, `schedule`, `lookahead` and `name` besides its own arguments (see
`Reward`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict, Unpack

from guided_smc.errors import OptionError, PotentialError
from guided_smc.potentials import Completion
from guided_smc.rewards.base import Reward, as_number
from guided_smc.rewards.boundaries import sentence_ends
from guided_smc.rewards.partial_json import (
    MissingField,
    NotJson,
    Open,
    OpenList,
    Record,
    closed_part,
    whole_value,
)
from guided_smc.rewards.schedules import Schedule
from guided_smc.rewards.scoring import shorten


class Settings(TypedDict, total=False):
    """What every ready reward takes; see `Reward`."""

    beta: float
    on: str
    schedule: Schedule
    lookahead: int
    name: str


def check_settings(name: str, settings: Settings) -> None:
    """Before anything is loaded.

    Raises:
        TypeError: One is unknown; Python would blame the class that a ready reward is made of.
    """
    for key in settings:
        if key not in Settings.__annotations__:
            known = ", ".join(Settings.__annotations__)
            raise TypeError(
                f"{name}() got an unexpected keyword argument {key!r} (besides its own it takes "
                f"{known})"
            )


def _named(name: str, settings: Settings) -> dict[str, Any]:
    """Settings with a name."""
    check_settings(name, settings)
    return {"name": name, **settings}


class TextReward(Reward):
    """R as a function of one text at a time.

    Args:
        fn: R of a finished text.
        prefix: What is said of an unfinished one; None: the same.
        natural_on: `on` where the settings have none.
        bounds: Least and largest R.
        settings: See `Reward`.
    """

    def __init__(
        self,
        fn: Callable[[Completion], float],
        *,
        prefix: Callable[[Completion], float] | None = None,
        natural_on: str,
        bounds: tuple[float, float] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**{"on": natural_on, "bounds": bounds, **settings})
        self._fn = fn
        self._prefix = prefix or fn

    def score(self, completions: Sequence[Completion]) -> Sequence[float]:
        """R of each text."""
        return self._each(self._fn, completions)

    def estimate(self, completions: Sequence[Completion]) -> Sequence[float]:
        """What is said of each unfinished text."""
        return self._each(self._prefix, completions)

    def _each(
        self, fn: Callable[[Completion], float], completions: Sequence[Completion]
    ) -> list[float]:
        values = []
        for completion in completions:
            try:
                values.append(fn(completion))
            except PotentialError:
                raise
            except Exception as error:
                raise self.raised(error, [completion]) from error
        return values


_COUNT: dict[str, Callable[[Completion], int]] = {
    "characters": lambda c: len(c.text),
    "words": lambda c: len(c.text.split()),
    "tokens": lambda c: len(c.token_ids),
}


def length(
    target: int,
    *,
    unit: Literal["characters", "words", "tokens"] = "characters",
    band: int = 0,
    **settings: Unpack[Settings],
) -> Reward:
    """How near a text is to a length: `R = −(|n − target| − band) / target`, and 0 in the band.

    R is −1 for an empty text (without a band) and for one that is twice as long. Of an unfinished
    text only what it is too long by counts: it may still grow.

    Args:
        target: The length, above 0.
        unit: What is counted; words are what whitespace parts.
        band: How far from the target R is still 0.
        settings: See `Reward`. `on` is `"step"`.

    Raises:
        OptionError: An argument is out of range.
    """
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise OptionError(f"length needs a target of 1 or more, got {target!r}")
    if isinstance(band, bool) or not isinstance(band, int) or band < 0:
        raise OptionError(f"length needs a band of 0 or more, got {band!r}")
    if unit not in _COUNT:
        raise OptionError(f"length counts {', '.join(map(repr, _COUNT))}; got unit={unit!r}")
    count = _COUNT[unit]

    def beyond(too_much: int) -> float:
        return -max(0, too_much - band) / target

    return TextReward(
        lambda c: beyond(abs(count(c) - target)),
        prefix=lambda c: beyond(count(c) - target),
        natural_on="step",
        bounds=(-math.inf, 0.0),
        **_named("length", settings),
    )


_BEGUN_WORD = re.compile(r"\w+\Z")


def keywords(words: Iterable[str], **settings: Unpack[Settings]) -> Reward:
    """The share of keywords that a text has: R from 0 to 1.

    They are found as whole words, in any case; one of several words, with any whitespace between
    them. In an unfinished text the last word does not count before it is over.

    Args:
        words: At least one.
        settings: See `Reward`. `on` is `"step"`.

    Raises:
        OptionError: There are none, or one is no text or blank.
    """
    given = [words] if isinstance(words, str) else list(words)
    if not given or any(not isinstance(w, str) or not w.strip() for w in given):
        raise OptionError(f"keywords needs words, got {shorten(repr(given))}")
    spelt = {r"\s+".join(map(re.escape, word.split())) for word in given}
    patterns = [re.compile(rf"(?<!\w){word}(?!\w)", re.IGNORECASE) for word in sorted(spelt)]

    def coverage(text: str) -> float:
        return sum(p.search(text) is not None for p in patterns) / len(patterns)

    return TextReward(
        lambda c: coverage(c.text),
        prefix=lambda c: coverage(_BEGUN_WORD.sub("", c.text)),
        natural_on="step",
        bounds=(0.0, 1.0),
        **_named("keywords", settings),
    )


def matches(
    pattern: str | re.Pattern[str], *, count: bool = False, **settings: Unpack[Settings]
) -> Reward:
    """Whether a pattern is found in a text (R is 1 or 0), or how often.

    Args:
        pattern: A regular expression of Python's `re`; searched for anywhere.
        count: Whether R is the number of matches that do not overlap.
        settings: See `Reward`. `on` is `"step"`.

    Raises:
        OptionError: The pattern is malformed.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise OptionError(f"matches: the pattern {pattern!r} is malformed: {error}") from None
    if isinstance(compiled.pattern, bytes):
        raise OptionError(f"matches: the pattern {pattern!r} is for bytes; give one for texts")

    def found(completion: Completion) -> float:
        if count:
            return sum(1 for _ in compiled.finditer(completion.text))
        return 1.0 if compiled.search(completion.text) else 0.0

    return TextReward(
        found,
        natural_on="step",
        bounds=(0.0, math.inf if count else 1.0),
        **_named("matches", settings),
    )


def _flesch_kincaid_grade(letters: int, syllables: int, words: int, sentences: int) -> float:
    return 0.39 * words / sentences + 11.8 * syllables / words - 15.59


def _flesch_reading_ease(letters: int, syllables: int, words: int, sentences: int) -> float:
    return 206.835 - 1.015 * words / sentences - 84.6 * syllables / words


def _automated_readability_index(letters: int, syllables: int, words: int, sentences: int) -> float:
    return 4.71 * letters / words + 0.5 * words / sentences - 21.43


def _coleman_liau_index(letters: int, syllables: int, words: int, sentences: int) -> float:
    return 5.88 * letters / words - 29.6 * sentences / words - 15.8


METRICS = {
    "flesch_kincaid_grade": _flesch_kincaid_grade,
    "flesch_reading_ease": _flesch_reading_ease,
    "automated_readability_index": _automated_readability_index,
    "coleman_liau_index": _coleman_liau_index,
}
"""Readability from counts of letters and digits, syllables, words and sentences. Kincaid and others
(1975), Flesch (1948), Senter and Smith (1967), Coleman and Liau (1975)."""

_SYLLABIC = ("flesch_kincaid_grade", "flesch_reading_ease")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


def readability_of(text: str, metric: str = "flesch_kincaid_grade") -> float:
    """A readability metric of an English text; 0 of a text without words.

    Raises:
        OptionError: Syllables are needed, and the package `syllapy` is missing.
    """
    words = _WORD.findall(text)
    if not words:
        return 0.0
    ends = [0, *sentence_ends(text), len(text)]
    sentences = sum(bool(_WORD.search(text, *piece)) for piece in itertools.pairwise(ends))
    syllables = 0
    if metric in _SYLLABIC:
        count = _optional("syllapy", "readability").count
        syllables = sum(max(1, count(word.replace("’", "'"))) for word in words)
    letters = sum(character.isalnum() for word in words for character in word)
    return METRICS[metric](letters, syllables, len(words), sentences)


def readability(
    grade: float, *, metric: str = "flesch_kincaid_grade", **settings: Unpack[Settings]
) -> Reward:
    """How near an English text is to a level of readability: `R = −|metric − grade|`.

    Args:
        grade: The value of the metric to aim at: a US school grade, or for
            `"flesch_reading_ease"` a number from 0 (hard) to 100 (easy).
        metric: `"flesch_kincaid_grade"`, `"flesch_reading_ease"`, `"automated_readability_index"`
            or `"coleman_liau_index"`. The first two count syllables: install `syllapy`.
        settings: See `Reward`. `on` is `"sentence"`.

    Raises:
        OptionError: An unknown metric, a grade that is no number, or `syllapy` is missing.
    """
    if metric not in METRICS:
        raise OptionError(f"metric must be one of {', '.join(METRICS)}; got {metric!r}")
    aim = as_number(grade)
    if aim is None or not math.isfinite(aim):
        raise OptionError(f"readability needs a grade, a finite number; got {grade!r}")
    if metric in _SYLLABIC:
        _optional("syllapy", "readability")
    return TextReward(
        lambda c: -abs(readability_of(c.text, metric) - aim),
        natural_on="sentence",
        bounds=(-math.inf, 0.0),
        **_named("readability", settings),
    )


@functools.cache
def _sentiment_analyzer() -> Any:
    module = _optional("vaderSentiment.vaderSentiment", "sentiment", package="vaderSentiment")
    return module.SentimentIntensityAnalyzer()


def sentiment(**settings: Unpack[Settings]) -> Reward:
    """How positive an English text is: VADER's compound score, R from −1 to 1.

    A lexicon with rules for negation, emphasis and emoticons (Hutto and Gilbert, 2014); needs the
    package `vaderSentiment`.

    Args:
        settings: See `Reward`. `on` is `"sentence"`.

    Raises:
        OptionError: The package is missing.
    """
    analyzer = _sentiment_analyzer()
    return TextReward(
        lambda c: analyzer.polarity_scores(c.text)["compound"],
        natural_on="sentence",
        bounds=(-1.0, 1.0),
        **_named("sentiment", settings),
    )


def _optional(module: str, reward: str, *, package: str | None = None) -> Any:
    """A module of an optional package.

    Raises:
        OptionError: It is not installed; with what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module
        raise OptionError(
            f"the reward {reward!r} needs the package {name}, which is not installed: "
            f'pip install {name}, or "guided-smc[rewards]" for all of them'
        ) from error


def field(
    predicate: Callable[[Any], Any],
    *,
    default: float | None = None,
    bounds: tuple[float, float] | None = None,
    **settings: Unpack[Settings],
) -> Reward:
    """A function of the fields of a JSON text: `field(lambda person: person.age > 30)`.

    It is given the value, objects with their fields as attributes and as items, and returns a
    number (or a bool). Of an unfinished text it is given what is closed: a number that may still
    grow is not. Where it asks for more, nothing is said yet.

    Args:
        predicate: The function.
        default: R of finished texts that lack a field or element which it asks for, or are no JSON;
            None makes them an error.
        bounds: Least and largest R.
        settings: See `Reward`. `on` is `"field"`: asked again when another one is closed.

    Raises:
        OptionError: An argument cannot be.
    """
    if not callable(predicate):
        raise OptionError(f"field needs a function of the value, got {shorten(repr(predicate))}")
    number = None if default is None else as_number(default)
    if default is not None and (number is None or math.isnan(number)):
        raise OptionError(f"default must be a number, got {default!r}")
    return FieldReward(predicate, default=number, bounds=bounds, **settings)


class FieldReward(Reward):
    """See `field`."""

    natural_on = "field"
    may_abstain = True

    def __init__(
        self, predicate: Callable[[Any], Any], *, default: float | None, **settings: Any
    ) -> None:
        super().__init__(**{"name": "field", **settings})
        self.predicate = predicate
        self.default = default

    def score(self, completions: Sequence[Completion]) -> Sequence[Any]:
        """The predicate of each text's value."""
        return [self._of_whole(c) for c in completions]

    def estimate(self, completions: Sequence[Completion]) -> Sequence[Any]:
        """The predicate of what is closed of each text's value; None where that is too little."""
        return [self._of_closed(c) for c in completions]

    def _of_whole(self, completion: Completion) -> Any:
        try:
            value = whole_value(completion.text)
            return self._judge(value, completion)
        except (NotJson, MissingField) as error:
            if self.default is not None:
                return self.default
            what = "is no JSON" if isinstance(error, NotJson) else f"lacks a field: {error}"
            raise self.error(f"got a text that {what} (give default=...)", [completion]) from error

    def _of_closed(self, completion: Completion) -> Any:
        # What was cut behind a closed number lacks the character that closed it.
        text = completion.text + " " if self.on == "field" else completion.text
        try:
            return self._judge(closed_part(text), completion)
        except (NotJson, MissingField, Open):
            return None

    def _judge(self, value: Any, completion: Completion) -> Any:
        try:
            found = self.predicate(value)
        except (MissingField, Open):
            raise
        except Exception as error:
            is_scalar = not isinstance(value, Record | OpenList | list)
            if isinstance(error, IndexError) or (
                is_scalar and isinstance(error, AttributeError | TypeError)
            ):
                raise MissingField(str(error)) from error
            raise self.raised(error, [completion]) from error
        if found is None:
            raise self.error("returned None, not a number", [completion])
        return found
