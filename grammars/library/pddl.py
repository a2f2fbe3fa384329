"""Plans in PDDL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from guided_smc.errors import ConstraintError
from guided_smc.grammars.library.base import (
    Ready,
    check_count,
    check_mapping,
    check_names,
    either,
    listed,
    repeated,
)
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.schema.keywords import shorten

_NAME = "[A-Za-z][A-Za-z0-9_-]*"
_RULE = "begins with a letter and goes on with letters, digits, - and _"


@listed(
    actions={"pick": ["ball", "room"], "move": ["room", "room"], "wait": 0},
    objects={"ball": ["b1", "b2"], "room": ["kitchen", "hall"]},
    accepted=("(pick b1 kitchen)\n(move kitchen hall)\n", "(wait)", "(move hall hall)"),
    refused=("", "(pick kitchen b1)", "(pick b1)", "(fly b1)", "pick b1 hall", "(wait) (wait)"),
)
def pddl_plan(
    actions: Mapping[str, int | Iterable[str]],
    objects: Mapping[str, Iterable[str]] | Iterable[str],
    *,
    min_steps: int = 1,
    max_steps: int | None = None,
    limits: Limits | None = None,
) -> Ready:
    """Plans: one action with its arguments a line.

    Dialect: the plain format that planners write and validators such as VAL read, of sequential
    plans over PDDL 2.1's names: `(move a b)`, each on a line of its own, the last of which may end
    with a newline. Names are written as they are given. Left out: times and durations, comments.
    Not checked: preconditions, which depend on the state.

    Args:
        actions: Of each action the types of its parameters; or how many it has, which may then be
            any object.
        objects: The objects of each type, those of its subtypes too; or objects without types.
        min_steps: Fewest actions. With 0 the empty text is a plan.
        max_steps: Most actions.
        limits: What the grammar may cost.

    Returns:
        A constraint whose values are lists of tuples: an action's name, and its arguments.

    Raises:
        ConstraintError: A name that PDDL does not allow, or that occurs twice (case is ignored), a
            type without objects, or a number out of bounds.
    """
    typed = objects if isinstance(objects, Mapping) else {"object": objects}
    types = check_names(typed, "types", _NAME, _RULE, fold=True)
    of_type = {t: check_names(typed[t], f"objects of {t}", _NAME, _RULE, fold=True) for t in types}
    everything = list(dict.fromkeys(name for t in types for name in of_type[t]))
    names = check_names(check_mapping(actions, "actions"), "actions", _NAME, _RULE, fold=True)
    check_count(min_steps, "min_steps", 0)
    if max_steps is not None:
        check_count(max_steps, "max_steps", max(min_steps, 1))
    rules = [f"type_{i}: {either(of_type[t])}\n" for i, t in enumerate(types)]
    rules.append(f"any: {either(everything)}\n")
    steps = []
    for name in names:
        parameters = _parameters(actions[name], name, types)
        steps.append(f'"({name}" ' + "".join(f'" " {p} ' for p in parameters) + '")"')
    rules.append(f"step: {' | '.join(steps)}\n")
    more = repeated(
        '"\\n" step', max(min_steps - 1, 0), None if max_steps is None else max_steps - 1
    )
    plan = f'step {more} ["\\n"]'
    rules.append(f"start: {plan if min_steps else f'[{plan}]'}\n")
    return Ready("".join(rules), "pddl_plan", read=_steps, key=tuple, limits=limits)


def _parameters(given: Any, action: str, types: list[str]) -> list[str]:
    """The rule of each parameter."""
    if isinstance(given, int):
        check_count(given, f"the parameters of {action}", 0)
        return ["any"] * given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConstraintError(
            f"the parameters of {action} are a list of types or a number, got "
            f"{shorten(repr(given))}"
        )
    found = list(given)
    for name in found:
        if name not in types:
            raise ConstraintError(
                f"{action} has a parameter of type {shorten(repr(name))}, which no object has (the "
                f"types are {', '.join(types)})"
            )
    return [f"type_{types.index(name)}" for name in found]


def _steps(text: str) -> list[tuple[str, ...]]:
    return [tuple(step.split(" ")) for step in re.findall(r"\(([^()]*)\)", text)]
