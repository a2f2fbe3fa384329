"""The viewer: what the particles of a run did, as one page of HTML that needs nothing else.

`page(records)` shows records that `guided-smc generate --full` has written; `page()` is the page of
a running server, with a box for prompts. The script comes from `frontend/`: `make viewer`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from guided_smc.records import finite

MARK = "<!-- made by guided-smc view -->"
"""Near the beginning of every page, so that one can be told from a file of somebody's own."""

_SHOWN = (
    *("index", "prompt", "text", "error", "finish_reason", "warnings", "seed", "restarts"),
    *("log_evidence", "kl", "rewards", "diversity", "constraint", "sampling", "usage"),
    *("selected", "steps", "token_texts"),
)
"""Fields of a record that the page has a use for as they are. Particles follow from steps."""


def page(records: Sequence[dict[str, Any]] | None = None, *, title: str | None = None) -> str:
    """One self-contained page of HTML.

    Nothing in the records is taken for markup or script, whatever they hold: the policy in the
    page's head lets its own script run alone, and lets that reach nothing but, on a live page, the
    server that it came from.

    Args:
        records: As `guided-smc generate` writes them; those without `--full` have no steps to show.
            None is the live page, for a server that answers at `smc/run` beside it.
        title: Of the page.
    """
    if title is None:
        title = "guided-smc" if records is None else "guided-smc: particles"
    data = None if records is None else [_shown(record) for record in records]
    # ASCII alone, and no < that could end the element or begin a comment.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script, style = _asset("viewer.js"), _asset("style.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'self'" if records is None else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This page is drawn by its script, which your browser does not run.</noscript>
<script type="application/json" id="records">{text}</script>
<script>{script}</script>
</body>
</html>
"""


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    shown = {name: _readable(finite(record[name])) for name in _SHOWN if name in record}
    if "particles" in record:
        shown["particles"] = [
            {n: finite(p[n]) for n in ("text", "weight")} for p in record["particles"]
        ]
    return shown


def _readable(data: Any) -> Any:
    """Integers that JavaScript would round, such as seeds, as strings."""
    if type(data) is int:
        return data if abs(data) < 2**53 else str(data)
    if isinstance(data, dict):
        return {key: _readable(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_readable(item) for item in data]
    return data


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")
