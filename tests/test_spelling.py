"""JSON in all its spellings: a schema is about values, and not about how they are written."""

import json
import random
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator, Draft202012Validator
from languages import INTEGER, accepts, begins, closed, dies_at

from guided_smc.grammars import explain, json_schema, sample_members
from guided_smc.grammars.completing import Completions
from guided_smc.grammars.matching import every_byte
from guided_smc.grammars.pieces import Pieces
from guided_smc.grammars.schema.spelling import beginnings, spans, spelt_by, usual, written_out
from guided_smc.vocabulary import Vocabulary

WORDS = [rb"\u", rb"\u00", rb"\u0061", rb"\u006", rb"\/", rb'"\u', rb'"\ ', rb' "\u00', b'"\\']
WORDS += [b"a\\", b"a\\u", b'\\"', b'\\", "', b"\\n", b"n\\/", b"61", b'61":', b"2f/", b"//", b"u"]
WORDS += [b"/b", b"ud8", b"3d", rb"\ude", rb"e\ude00", b"1.", b".0", b".00", b"0,", b".5", b"00"]
WORDS += [b"e", b"E", b"e+", b"e-0", b"e0", b"e1,", b"0e1", b"-", b"-0", b" -", b" -0.0", b"[1.0"]
WORDS += [b"[1.0,", b", 1e", b'": 1', b'": ', b'", "', b"0]", b".0}", b"12", b"25", b"a", b'",']
WORDS += [b"0061b", b'2fa"', b'061"', b"6", b"6fae", b"e9/", b"00e", b"d83d", b"1a\\", b"7fa"]
VOCABULARY = Vocabulary([*(bytes([i]) for i in range(256)), *WORDS, b""], [256 + len(WORDS)])
BY_BYTES = {data: i for i, data in enumerate(VOCABULARY.tokens)}


def split(text, draw):
    """Tokens that spell a text, drawn at random."""
    data, at, tokens = text.encode(), 0, []
    while at < len(data):
        ways = [n for n in range(1, 9) if data[at : at + n] in BY_BYTES and at + n <= len(data)]
        n = draw.choice([1, max(ways), draw.choice(ways)])
        tokens.append(BY_BYTES[data[at : at + n]])
        at += n
    return tokens


def mask_of(compiled, state):
    """Bool [V]."""
    words = np.empty((1, -(-len(VOCABULARY) // 32)), dtype=np.int32)
    compiled.fill_masks([state], words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return bits[: len(VOCABULARY)].astype(bool)


def passes(constraint, tokens):
    """Whether mask, state and check let tokens pass; mask and state have to agree."""
    compiled = constraint.compile(VOCABULARY)
    state = compiled.start()
    for token in tokens:
        allowed = bool(mask_of(compiled, state)[token])
        assert state.fork().advance(token) == allowed, VOCABULARY.tokens[token]
        if not allowed:
            return False
        state.advance(token)
    return state.accepting and dies_at(constraint, VOCABULARY.decode(tokens)) is None


# -- random schemas, values and spellings ----------------------------------------------------------

CHARACTERS = 'ab/"\\\n\x01\x7fé—😀'
TEXTS = ["", "a", "b", "ab", "a/b", 'a"b', "\\", "\n", "\x7f", "é", "😀", "a b", "—a"]


def a_schema(draw, depth=2):
    """A small schema, and what draws valid values."""
    kinds = ["string", "listed", "integer", "number", "constant"]
    kind = draw.choice(kinds + ["object", "array", "object"] * (depth > 0))
    if kind == "string":
        most = draw.randint(0, 3)
        extra = draw.choice([{}, {"maxLength": most}, {"pattern": "^[^b]*$", "maxLength": most}])
        letters = [c for c in CHARACTERS if c != "b"]
        return {"type": "string", **extra}, lambda: "".join(draw.choices(letters, k=most))
    if kind == "listed":
        values = draw.sample([*TEXTS, 0, 1, 12, -3, 1.5, 0.25, -0.5, True, None], 4)
        return {"enum": values}, lambda: draw.choice(values)
    if kind == "constant":
        names = draw.sample(TEXTS, 2)
        value = draw.choice([names, {names[0]: 2, names[1]: [draw.choice(TEXTS), 1.25]}, 7])
        return {"const": value}, lambda: value
    if kind == "integer":
        low, high = draw.choice([(None, None), (0, 120), (-5, None), (100, 200), (None, 0)])
        step = draw.choice([1, 1, 3, 10])
        schema = {"type": "integer", **_bounds(low, high)}
        if step > 1:
            schema["multipleOf"] = step
        lows = -30 if low is None else low
        highs = (400 if high is None else high) // step
        return schema, lambda: step * draw.randint(-(-lows // step), highs)
    if kind == "number":
        low, high = draw.choice([(None, None), (0, 1), (-1.5, 20.25), (2.5, None)])
        step = draw.choice([None, 0.5, 0.25])
        schema = {"type": "number", **_bounds(low, high)}
        if step:
            schema["multipleOf"] = step
        lows, highs = (-3 if low is None else low), (50 if high is None else high)
        scale = int(1 / (step or 0.125))
        return schema, lambda: draw.randint(int(lows * scale), int(highs * scale)) / scale
    if kind == "array":
        inner, value = a_schema(draw, depth - 1)
        schema = {"type": "array", "items": inner, "maxItems": 3}
        return schema, lambda: [value() for _ in range(draw.randint(0, 3))]
    names = draw.sample(TEXTS, draw.randint(1, 3))
    parts = {name: a_schema(draw, depth - 1) for name in names}
    required = [name for name in names if draw.random() < 0.5]
    schema = closed({name: part for name, (part, _) in parts.items()}, required=required)
    if draw.random() < 0.3:
        schema["additionalProperties"] = {"type": "boolean"}

    def value():
        return {n: make() for n, (_, make) in parts.items() if n in required or draw.random() < 0.6}

    return schema, value


def _bounds(low, high):
    said = {"minimum": low, "maximum": high}
    return {keyword: bound for keyword, bound in said.items() if bound is not None}


def spell(value, draw, oddity):
    """JSON text of a value in a random spelling."""
    if isinstance(value, str):
        return '"' + "".join(spell_character(c, draw, oddity) for c in value) + '"'
    if isinstance(value, dict):
        items = [
            f"{spell(k, draw, oddity)}:{blank(draw)}{spell(v, draw, oddity)}"
            for k, v in value.items()
        ]
        return "{" + f",{blank(draw)}".join(items) + "}"
    if isinstance(value, list):
        return "[" + f",{blank(draw)}".join(spell(v, draw, oddity) for v in value) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return spell_number(value, draw, oddity)


def blank(draw):
    """Whitespace between tokens."""
    return draw.choice(["", " ", "\n  "])


def spell_character(character, draw, oddity):
    """A character of a string, in a random spelling."""
    if draw.random() < oddity:
        units = character.encode("utf-16-be")
        ways = ["".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))]
        ways.append(ways[0].upper().replace("U", "u"))
        return draw.choice([*ways, "\\/"] if character == "/" else ways)
    return json.dumps(character, ensure_ascii=False)[1:-1]


def spell_number(number, draw, oddity):
    """A number in a random spelling whose digits in front of the exponent begin the number."""
    written = written_out(repr(number))
    if draw.random() > oddity:
        return written
    if number == 0:
        return draw.choice(["-0", "0.0", "-0.00", "0e7", "-0E-2", "0.0e+1"])
    zeros = len(written) - len(written.rstrip("0")) if "." not in written else 0
    power = draw.randint(0, zeros)
    mantissa = written[: len(written) - power]
    if "." not in mantissa and draw.random() < 0.5:
        mantissa += ".0"
    if "." in mantissa:
        mantissa += "0" * draw.randint(0, 2)
    signs = ["", "+", "-"] if power == 0 else ["", "+"]
    exponent = f"{draw.choice('eE')}{draw.choice(signs)}{draw.choice(['', '0'])}{power}"
    # "1.0e2" may not come where "1.0" may not.
    if power:
        mantissa = mantissa.partition(".")[0]
        return mantissa + exponent
    return mantissa + draw.choice(["", exponent])


def is_valid(text, schema):
    """What the `json` module and the `jsonschema` package say, each key once."""

    def once(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=once)
    except (ValueError, AssertionError):
        return False
    return Draft202012Validator(schema).is_valid(value)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), oddity=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_a_valid_value_is_accepted_however_it_is_spelt(seed, oddity):
    draw = random.Random(seed)
    schema, value = a_schema(draw)
    text = spell(value(), draw, oddity)
    assert is_valid(text, schema)
    assert passes(json_schema(schema), split(text, draw)), (schema, text)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_invalid_value_is_refused_however_it_is_spelt(seed):
    draw = random.Random(seed)
    schema, _ = a_schema(draw)
    _, value = a_schema(draw)
    text = spell(value(), draw, 0.5)
    if draw.random() < 0.7:  # damage it
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(["", "0", "e1", ".0", "\\", "a", '"', "-"]) + text[at + 1 :]
    if passes(json_schema(schema), split(text, draw)):
        assert is_valid(text, schema), (schema, text)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_in_every_spelling_a_mask_holds_exactly_the_tokens_that_can_be_taken(seed):
    draw = random.Random(seed)
    schema, value = a_schema(draw)
    compiled = json_schema(schema).compile(VOCABULARY)
    state, tokens = compiled.start(), split(spell(value(), draw, 0.6), draw)
    for token in tokens[: draw.randint(0, len(tokens))]:
        assert state.advance(token)
    taken = [state.fork().advance(token) for token in range(len(VOCABULARY))]
    assert mask_of(compiled, state).tolist() == taken


PERSON = closed(
    {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 120}},
    required=["name"],
)


@pytest.mark.parametrize(
    "schema, accepted, refused",
    [
        (
            PERSON,
            [
                r'{"n\u0061m\u0065": "\/\/\ud83d\ude00é\u00e9"}',
                r'{"\u006eame": "", "a\u0067e": 12e1}',
            ],
            [r'{"n\u0061mes": ""}', r'{"name": "123456"}', r'{"name": "12345\u0036"}'],
        ),
        (
            {"properties": {"a": INTEGER}},
            [r'{"\u0062": "x"}', r'{"\u0061": 1.0, "b": 1}'],
            [r'{"\u0061": "x"}', r'{"a": 1, "\u0061": 1}', r'{"b": 1, "\u0062": 2}'],
        ),
        (
            {"enum": [{"a/b": ["é", 1]}, 1.5, -2, "\x7f"]},
            [r'{"a\/b": ["\u00E9", 1.0]}', "1.50", "1.5e0", "-2E+0", '"\x7f"', r'"\u007F"'],
            [r'{"a\/b": ["\u00E8", 1.0]}', "1.05", "-2e1", "2"],
        ),
        (INTEGER, ["1.0", "-0", "-0.0", "0e9", "1e2", "100e-2", "1E+2"], ["1.5", "15e-1", "1e-1"]),
        (
            {"type": "integer", "minimum": 0, "maximum": 120},
            ["-0", "1.00", "12e1", "120.0e0"],
            ["-1", "121", "13e1", "1e3", "-1e0", "0.5"],
        ),
        (
            {"type": "number", "multipleOf": 0.25, "maximum": 10},
            ["2.50", "2.5e0", "1e1", "-1e1", "0.25", "-0.0"],
            ["1.30", "2e1", "1e-1"],
        ),
        ({"type": "string", "pattern": "^a/b$"}, [r'"\u0061\/b"', r'"a\u002fb"'], [r'"\/ab"']),
        ({"type": "string", "format": "date"}, [r'"2024-\u00302-29"'], [r'"2023-\u00302-29"']),
        ({"type": "string", "minLength": 2, "maxLength": 2}, [r'"\ud83d\ude00\/"'], [r'"\/"']),
    ],
)
def test_names_constants_and_bounds_hold_for_values_and_not_for_spellings(
    schema, accepted, refused
):
    for whitespace in ("flexible", "compact", "any"):
        constraint = json_schema(schema, whitespace=whitespace)
        for text in accepted:
            assert accepts(constraint, "".join(text.split(" "))), text
        for text in refused:
            assert not accepts(constraint, "".join(text.split(" "))), text


@pytest.mark.parametrize("seed", range(5))
def test_an_exponent_may_begin_if_some_exponent_that_begins_so_makes_an_allowed_number(seed):
    draw = random.Random(seed)
    values = set()
    for _ in range(3):
        digits = draw.choice(["5", "12", "105", "25"])
        values.add(draw.choice(["", "-"]) + written_out(f"{digits}e{draw.randint(-6, 6)}"))
    constraint = json_schema({"enum": [json.loads(value) for value in values]})
    for mantissa in {v[:n] for v in values for n in range(1, len(v) + 1)} - {"-"}:
        if mantissa[-1] == "." or Decimal(mantissa) == 0:
            continue
        for sign in ("", "+", "-"):
            for digits in ("", "1", "2", "4", "0", "03"):
                powers = range(100) if not digits else [*_beginning_with(digits)]
                signs = [1, -1] if not sign + digits else [-1 if sign == "-" else 1]
                reached = {written_out(f"{mantissa}e{s * p}") for p in powers for s in signs}
                text = f"{mantissa}e{sign}{digits}"
                assert begins(constraint, text) == bool(reached & values), (values, text)


def _beginning_with(digits):
    first = int(digits)
    return {first, *(range(10) if first == 0 else range(10 * first, 10 * first + 10))}


def test_in_draft_4_an_integer_has_no_fraction_but_a_constant_may():
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
    for schema, text in [(INTEGER, "1.0"), (INTEGER, "1e2"), ({"enum": [1]}, "1.0")]:
        valid = Draft4Validator(schema).is_valid(json.loads(text))
        assert accepts(json_schema({**draft4, **schema}), text) == valid == ("enum" in schema)
        assert accepts(json_schema(schema), text)


def test_half_of_a_surrogate_pair_is_refused_at_once():
    constraint = json_schema(closed({"a": {"type": "string"}}))
    for text in (r'{"a": "\udc', r'{"a": "\ud83d"', r'{"a": "\ud83d\n', r'{"a": "\ud83d\u0'):
        assert begins(constraint, text[:-1]) and not begins(constraint, text)


def test_a_layout_holds_for_every_spelling():
    constraint = json_schema(PERSON, whitespace="indented")
    assert accepts(constraint, '{\n  "n\\u0061me": "\\/",\n  "age": 1.0\n}')
    assert not accepts(constraint, '{"n\\u0061me": "\\/"}')


def test_forks_in_an_odd_number_have_their_masks_filled_together():
    compiled = json_schema({"items": {"type": "integer"}}).compile(VOCABULARY)
    state = compiled.start()
    assert all(state.advance(byte) for byte in b"[10.0e")
    states = [state.fork() for _ in range(3)]
    assert states[1].advance(ord("1")) and states[2].advance(ord("2"))
    states += [each.fork() for each in states for _ in range(3)]
    words = np.empty((len(states), -(-len(VOCABULARY) // 32)), dtype=np.int32)
    compiled.fill_masks(states, words)
    one = np.empty((1, words.shape[1]), dtype=np.int32)
    for row, each in zip(words, states, strict=True):
        compiled.fill_masks([each], one)
        assert (row == one[0]).all()
    assert bool(words[2][ord(",") >> 5] >> (ord(",") & 31) & 1)


def test_the_way_to_the_end_and_random_members_are_spelt_as_usual():
    constraint = json_schema({**PERSON, "required": ["name", "age"]})
    ways = Completions(constraint.compile(every_byte()), Pieces(every_byte()))
    assert ways.greedy(ways.start()) == b'{"name":"","age":0}'
    odd = ways.after(ways.start(), rb'{"n\u00')
    (way, *_) = ways.search(odd, room=None, at_most=2000, wanted=1).ends
    assert ways.completes(odd, way)
    for member in sample_members(constraint, 20, seed=1):
        assert '"name"' in member and "e+" not in member.lower().partition("age")[2]
    assert "but" not in explain(constraint, '{"nome": 1}').reason


@given(low=st.integers(0, 0x10FFFF), size=st.integers(0, 6000), other=st.integers(0, 0x10FFFF))
def test_a_range_of_characters_is_told_apart_by_beginnings(low, size, other):
    high = min(low + size, 0x10FFFF)
    starts = beginnings(low, high)
    for point in {low, high, low - 1, high + 1, other} - set(range(0xD800, 0xE000)):
        if 0 <= point <= 0x10FFFF:
            begun = any(usual(chr(point)).startswith(start) for start in starts)
            assert begun == (low <= point <= high)


@given(st.characters(exclude_categories=["Cs"]), st.data())
def test_an_escape_may_become_a_character_until_it_is_another_one(character, data):
    escape = json.dumps(character)[1:-1]
    if escape[0] == "\\":
        for n in range(1, len(escape) + 1):
            part = escape[:n]
            if n > 1 and part[1] != "u":
                continue
            assert any(low <= ord(character) <= high for low, high in spans(part))
        assert spelt_by(escape) == character
    units = character.encode("utf-16-be").hex()
    written = "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
    assert spelt_by(written) == character
    assert spans(written) == ((ord(character), ord(character)),)


@settings(max_examples=50)
@given(st.from_regex(r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,5})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_a_number_is_written_out_without_changing_its_value(number):
    written = written_out(number)
    if written is not None:
        assert Decimal(written) == Decimal(number)
        assert written_out(written) == written and "e" not in written.lower()
