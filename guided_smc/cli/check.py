"""`guided-smc check`: what a schema, pattern or grammar makes of a text, without a model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from guided_smc.cli.common import SETTINGS, debug_option, language_options, say_error
from guided_smc.cli.referents import load_language, read_text
from guided_smc.errors import ConstraintError

if TYPE_CHECKING:
    from guided_smc.grammars import Description, Explanation
    from guided_smc.potentials import Constraint


@click.command(context_settings=SETTINGS, short_help="Try a schema, pattern or grammar.")
@language_options
@click.option("--text", help="A text to hold against it, exactly as given.")
@click.option(
    "--text-file",
    help="A file with such a text; - is standard input. A last line break is left out.",
)
@click.option("--sample", type=click.IntRange(min=0), help="Draw so many members of the language.")
@click.option("--seed", type=int, help="Of the members. Random if not given.")
@click.option(
    "--max-characters", type=click.IntRange(min=0), help="Of a drawn member.  [default: 2000]"
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that compiling may take, in a process of its own (with 1 GiB of memory).",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead.")
@debug_option
def check(**given: Any) -> int:
    """Compile a schema, pattern or grammar, and say what enforces it; no model is loaded.

    Say one of --schema, --regex and --grammar. With --text or --text-file, say whether the text is
    allowed and, if not, where it dies and what was allowed there. With --sample, draw random
    members, which show what it lets through (and not what a model would say).

    \b
    Examples:
      guided-smc check --schema person.json
      guided-smc check --schema person.json --text '{"name": "Ada"}'
      guided-smc check --grammar query.lark --text-file query.txt
      guided-smc check --regex '[A-Z][a-z]+, [0-9]{1,3}' --sample 5 --seed 0
      guided-smc check --schema untrusted.json --time-limit 2 --json

    \b
    With --json (one object):
      engine, seconds, notes
      sizes          such as source_bytes, subschemas, grammar_bytes (what is compiled)
      relaxed        keywords that the mask does not know: {keyword, path, enforced}
      text           {verdict, reason, offset, byte_offset, line, column, allowed, refused_by,
                     checked, refusal}; the verdict is accepted, refused or incomplete
      members        with --sample
      error          in the place of all others, where it does not compile

    \b
    Exit codes:
      0    it compiles, and the text is allowed
      1    the text is not allowed, or no member was found to draw
      2    wrong usage, it does not compile, or it goes beyond the limits
    """  # noqa: D301 (click's mark is the character, not its escape)
    if given["schema"] is given["regex"] is given["grammar"] is None:
        raise click.UsageError("one of --schema, --regex and --grammar is needed")
    if given["text"] is not None and given["text_file"] is not None:
        raise click.UsageError("--text and --text-file exclude each other")
    if given["sample"] is None and not (given["seed"] is given["max_characters"] is None):
        raise click.UsageError("--seed and --max-characters need --sample")
    text = _text(given)
    try:
        constraint, seconds = _compile(given)
    except click.UsageError as error:
        if given["as_json"]:
            click.echo(json.dumps({"error": error.message}, ensure_ascii=False))
        raise

    from guided_smc.grammars import describe, explain

    description = describe(constraint)
    explanation = None if text is None else explain(constraint, text)
    members, failed = _members(constraint, given)
    if given["as_json"]:
        _write_json(description, seconds, explanation, members)
    else:
        _write(description, seconds, explanation, members, _name(given))
    if failed is not None:
        say_error(failed)
    return 0 if failed is None and (explanation is None or explanation.accepted) else 1


def _text(given: dict[str, Any]) -> str | None:
    if given["text_file"] is None:
        return given["text"]
    if given["text_file"] == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"standard input is not in UTF-8: {error}") from None
    else:
        text = read_text(given["text_file"], "text")
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _compile(given: dict[str, Any]) -> tuple[Constraint, float]:
    """The constraint, and the seconds that it took."""
    from guided_smc.grammars import Limits, regex, start_worker
    from guided_smc.grammars.sharing import refuse_disjoint

    limits = None
    regex("a")  # what is made once does not count
    if given["time_limit"] is not None:
        limits = Limits.untrusted(max_compile_seconds=given["time_limit"])
        start_worker()
    begin = time.perf_counter()
    constraint = load_language(given, limits).constraint
    assert constraint is not None
    try:
        refuse_disjoint(constraint)
    except ConstraintError as error:
        raise click.UsageError(str(error)) from None
    return constraint, time.perf_counter() - begin


def _members(constraint: Constraint, given: dict[str, Any]) -> tuple[list[str] | None, str | None]:
    """Members, and why there are not as many as were asked for."""
    if given["sample"] is None:
        return None, None
    from guided_smc.grammars import sample_members

    most = {} if given["max_characters"] is None else {"max_characters": given["max_characters"]}
    try:
        return sample_members(constraint, given["sample"], seed=given["seed"], **most), None
    except ConstraintError as error:
        return [], str(error)


def _name(given: dict[str, Any]) -> str:
    kind = next(kind for kind in ("schema", "regex", "grammar") if given[kind] is not None)
    return f"{kind} {given[kind]}"


def _write(
    description: Description,
    seconds: float,
    explanation: Explanation | None,
    members: list[str] | None,
    name: str,
) -> None:
    from guided_smc.grammars.characters import quoted

    click.echo(f"{name} compiles in {1000 * seconds:.1f} ms")
    rows = [("engine", description.engine)]
    rows += [(kind.replace("_", " "), str(size)) for kind, size in description.sizes.items()]
    for relaxed in description.relaxed:
        what = "checked" if relaxed.enforced else "ignored"
        rows.append((what, f"{relaxed.keyword} ({relaxed.path})"))
    if not description.relaxed:  # these notes say the same in sentences
        rows += [("note", note) for note in description.notes]
    width = max(len(head) for head, _ in rows)
    for head, content in rows:
        click.echo(f"  {head:{width}}  {content}")
    if explanation is not None:
        click.echo(f"text {explanation}")
    for member in members or ():
        click.echo(f"member {member if member.isprintable() else quoted(member)}")


def _write_json(
    description: Description,
    seconds: float,
    explanation: Explanation | None,
    members: list[str] | None,
) -> None:
    record: dict[str, Any] = {**asdict(description), "seconds": round(seconds, 6)}
    if explanation is not None:
        allowed = explanation.allowed
        record["text"] = {
            name: value for name, value in asdict(explanation).items() if name != "text"
        } | {
            "reason": explanation.reason,
            "allowed": {
                **asdict(allowed),
                "characters": "".join(sorted(allowed.characters)),
                "in_words": str(allowed),
            },
        }
    if members is not None:
        record["members"] = members
    click.echo(json.dumps(record, ensure_ascii=False))
