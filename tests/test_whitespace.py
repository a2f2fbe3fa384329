"""Whitespace of JSON: exactly that of json.dumps, or anything within bounds."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from languages import accepts, after, begins, check_masks, masks

from guided_smc import LM, TableModel, Vocabulary
from guided_smc.grammars import json_schema

# llguidance has DEL as an escape only.
TEXTS = st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**20) | TEXTS
    | st.sampled_from([1.5, -2e-9, '"', "\\", "a]\n", "{,:}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)  # fmt: skip
STYLES = {
    "compact": {"separators": (",", ":")},
    "line": {},
    "0": {"indent": 0},
    "1": {"indent": 1},
    "2": {"indent": 2},
    "4": {"indent": 4},
    "tab": {"indent": "\t"},
}
EXACT = {name: json_schema(True, whitespace="indented", indent=int(name)) for name in "0124"}
EXACT["compact"] = json_schema(True, whitespace="compact")
NESTED = {"a": [1, {"b": [], "c": {}, "d": "[\n"}], "e": [[[]], 2.5]}


def text_of(value, style):
    return json.dumps(value, ensure_ascii=False, **STYLES[style])


@settings(max_examples=120, deadline=None)
@given(VALUES, st.sampled_from(sorted(EXACT)))
def test_what_json_dumps_writes_is_accepted_and_no_other_style(value, style):
    text = text_of(value, style)
    assert accepts(EXACT[style], text)
    for other in STYLES:
        wrong = text_of(value, other)
        assert accepts(EXACT[style], wrong) == (wrong == text)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from(sorted(EXACT)), st.data())
def test_no_whitespace_can_be_added_or_left_out(value, style, data):
    text = text_of(value, style)
    outside, inside = [], False
    for at, char in enumerate(text):
        if not inside:
            outside.append(at)
        inside ^= char == '"' and (len(text[:at]) - len(text[:at].rstrip("\\"))) % 2 == 0
    at = data.draw(st.sampled_from(outside))
    added = data.draw(st.sampled_from(["", " ", "\n", "\t", "\n  "]))
    changed = text[:at] + added + text[at + (text[at] in " \n") :]
    assert accepts(EXACT[style], changed) == (changed == text), (text, changed)


@pytest.mark.parametrize("style", EXACT)
def test_every_beginning_is_viable_and_no_mask_leads_into_a_dead_end(style):
    assert begins(EXACT[style], text_of(NESTED, style))
    narrow = json_schema(
        {
            "type": "object",
            "properties": {
                "some": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                "none": {"type": "array", "maxItems": 0},
                "bare": {"type": "object", "additionalProperties": False},
                "pair": {"type": "array", "prefixItems": [{"const": 1}, {}], "minItems": 2},
            },
            "required": ["some", "none", "bare", "pair"],
            "additionalProperties": False,
        },
        whitespace="compact" if style == "compact" else "indented",
        **({} if style == "compact" else {"indent": int(style)}),
    )
    for seed in range(6):
        found = check_masks(narrow, random.Random(seed), steps=30)
        assert found is None or found.decode() == text_of(json.loads(found), style)
        check_masks(EXACT[style], random.Random(seed), steps=15)


def test_states_of_a_layout_fork():
    text = text_of(NESTED, "2").encode()
    for cut in range(0, len(text), 5):
        state, viable = after(EXACT["2"], text[:cut])
        fork = state.fork()
        assert viable and not state.advance(ord("~" if b'"' not in text[:cut] else "\x00"))
        assert all(fork.advance(byte) for byte in text[cut:]) and fork.accepting
        assert not masks(EXACT["2"], [state]).any() and not state.accepting


def test_any_whitespace_is_bounded():
    constraint = json_schema(True, whitespace="any")
    for gap in (" ", "\t\r\n ", " " * 64, "\n" * 64):
        assert accepts(constraint, f'{{{gap}"a"{gap}:{gap}[{gap}1{gap},{gap}2{gap}]{gap}}}')
    for gap in (" " * 65, "\n" * 65, "\n \t" * 22):
        assert not begins(constraint, f"[{gap}")
    for outside in (" 1", "1 ", "\n[]", "[]\n"):
        assert not accepts(constraint, outside)


@pytest.mark.parametrize(
    ("whitespace", "longest"), [("compact", 0), ("line", 1), ("flexible", 41), ("any", 64)]
)
def test_no_run_of_whitespace_is_endless(whitespace, longest):
    constraint = json_schema(True, whitespace=whitespace)
    state, _ = after(constraint, b"[")
    space = masks(constraint, [state])[0][b"\n"[0] if longest > 1 else b" "[0]]
    assert bool(space) == (longest > 0)
    run = 0
    state.advance(ord("\n" if longest > 1 else " "))
    while state.alive:
        run += 1
        assert run <= longest
        state.advance(ord(" "))
    assert run == longest


def test_a_model_writes_the_layout_that_was_asked_for():
    letters = b'{}[]":, \n' + b"ab01"
    vocabulary = Vocabulary([*(bytes([b]) for b in letters), b'{\n  "', b'": ', b""], [15])
    lm = LM(TableModel.random(vocabulary, seed=3, eos_probability=0.2))
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 2}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for style in ("compact", "2"):
        options = {"whitespace": "compact"} if style == "compact" else {"whitespace": "indented"}
        out = lm.generate(
            "a", output_type=json_schema(schema, **options), n_particles=30, max_tokens=40, seed=0
        )
        assert {p.text for p in out.particles if p.weight} == {
            text_of(json.loads(p.text), style) for p in out.particles if p.weight
        }
        assert out.log_evidence > float("-inf") and isinstance(out.value, dict)
