"""What an untrusted schema may cost."""

import threading

import pytest
from languages import INTEGER, accepts, after, closed, dies_at, masks

from guided_smc.errors import ConstraintError
from guided_smc.grammars import Limits, json_schema


def test_a_pattern_that_backtracks_for_years_is_an_error_and_no_hang():
    constraint = json_schema({"type": "string", "pattern": "^(?=(a|aa)+$)"})
    with pytest.raises(ValueError, match="takes more than 1 s"):
        dies_at(constraint, '"' + "a" * 40 + '!"')


def test_a_mask_beyond_the_limits_is_an_error_and_neither_empty_nor_full():
    schema = {"type": "string", "pattern": "^x(.*a.{30}|.*b.{30})$"}
    easy, hard = json_schema(schema), json_schema(schema, limits=Limits(max_mask_fuel=400))
    state, viable = after(easy, b'"xab')
    assert viable and masks(easy, [state]).any()
    with pytest.raises(ConstraintError, match="raise its `limits`"):
        masks(hard, [after(hard, b'"x')[0]])


def test_limits_on_an_untrusted_schema_are_kept():
    deep = {}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(ConstraintError, match="nested"):
        json_schema(deep)
    with pytest.raises(ConstraintError, match="bytes"):
        json_schema({"description": "x" * 2_000_000})
    with pytest.raises(ConstraintError, match="bytes"):
        json_schema('{"description": "' + "x" * 2_000_000 + '"}')
    with pytest.raises(ConstraintError):
        json_schema({"enum": [f"{i}" * 9 for i in range(300)]}, limits=Limits(max_lexer_fuel=100))
    assert json_schema({"description": "x" * 2_000_000}, limits=Limits(max_bytes=3_000_000))


def _nested(deep, wrap):
    schema = INTEGER
    for _ in range(deep):
        schema = wrap(schema)
    return schema


NESTINGS = {
    "items": lambda inner: {"type": "array", "items": inner},
    "properties": lambda inner: closed({"a": inner}),
    "allOf": lambda inner: {"allOf": [inner]},
    "checked items": lambda inner: {"items": inner, "uniqueItems": True},
}


@pytest.mark.parametrize("wrap", NESTINGS.values(), ids=NESTINGS)
def test_a_schema_nested_200_deep_is_refused_by_the_limit_and_no_limit_is_a_crash(wrap):
    with pytest.raises(ConstraintError, match=r"more than the limit of 64: .* raise max_depth"):
        json_schema(_nested(200, wrap))
    assert json_schema(_nested(30, wrap))
    for deep in (200, 2000):
        with pytest.raises(ConstraintError, match="too deeply to be read"):
            json_schema(_nested(deep, wrap), limits=Limits(max_depth=100_000))


def test_references_and_texts_may_go_200_deep():
    links = {f"d{i}": closed({"a": {"$ref": f"#/$defs/d{i + 1}"}}) for i in range(200)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, "d200": INTEGER}}
    assert accepts(json_schema(schema), '{"a":' * 200 + "1" + "}" * 200)
    assert not accepts(json_schema(schema), '{"a":' * 200 + "null" + "}" * 200)
    for endless in ({}, {"type": "array", "items": {"$ref": "#"}}):
        assert accepts(json_schema(endless), "[" * 200 + "]" * 200)


def test_a_long_chain_of_references_does_not_overflow_the_stack():
    chain = {f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]}
             for i in range(1500)}  # fmt: skip
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": INTEGER}}
    found = []
    thread = threading.Thread(target=lambda: found.append(json_schema(schema)))
    thread.start()
    thread.join()
    assert accepts(found[0], "[[]]") and not accepts(found[0], "[1]")
