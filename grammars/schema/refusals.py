"""Why the check of a schema refuses a text: which value, and which keyword it does not satisfy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jsonschema.exceptions import best_match

from guided_smc.grammars.schema.keywords import json_path, shorten
from guided_smc.grammars.schema.reading import Frame, Reader
from guided_smc.grammars.schema.values import key_of

if TYPE_CHECKING:
    from guided_smc.grammars.schema.validating import Checker, Place


@dataclass(frozen=True)
class Refusal:
    """What a check refuses.

    Attributes:
        path: Of the value, as a JSON path.
        keyword: Of the schema, such as `uniqueItems`; None where no keyword says it.
        reason: In words.
    """

    path: str
    keyword: str | None
    reason: str

    def __str__(self) -> str:
        """In one line."""
        return f"{f'{self.keyword} ' if self.keyword else ''}at {self.path}: {self.reason}"


@runtime_checkable
class Reasoned(Protocol):
    """A potential that can say why it refuses."""

    def why(self, text: str, *, finished: bool) -> Refusal | None:
        """The reason; None where the text, or this beginning of one, is not refused."""


def why_invalid(checker: Checker, text: str, *, finished: bool) -> Refusal | None:
    """Why a text, or any that begins with it, is not valid; None if it is or may be.

    Args:
        checker: Of the schema.
        text: As it was written.
        finished: Whether it is the whole text.
    """
    witness = _Witness(checker)
    reader: Reader[Place] = Reader(witness)
    alive = reader.feed(text)
    if alive and finished:
        alive = reader.finish()
    if alive:
        return None
    steps = reader.steps()
    if witness.refused is None:
        return Refusal(json_path(steps), None, reader.fault or "is no JSON")
    return Refusal(json_path([*steps, *witness.inside_steps]), *witness.refused)


class _Witness:
    """The judge of a checker, which remembers what it refused."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self.root = checker.root
        self.refused: tuple[str | None, str] | None = None  # keyword and reason
        self.inside_steps: list[str | int] = []  # from the closed value to what it is about

    def enter(self, place: Place, container: dict[str, Any] | list[Any]) -> Any:
        return self._checker.enter(place, container)

    def inside(self, frame: Frame[Place]) -> Place:
        return self._checker.inside(frame)

    def key(self, frame: Frame[Place], key: str) -> bool:
        if self._checker.key(frame, key):
            return True
        place = frame.place
        if len(frame.container) >= place.most:
            self.refused = "maxProperties", f"an object may have at most {place.most:g}"
        elif not all(self._checker.validators.holds(schema, key) for schema in place.names):
            self.refused = "propertyNames", f"{shorten(repr(key))} is no name for a property"
        else:
            self.refused = None, "the schema forbids this property"
        return False

    def closed(self, place: Place, value: Any) -> bool:
        if self._checker.closed(place, value):
            return True
        self.refused = None, "the schema forbids a value here"
        validators = self._checker.validators
        errors = [e for schema in place.schemas for e in validators.errors(schema, value)]
        error = best_match(errors)
        if error is not None and not place.impossible:
            self.refused = str(error.validator), shorten(error.message)
            self.inside_steps = list(error.absolute_path)
        return False

    def added(self, frame: Frame[Place], value: Any) -> bool:
        seen, _ = frame.memory
        twice = seen is not None and key_of(value) in seen
        if self._checker.added(frame, value):
            return True
        alternatives = "anyOf", "no alternative is left that it fits"
        self.refused = ("uniqueItems", "an equal item came before") if twice else alternatives
        return False
