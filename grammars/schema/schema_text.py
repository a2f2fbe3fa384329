"""Schemas read from text, where a key that comes twice is no accident to be passed over.

Of equal keys in one object JSON's readers keep the last, so that half of a schema may be lost and
nobody is told.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from guided_smc.grammars.schema.keywords import json_path, shorten

BOM = "\ufeff"
"""What some editors put at the beginning of a file in UTF-8. It is no part of the text."""


class RepeatedKeyError(ValueError):
    """An object has a key twice.

    Attributes:
        path: Of the object's value under that key, as a JSON path.
    """

    def __init__(self, key: str, path: str) -> None:
        self.path = path
        super().__init__(
            f"the key {shorten(json.dumps(key, ensure_ascii=False), 60)} comes twice in one "
            f"object, at {path}: rename one of them, or take it out"
        )


class StrictDecoder(json.JSONDecoder):
    """Python's own, for objects that have each key once: for `json.loads(text, cls=...)`.

    Raises:
        RepeatedKeyError: In place of a value that has an object with a key twice.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(object_pairs_hook=self._object, **options)
        self._repeated: list[tuple[dict[str, Any], str]] = []

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        self._repeated.clear()
        value, end = super().raw_decode(s, idx)
        if self._repeated:
            # Objects are made from the inside out: the last one is in no value that was dropped.
            found, key = self._repeated[-1]
            raise RepeatedKeyError(key, json_path([*_steps_to(value, found), key]))
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            times = Counter(key for key, _ in pairs)
            self._repeated.append((made, next(key for key, n in times.items() if n > 1)))
        return made


def _steps_to(value: Any, wanted: Any) -> tuple[str | int, ...]:
    """Keys and indices that lead to a part of JSON data."""
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    while waiting:
        part, steps = waiting.pop()
        if part is wanted:
            return steps
        inside: Iterable[tuple[str | int, Any]] = ()
        if isinstance(part, dict):
            inside = part.items()
        elif isinstance(part, list):
            inside = enumerate(part)
        waiting += [(each, (*steps, step)) for step, each in inside]
    raise AssertionError("every object is a part of the value")
