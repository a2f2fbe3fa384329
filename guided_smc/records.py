"""What a run tells as data for JSON: steps while it goes on, and everything in the end."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from guided_smc.results import Particle, Result, Step, plain_texts

if TYPE_CHECKING:  # the command's help imports this, and no NumPy
    from guided_smc.options import Options
    from guided_smc.vocabulary import Vocabulary

_DECIMALS = 6
"""Of a token's log-probabilities, which models compute in 32 bits at best."""


def details(result: Result[Any], *, prompt: Any, options: Options | None) -> dict[str, Any]:
    """All that a result knows beside its answer, as a record has it with `--full`.

    Args:
        result: Of a run.
        prompt: What was asked, as the user gave it.
        options: What it was run with.
    """
    return {
        "prompt": prompt,
        # Not called options: data sets have a column of that name, to be carried through.
        "sampling": None if options is None else options.model_dump(mode="json", exclude={"seed"}),
        "constraint": result.constraint,
        "selected": result.selected,
        "diversity": asdict(result.diversity),
        "particles": [_rounded(p) for p in result.particles],
        "steps": [_rounded(s) for s in result.steps],
        "token_texts": plain_texts(result.token_texts),
        "usage": asdict(result.usage),
    }


def step_record(
    step: Step, vocabulary: Vocabulary, texts: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """One step while a run goes on, as `details` has it, with the texts of its own tokens.

    Args:
        step: Of a `StepEvent`.
        vocabulary: Of the target.
        texts: `[N']` texts so far, to go with it.
    """
    drawn = sorted({token for tokens in step.tokens for token in tokens})
    record = _rounded(step)
    record["token_texts"] = plain_texts({t: vocabulary.tokens[t] or b"" for t in drawn})
    if texts is not None:
        record["texts"] = texts
    return record


def finite(data: Any) -> Any:
    """Data for JSON, which has no infinities and no NaN: they become null."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(item) for key, item in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(item) for item in data]
    return data


def _rounded(told: Particle | Step) -> dict[str, Any]:
    plain = {f.name: getattr(told, f.name) for f in fields(told)}
    for name in ("token_log_p", "token_log_q"):
        plain[name] = _round(plain[name])
    return plain


def _round(values: Any) -> Any:
    if isinstance(values, tuple):
        return [_round(value) for value in values]
    return round(values, _DECIMALS)
