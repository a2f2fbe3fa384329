"""The output record of one prompt, and its line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from guided_smc.cli.reading import PromptLine
from guided_smc.errors import OutputError, PotentialError
from guided_smc.records import details, finite
from guided_smc.results import Result

FIELDS = (
    "index",
    "text",
    "value",
    "finish_reason",
    "log_evidence",
    "error",
    "weights",
    "rewards",
    "kl",
    "n_tokens",
    "seed",
    "restarts",
    "warnings",
    "prompt",
    "sampling",
    "constraint",
    "selected",
    "diversity",
    "particles",
    "steps",
    "token_texts",
    "usage",
    "fingerprint",
    "input",
)
"""Names that carried fields may not take: those go under `input` in the record."""


def result_record(
    line: PromptLine, result: Result[Any], fingerprint: str, *, full: bool = False
) -> dict[str, Any]:
    """The record of a prompt that ran; with an `error` where there is no valid value.

    Where the output was not completed, or the output type refused it, `text` is the best text
    there is and `value` is null.
    """
    select_all = line.options is not None and line.options.select == "all"
    text: Any = result.text
    n_tokens: Any = len(result.token_ids)
    value: Any = None
    weights = None
    error = None
    try:
        value = result.value
        if select_all:
            values = result.values
            lengths = {p.text: len(p.token_ids) for p in result.particles}
            text = [v.text for v in values]
            value = [_plain(v.value) for v in values]
            weights = [v.weight for v in values]
            n_tokens = [lengths[v.text] for v in values]
        else:
            value = _plain(value)
    except OutputError as failure:
        text, value, error = result.text, None, failure

    record = _start(line)
    record |= {
        "text": text,
        "value": value,
        "finish_reason": result.finish_reason,
        "log_evidence": result.log_evidence,
    }
    if weights is not None:
        record["weights"] = weights
    if error is not None:
        record["error"] = _describe(error, line)
    if result.rewards:
        record["rewards"] = {name: asdict(r) for name, r in result.rewards.items()}
        record["kl"] = asdict(result.kl) if result.kl else None
    record |= {"n_tokens": n_tokens, "seed": result.seed}
    if result.restarts:
        record["restarts"] = result.restarts
    if result.warnings:
        record["warnings"] = list(result.warnings)
    if full:
        record |= details(result, prompt=line.prompt, options=line.options)
    record["fingerprint"] = fingerprint
    return record


def error_record(
    line: PromptLine, error: Exception, fingerprint: str, *, seed: int | None = None
) -> dict[str, Any]:
    """The record of a prompt that could not run to its end."""
    record = _start(line)
    record |= dict.fromkeys(("text", "value", "finish_reason", "log_evidence"))
    record["error"] = _describe(error, line)
    if seed is not None:
        record["seed"] = seed
    record["fingerprint"] = fingerprint
    return record


def _describe(error: Exception, line: PromptLine) -> dict[str, Any]:
    described: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "line": line.number,
    }
    if isinstance(error, PotentialError):
        described |= {"potential": error.potential, "text": error.text}
    return described


def encode(record: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8. Infinities and NaN become null: JSON has no such numbers."""
    line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False).translate(_ESCAPES)
    try:
        return line.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, in a carried field
        return json.dumps(finite(record), allow_nan=False).encode("ascii") + b"\n"


# Line breaks to Unicode, though not to JSON: readers that split on those would cut a record.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def _start(line: PromptLine) -> dict[str, Any]:
    clashing = {name: value for name, value in line.carried.items() if name in FIELDS}
    record: dict[str, Any] = {"index": line.index}
    record |= {name: value for name, value in line.carried.items() if name not in FIELDS}
    if clashing:
        record["input"] = clashing
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        # By alias, because those are the names in the schema that the text was held to.
        return value.model_dump(mode="json", by_alias=True)
    if _is_plain(value):
        return value  # numbers of any size too
    return to_jsonable_python(value, by_alias=True, fallback=_tree_or_text)


def _is_plain(value: Any) -> bool:
    """Whether a value is JSON data as it is."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _tree_or_text(value: Any) -> Any:
    """A `lark.Tree` as JSON data, and anything else as a text."""
    from lark import Tree

    if isinstance(value, Tree):
        return {"rule": value.data, "children": value.children}
    return str(value)
