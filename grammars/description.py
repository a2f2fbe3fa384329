"""What became of a constraint: the engine that enforces it, its size, and what it cannot say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from guided_smc.grammars.choice import Choice
from guided_smc.grammars.grammar import Grammar
from guided_smc.grammars.lark_text import LarkText
from guided_smc.grammars.matching import every_byte
from guided_smc.grammars.output_types import _OneOf, _Typed
from guided_smc.grammars.partial_regex import PartialRegex
from guided_smc.grammars.schema.json_schema import JsonSchema
from guided_smc.grammars.schema.relaxing import Relaxed
from guided_smc.potentials import Constraint, Intersection, Unmasked


@dataclass(frozen=True)
class Description:
    """What became of a constraint.

    Attributes:
        engine: What enforces it, in a few words; of an intersection the parts'.
        sizes: Such as `source_bytes`, `grammar_bytes` (what llguidance compiles), `subschemas`,
            `parser_states`; added up over the parts of an intersection or a union.
        relaxed: The keywords of a schema that the mask does not know.
        notes: What else users should know.
    """

    engine: str
    sizes: dict[str, int]
    relaxed: tuple[Relaxed, ...]
    notes: tuple[str, ...]


def describe(constraint: Constraint) -> Description:
    """Say what enforces a constraint, and how large it is.

    Args:
        constraint: Of any kind.
    """
    if isinstance(constraint, Intersection):
        return _together(constraint, constraint.constraints, " & ")
    if isinstance(constraint, _Typed):
        return _together(constraint, (constraint.language,), "")
    if isinstance(constraint, _OneOf):
        return _together(constraint, constraint.parts, " | ")
    relaxed = constraint.relaxed if isinstance(constraint, JsonSchema) else ()
    return Description(_engine(constraint), _sizes(constraint), relaxed, constraint.notes())


def _together(constraint: Constraint, parts: Sequence[Constraint], sign: str) -> Description:
    described = [describe(part) for part in parts]
    sizes: dict[str, int] = {}
    for name, size in (item for part in described for item in part.sizes.items()):
        sizes[name] = sizes.get(name, 0) + size
    return Description(
        engine=sign.join(part.engine for part in described),
        sizes=sizes,
        relaxed=tuple(r for part in described for r in part.relaxed),
        notes=constraint.notes(),
    )


def _engine(constraint: Constraint) -> str:
    match constraint:
        case JsonSchema():
            checks = any(r.enforced for r in constraint.relaxed)
            return "llguidance's masks" + (", and a check of closed values" if checks else "")
        case Grammar():
            return "llguidance's masks"
        case PartialRegex():
            return "partial matches of the regex package, by rejection"
        case LarkText():
            return "lark's LALR parser, by rejection"
        case Choice():
            return "a sorted list"
    unmasked = isinstance(constraint.compile(every_byte()), Unmasked)
    return type(constraint).__name__ + (", by rejection" if unmasked else "")


def _sizes(constraint: Constraint) -> dict[str, int]:
    match constraint:
        case JsonSchema():
            return {
                "source_bytes": _bytes(json.dumps(constraint.schema, ensure_ascii=False)),
                "subschemas": constraint.subschemas,
                "grammar_bytes": _bytes(constraint.compiled_from),
            }
        case Grammar():
            source = getattr(constraint, "pattern", getattr(constraint, "grammar", ""))
            return {
                "source_bytes": _bytes(source),
                "grammar_bytes": _bytes(constraint.compiled_from),
            }
        case PartialRegex():
            return {"source_bytes": _bytes(constraint.pattern)}
        case LarkText():
            return {"source_bytes": _bytes(constraint.grammar), **constraint.sizes()}
        case Choice():
            return {
                "texts": len(constraint.texts),
                "source_bytes": sum(map(_bytes, constraint.texts)),
            }
    return {}


def _bytes(text: Any) -> int:
    return len(str(text).encode("utf-8", errors="surrogatepass"))
