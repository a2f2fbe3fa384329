"""Calls of tools: how they are asked for, how they are written, how they are read.

A call is written as many models are trained to write it:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

A chat template that shows the model this form is left to it. Where a template knows nothing of
tools, or another form, what it would have to say goes into the system message (`instructions`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANSWER = "tool_response"

_MOST_CALLS = 8
_CALL = re.compile(rf"{OPEN}\n(.*?)\n{CLOSE}(?:\n|$)", re.DOTALL)


def instructions(functions: Sequence[dict[str, Any]]) -> str:
    """What the system message tells of tools."""
    lines = "\n".join(
        json.dumps({k: f[k] for k in ("name", "description", "parameters") if f.get(k)})
        for f in functions
    )
    return (
        f"You can call these functions:\n{lines}\n"
        "To call one, answer with nothing but its name and arguments as JSON, like this:\n"
        f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}'
    )


def written(calls: Sequence[tuple[str, str]]) -> str:
    """Calls as the model writes them, from names and arguments as JSON text."""
    return "\n".join(
        f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'
        for name, arguments in calls
    )


def read(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments (as JSON text) of complete calls; None if the text is no call."""
    if not text.startswith(OPEN):
        return None
    found = []
    for written_call in _CALL.findall(text):
        call = json.loads(written_call)
        # As the model has written them: the text between the first key and the end.
        found.append((call["name"], _arguments(written_call)))
    return found


def _arguments(call: str) -> str:
    start = re.match(r'\{"name": "(?:[^"\\]|\\.)*", "arguments": ', call)
    assert start is not None, "the grammar says so"
    return call[start.end() : -1]


def grammar(functions: Sequence[dict[str, Any]], chosen: str, *, parallel: bool) -> str:
    """The language of an answer, in llguidance's dialect of Lark.

    Args:
        functions: With `name` and `parameters`.
        chosen: `auto`, a text or calls; `required`, calls; `one`, a call.
        parallel: Whether more than one call may be made, up to 8.
    """
    rules = []
    for i, function in enumerate(functions):
        head = json.dumps(f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        tail = json.dumps(f"}}\n{CLOSE}")
        rules.append(f"call{i}: {head} arguments{i} {tail}")
        rules.append(f"arguments{i}: %json {json.dumps(function['parameters'])}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    more = parallel and chosen != "one"
    rules.append(f'calls: call ("\\n" call){{0,{_MOST_CALLS - 1}}}' if more else "calls: call")
    if chosen == "auto":
        rules.append(f"TEXT: /{_other_than(OPEN)}/")
        rules.append("start: calls | TEXT")
    else:
        rules.append("start: calls")
    return "\n".join(rules) + "\n"


def _other_than(beginning: str) -> str:
    """A pattern for all texts, but the empty one, that do not begin so."""
    ways = []
    for i, character in enumerate(beginning):
        before = re.escape(beginning[:i]).replace("/", r"\/")
        ways.append(f"{before}[^{re.escape(character)}](.|\\n)*")
        if i:
            ways.append(before)
    return "(" + "|".join(ways) + ")"
