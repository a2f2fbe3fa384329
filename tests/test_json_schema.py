"""What a JSON Schema constraint accepts, refuses, and says, keyword by keyword."""

import pytest
from languages import INTEGER, accepts, closed, dies_at, in_mask

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars import Relaxed, json_schema


def tag(name):
    return {"type": "object", "properties": {"t": {"const": name}}, "required": ["t"]}


ENFORCED = {
    "type": ({"type": ["integer", "null"]}, ["1", "-7", "null"], ["1.5", '"1"', "true", "01", ""]),
    "const": ({"const": {"a": [1, "x", None]}}, ['{"a": [1, "x", null]}'], ['{"a":[1,"x"]}', "{}"]),
    "enum": ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "true", "2"]),
    "minimum": ({"type": "integer", "minimum": -3}, ["-3", "0", "99"], ["-4", "-30"]),
    "maximum": ({"type": "number", "maximum": 2.5}, ["2.5", "-9", "2.49"], ["2.51", "3", "25"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, ["4"], ["3", "-4"]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 0}, ["-0.1"], ["0", "0.0", "1"]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["0", "-7", "49"], ["1", "48"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"é😀"', '"\\n\\""'], ['"é"', '""']),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"é😀"', '""'], ['"abc"', '"\\n\\n\\n"']),
    "pattern": ({"type": "string", "pattern": "b+c"}, ['"abbcd"', '"bc"'], ['"b"', '"ac"']),
    "pattern and maxLength": (
        {"type": "string", "pattern": "^a", "maxLength": 3},
        ['"abc"'],
        ['"abcd"', '"ba"'],
    ),
    "items": ({"type": "array", "items": INTEGER}, ["[]", "[1, 2]"], ['["a"]', "[1,]", "[1.5]"]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "string"}], "items": INTEGER},
        ['["a", 1]', "[]"],
        ["[1]", '["a", "b"]'],
    ),
    "minItems": ({"type": "array", "minItems": 2}, ["[1, null]"], ["[1]", "[]"]),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[1]", "[]"], ["[1, 2]"]),
    "properties": (closed({"a": INTEGER, "b": {}}), ['{"a": 1}', "{}"], ['{"a": "x"}', '{"c": 1}']),
    "required": (closed({"a": {}}, required=["a"]), ['{"a": 1}'], ["{}", '{"b": 1}']),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": INTEGER},
        ['{"a": "x", "b": 1}', '{"b": 1}'],
        ['{"b": "x"}'],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": INTEGER}, "additionalProperties": False},
        ['{"n1": 1}', "{}"],
        ['{"n1": "x"}', '{"m": 1}'],
    ),
    "minProperties": (closed({"a": {}, "b": {}}, minProperties=1), ['{"a": 1}'], ["{}"]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ['{"a": 1}'], ['{"a":1,"b":2}']),
    "anyOf": ({"anyOf": [INTEGER, {"const": "x"}]}, ["1", '"x"'], ['"y"', "null"]),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3"], ["2", '"x"']),
    "oneOf": (
        {"oneOf": [tag("a"), tag("b"), {"type": "null"}]},
        ['{"t": "a"}', "null"],
        ['{"t": "c"}', "{}"],
    ),
    "oneOf and $ref": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
         "$defs": {"a": tag("a"), "b": tag("b")}},
        ['{"t": "a"}', '{"t": "b"}'],
        ['{"t": "c"}', "{}"],
    ),
    "oneOf and required": (
        {"type": "object", "oneOf": [
            closed({"a": {}}, required=["a"]), closed({"b": {}}, required=["b"])]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    "$ref": (
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        ["[]", "[[[]]]"],
        ["[1]", "[[], []]"],
    ),
    "$ref and others": (
        {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer", "minimum": 3}}},
        ["3", "5"],
        ["2", "6"],
    ),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, ["null"], ["1"]),
    "true": (True, ["1", '{"a": [null]}'], ["", "nul"]),
    "date": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"'],
        ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"', '"2024-13-01"', '"0000-01-01"', '"x"'],
    ),
    "time": (
        {"type": "string", "format": "time"},
        ['"23:59:59Z"', '"23:59:60Z"', '"08:30:00.25+05:30"', '"15:59:60.5-08:00"',
         '"05:29:60+05:30"'],
        ['"24:00:00Z"', '"22:59:60Z"', '"08:30:00"', '"8:30:00Z"', '"23:59:60+01:00"'],
    ),
    "date-time": (
        {"type": "string", "format": "date-time"},
        ['"2024-02-29T12:00:00Z"'],
        ['"2023-02-29T12:00:00Z"', '"2024-02-29 12:00:00Z"', '"2024-02-29"'],
    ),
    "duration": ({"type": "string", "format": "duration"}, ['"P1DT2H"'], ['"P"', '"1D"']),
    "email": ({"type": "string", "format": "email"}, ['"a.b@c.org"'], ['"a"', '"a@"', '"@c"']),
    "hostname": ({"type": "string", "format": "hostname"}, ['"a-b.org"'], ['"-a"', '"a_b"', '""']),
    "ipv4": ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"', '"1.2.3"']),
    "ipv6": ({"type": "string", "format": "ipv6"}, ['"::1"', '"fe80::a:1"'], ['"1:2"', '":::"']),
    "uuid": (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"'],
        ['"123e4567e89b12d3a456426614174000"', '"x"'],
    ),
    "uri": ({"type": "string", "format": "uri"}, ['"http://a.org/b?c#d"'], ['"a"', '"//a"']),
    "int32": (
        {"type": "integer", "format": "int32"},
        ["2147483647", "-2147483648"],
        ["2147483648", "-2147483649"],
    ),
    "int64": (
        {"type": "integer", "format": "int64"},
        ["9223372036854774784", "-9223372036854774784", "0"],
        ["9223372036854775808", "-9223372036854775809", "99999999999999999999"],
    ),
    "const null": ({"const": None}, ["null"], ["0", '""', "false", "{}"]),
    "const null of a property": (
        closed({"a": {"const": None}}, required=["a"]), ['{"a": null}'], ["{}", '{"a": 0}'],
    ),
    "exclusive bounds of numbers": (
        {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 10},
        ["-0.49999", "0", "9.999", "0.0001"],
        ["-0.5", "-0.50", "10", "10.0", "-1", "11"],
    ),
    "exclusive bounds of draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 1,
         "exclusiveMinimum": True, "maximum": 4, "exclusiveMaximum": True},
        ["2", "3"],
        ["1", "4"],
    ),
    "multipleOf of numbers": (
        {"type": "number", "multipleOf": 0.25},
        ["0.25", "-1.5", "0", "3"],
        ["0.1", "0.26", "0.125"],
    ),
    "multipleOf within exclusive bounds": (
        {"type": "number", "multipleOf": 0.1, "exclusiveMinimum": 0, "exclusiveMaximum": 0.3},
        ["0.1", "0.2"],
        ["0", "0.3", "0.15", "0.4", "-0.1"],
    ),
    "maxLength of 1000": (
        {"type": "string", "minLength": 1, "maxLength": 1000},
        ['"a"', f'"{"a" * 1000}"'],
        ['""', f'"{"a" * 1001}"'],
    ),
    "a pattern repeated up to 129 times": (
        {"type": "string", "pattern": "^[ab]{1,129}$"},
        ['"a"', f'"{"ab" * 64}a"'],
        ['""', f'"{"ab" * 65}"', '"c"'],
    ),
    "a pattern repeated up to 1000 times": (
        {"type": "string", "pattern": "^[ab]{1,1000}$"},
        [f'"{"a" * 1000}"'],
        ['""', f'"{"a" * 1001}"'],
    ),
    "a pattern longer than maxLength": (
        {"type": "string", "pattern": "^(abc)+$", "maxLength": 7},
        ['"abc"', '"abcabc"'],
        ['"abcabcabc"', '"abcabca"', '""'],
    ),
    "required but not listed": (
        {"type": "object", "properties": {"a": INTEGER}, "required": ["b"],
         "additionalProperties": {"type": "boolean"}},
        ['{"a": 1, "b": true}', '{"b": true}', '{"b": true, "c": false}'],
        ['{"a": 1}', '{"b": 1}', "{}", '{"c": true}'],
    ),
    "allOf with overlapping properties": (
        {"allOf": [
            {"properties": {"a": {"type": "integer"}, "b": {"maxLength": 3}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3}, "b": {"type": "string"}}, "required": ["b"]},
        ], "type": "object"},
        ['{"a": 3, "b": "xyz"}', '{"a": 3, "b": "", "c": 1}'],
        ['{"a": 2, "b": "x"}', '{"a": 3, "b": "xyzw"}', '{"a": 3}', '{"a": 3, "b": 1}'],
    ),
    "anyOf of objects that begin alike": (
        {"anyOf": [
            closed({"name": {"const": "a"}, "size": INTEGER}, required=["name", "size"]),
            closed({"name": {"const": "ab"}, "sizes": {"items": INTEGER}}, required=["name"]),
            closed({"name": {"const": "a"}, "size": {"type": "null"}, "x": {}}, required=["x"]),
        ]},
        ['{"name": "a", "size": 1}', '{"name": "ab"}', '{"name": "ab", "sizes": [1]}',
         '{"name": "a", "size": null, "x": 0}'],
        ['{"name": "a"}', '{"name": "ab", "size": 1}', '{"name": "a", "sizes": [1]}',
         '{"name": "a", "size": 1, "x": 0}', '{"name": "a", "size": null}'],
    ),
    "control characters": (
        {"enum": ["a\u0001b", "c\u007fd", "\n"]},
        [r'"a\u0001b"', r'"\n"'],
        ['"ab"', '"cd"', '"b"', '""'],
    ),
    "control characters in a pattern": (
        {"type": "string", "pattern": "^a\u0001b\\x02?$"},
        [r'"a\u0001b"', r'"a\u0001b\u0002"'],
        ['"ab"'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("schema, valid, invalid", ENFORCED.values(), ids=ENFORCED)
def test_a_supported_keyword_admits_valid_texts_and_no_invalid_ones(schema, valid, invalid):
    constraint = json_schema(schema)
    assert [text for text in valid if not accepts(constraint, text)] == []
    assert [text for text in invalid if accepts(constraint, text)] == []


# What the mask does not know: schema, keyword and path that the constraint names, valid texts, and
# invalid ones with as much of them as is read before the check gives up (None: the mask refuses).
CHECKED = {
    "not": ({"not": INTEGER}, "not", "$.not", ['"a"', "1.5"], {"12": 2}),
    "if": (
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}},
        "if", "$.if", ["3", "6"], {"7": 1},
    ),
    "uniqueItems": (
        {"properties": {"a": {"items": {}, "uniqueItems": True}}},
        "uniqueItems", "$.properties.a.uniqueItems",
        ['{"a": [1, 2, true, "1", [1], [true]]}'],
        {'{"a": [1, 1]}': 12, '{"a": [{"b": 1}, {"b": 1.0}, 3]}': 27, '{"a": [1, 1.00, 2]}': 15},
    ),
    "contains": (
        {"type": "array", "contains": INTEGER, "minContains": 2},
        "contains", "$.contains", ['[1, "a", 2]'], {'["a", 1]': 8, "[1]": None},
    ),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        "dependentRequired", "$.dependentRequired",
        ['{"a": 1, "b": 2}', '{"c": 1}'], {'{"a": 1}': 8},
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"maxProperties": 1}}},
        "dependentSchemas", "$.dependentSchemas", ['{"a": 1}'], {'{"a": 1, "b": 2}': 16},
    ),
    "dependencies": (
        {"type": "object", "dependencies": {"a": ["b"]}},
        "dependencies", "$.dependencies", ['{"b": 1}'], {'{"a": 1}': 8},
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False, "type": "object"},
        "unevaluatedProperties", "$.unevaluatedProperties", ['{"a": 1}'], {'{"b": 1}': 8},
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
        "unevaluatedItems", "$.unevaluatedItems", ["[1]"], {"[1, 2]": 6},
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"maxLength": 3}},
        "propertyNames", "$.propertyNames", ['{"abc": 1}'], {'{"abcd": 1}': 7},
    ),
    "$dynamicRef": (
        {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "integer"}}},
        "$dynamicRef", "$.$dynamicRef", ["1"], {'"a"': 3},
    ),
    "format": (
        {"items": {"type": "string", "format": "regex"}, "type": "array"},
        "format", "$.items.format", ['["^a$"]'], {'["(", "a"]': 4},
    ),
    "oneOf": (
        {"oneOf": [INTEGER, {"type": "number", "minimum": 3}]},
        "oneOf", "$.oneOf", ["2", "3.5"], {"4": 1},
    ),
    "oneOf in branches": (
        {"type": "object", "required": ["t", "l"], "oneOf": [
            {"properties": {"t": {"const": "a"}, "l": {"items": INTEGER, "uniqueItems": True}}},
            {"properties": {"t": {"const": "b"}, "l": {"type": "null"}}}]},
        "uniqueItems", "$.oneOf[0].properties.l.uniqueItems",
        ['{"t": "a", "l": [1, 2]}', '{"t": "b", "l": null}'],
        {'{"t": "a", "l": [1, 1]}': 22},
    ),
    "minProperties": (
        {"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}}},
        "minProperties", "$.minProperties", ['{"a": 1, "c": 2}'], {'{"a": 1}': 8},
    ),
    "maxProperties": (
        {"properties": {"a": {"type": "object", "maxProperties": 2, "properties": {"b": {}}}}},
        "maxProperties", "$.properties.a.maxProperties",
        ['{"a": {"b": 1, "c": 2}}'],
        {'{"a": {"b": 1, "c": 2, "d": 3}}': 26},
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"a": {"minimum": 2}, "b": INTEGER}},
        "patternProperties", "$.patternProperties",
        ['{"ab": 2, "a": 2.5, "c": null}'],
        {'{"ab": 1, "c": 1}': 9, '{"b": 1.5}': 10},
    ),
    "look-ahead": (
        {"properties": {"a.b": {"type": "string", "pattern": "^(?=a).b"}}},
        "pattern", '$.properties["a.b"].pattern', ['{"a.b": "ab"}'], {'{"a.b": "bb"}': 12},
    ),
    "back-reference": (
        {"type": "string", "pattern": r"^(a|b)\1$"}, "pattern", "$.pattern", ['"aa"'], {'"ab"': 4},
    ),
    "large bounds": (
        {"type": "integer", "maximum": 2**60},
        "maximum", "$.maximum", [f"{2**60}"], {f"{2**60 + 1}": 19},
    ),
    "large constants": (
        {"const": [2**53 + 1]}, "const", "$.const", [f"[{2**53 + 1}]"], {f"[{2**53}]": 18},
    ),
    "large multiples": (
        {"type": "integer", "multipleOf": 10**20}, "multipleOf", "$.multipleOf",
        [f"{10**21}", "0"], {f"{10**20 + 1}": 21},
    ),
    "recursion with siblings": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {
            "t": {"$ref": "#/$defs/t", "maxProperties": 1}}}}},
        "maxProperties", "$.$defs.t.properties.t.maxProperties",
        ['{"t": {"t": {}}}', '{"a": 1, "b": 2}'],
        {'{"t": {"a": 1, "b": 2}}': 18},
    ),
}  # fmt: skip


@pytest.mark.parametrize("schema, keyword, path, valid, invalid", CHECKED.values(), ids=CHECKED)
def test_what_the_mask_does_not_know_is_checked_as_soon_as_it_isclosed(
    schema, keyword, path, valid, invalid
):
    constraint = json_schema(schema)
    assert Relaxed(keyword, path) in constraint.relaxed
    assert f"{keyword} ({path})" in constraint.notes()[0]
    assert [text for text in valid if not accepts(constraint, text)] == []
    for text, where in invalid.items():
        if where is None:
            assert not in_mask(constraint, text)
        else:
            assert in_mask(constraint, text)
            assert dies_at(constraint, text) == where


@pytest.mark.parametrize(
    "schema, keyword, path",
    [
        ({"items": {"format": "unknown"}}, "format", "$.items.format"),
        ({"contentEncoding": "base64"}, "contentEncoding", "$.contentEncoding"),
        ({"contentMediaType": "application/json"}, "contentMediaType", "$.contentMediaType"),
    ],
)
def test_what_nothing_enforces_is_said(schema, keyword, path):
    constraint = json_schema(schema)
    assert constraint.relaxed == (Relaxed(keyword, path, enforced=False),)
    assert constraint.notes() == (f"nothing is checked for {keyword} ({path}): an annotation here",)


@pytest.mark.parametrize(
    "schema, keyword, path",
    [
        ({"$ref": "https://example.com/a.json"}, "$ref", "$.$ref"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "$ref", "$.$ref"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema", "$.$schema"),
        ({"items": {"not": {"$ref": "other.json"}}}, "$ref", "$.items.not.$ref"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_place(schema, keyword, path):
    with pytest.raises(UnsupportedConstraintError) as refused:
        json_schema(schema)
    assert (refused.value.keyword, refused.value.path) == (keyword, path)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {"title": "T", "description": "d", "default": "x", "examples": [1], "$comment": "c"},
        {"readOnly": True, "writeOnly": False, "deprecated": True, "x-vendor": {"not": 1}},
        {"uniqueItems": False, "not": False, "propertyNames": True, "dependencies": {}},
        {"then": {"minimum": 9}, "minContains": 3, "unevaluatedItems": True},
        {"format": "password", "contentMediaType": "text/plain", "minProperties": 0},
        {"$defs": {"unused": {"not": {}, "format": "nonsense"}}},
        {"x-guidance": {"lenient": True, "whitespace_flexible": False}},
    ],
    ids=lambda h: next(iter(h)),
)
def test_what_says_nothing_is_no_reason_to_refuse(harmless):
    constraint = json_schema({"type": "array", "items": INTEGER, **harmless})
    assert accepts(constraint, "[1, 2]")
    assert not accepts(constraint, '["a"]')


@pytest.mark.parametrize(
    "schema, path, reason",
    [
        ({"properties": {"age": {"type": "int"}}}, "$.properties.age.type", "'int'"),
        ({"anyOf": [{}, {"minLength": -1}]}, "$.anyOf[1].minLength", "-1"),
        ({"required": "name"}, "$.required", "'name'"),
        ({"pattern": "["}, "$.pattern", "regular expression"),
        ({"$ref": "#/$defs/missing"}, "$.$ref", "leads to no schema"),
        ({"$ref": "#/odd/place", "odd": {"place": {"type": 3}}}, "$.odd.place.type", "3"),
        (False, "$", "requires `false`"),
        ({"$ref": "#"}, "$", "without end"),
        (closed({"next": {"$ref": "#"}}, required=["next"]), "$", "without end"),
    ],
)
def test_an_invalid_schema_is_refused_with_place_and_reason(schema, path, reason):
    with pytest.raises(ConstraintError, match="(?s).*" + reason.replace("$", r"\$")) as refused:
        json_schema(schema)
    assert refused.value.path == path
    assert not isinstance(refused.value, UnsupportedConstraintError)


@pytest.mark.parametrize(
    "text, path",
    [
        ('{"type": "string", "minLength": 1, "type": "integer"}', "$.type"),
        ('{"properties": {"a b": {"const": 1}, "c": [], "a b": {}}}', '$.properties["a b"]'),
        ('{"anyOf": [{}, {"enum": [{"x": 1, "x": 1}]}]}', "$.anyOf[1].enum[0].x"),
        ('{"items": {"type": "null", "type": "null"}, "items": {}}', "$.items"),
    ],
)
def test_a_schema_text_with_a_key_twice_is_refused_with_its_place(text, path):
    with pytest.raises(ConstraintError, match="comes twice in one object") as refused:
        json_schema(text)
    assert refused.value.path == path
    assert f"at {path}:" in str(refused.value)


def test_a_byte_order_mark_in_front_of_a_schema_is_not_read():
    constraint = json_schema('\ufeff{"const": "\ufeff"}')
    assert accepts(constraint, '"\ufeff"')
    assert not accepts(constraint, '\ufeff"\ufeff"')


@pytest.mark.parametrize("empty", ["", " \n", "\ufeff"])
def test_an_empty_schema_text_is_refused_as_empty(empty):
    with pytest.raises(ConstraintError, match="the schema is empty"):
        json_schema(empty)


@pytest.mark.parametrize(
    "schema",
    [
        "{not json",
        "[1]",
        '"string"',
        '{"const": NaN}',
        {"const": float("inf")},
        {"const": object()},
        42,
        "[" * 100_000,
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        closed({"a": False}, required=["a"]),
    ],
    ids=range(11),
)
def test_what_is_no_satisfiable_schema_is_a_constraint_error(schema):
    with pytest.raises(ConstraintError):
        json_schema(schema)


DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/then"}}, "then": INTEGER},
        {
            "properties": {"a": {"$ref": "#/propertyNames"}},
            "propertyNames": {},
            "not": {"const": 7},
        },
        {
            "$schema": DRAFT_7,
            "properties": {"a": {"$ref": "#/prefixItems/0"}},
            "prefixItems": [INTEGER],
        },
        {
            "properties": {"a": {"$ref": "http://x.org/y"}},
            "else": {"$id": "http://x.org/y", **INTEGER},
        },
        {
            "properties": {"a": {"$ref": "#/contentSchema"}},
            "contentSchema": {
                "$id": "http://x.org/y",
                "$ref": "#/$defs/z",
                "$defs": {"z": {"not": {"type": "string"}}},
            },
        },
        {
            "$schema": DRAFT_7,
            "properties": {
                "a": {"$ref": "#/properties/b/then/items"},
                "b": {
                    "then": {
                        "items": {"$ref": "#/properties/b/then/x"},
                        "x": {"not": {"type": "string"}},
                    }
                },
            },
        },
    ],
    ids=range(6),
)
def test_a_reference_may_lead_into_a_keyword_that_says_nothing(schema):
    constraint = json_schema(schema)
    assert accepts(constraint, '{"a": 1}')
    assert accepts(constraint, '{"a": "x"}') == ("propertyNames" in schema)


def test_own_properties_come_before_those_of_alternatives():
    both = {"a": {}, "b": INTEGER}
    for keyword in ("anyOf", "oneOf"):
        schema = {keyword: [{"properties": {"b": {"minimum": 1}, "c": {}}}, {"maxProperties": 0}]}
        constraint = json_schema({**schema, "type": "object", "properties": both})
        assert accepts(constraint, '{"a": 1, "b": 1, "c": 1}')
        assert not accepts(constraint, '{"b": 1, "a": 1}')


def test_an_enum_of_ten_thousand_values_is_exact():
    constraint = json_schema({"type": "array", "items": {"enum": [f"v{i}" for i in range(10_000)]}})
    assert accepts(constraint, '["v9999", "v0"]')
    assert not accepts(constraint, '["v10000"]')


def test_the_given_schema_is_neither_changed_nor_shared():
    schema = {"type": "string", "format": "date", "not": False}
    constraint = json_schema(schema)
    schema["type"] = "integer"
    assert constraint.schema == {"type": "string", "format": "date", "not": False}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$dynamicRef": "#n"}, "'#n' leads to no schema in this document"),
        ({"items": {"$ref": 5}}, r"\$\.items\.\$ref: a reference is a text, got 5"),
    ],
)
def test_references_to_nothing_are_refused_at_once(schema, message):
    with pytest.raises(ConstraintError, match=message):
        json_schema(schema)
