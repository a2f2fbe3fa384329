"""What is closed in the beginning of a JSON text, for every beginning."""

import json

import pytest

from guided_smc.rewards.partial_json import (
    MissingField,
    NotJson,
    Open,
    OpenList,
    Record,
    closed_part,
    last_closed,
    whole_value,
)

TEXTS = [
    '{"name": "Ann", "age": 120, "tags": ["a", "b\\"c"], "at": {"x": -1.5e+3, "y": null}}',
    ' [ 1 , 20, [ ] , {} , true,false, "\\u00e9\\n" ] ',
    '{"items":[{"price":10,"n":1},{"price":25.5,"n":[2]}],"total":35.5}',
    '{"": {"": {"": 0}}}',
    '"a string"',
    "[[[1],2],3]",
    '{"a": 1, "a": 12}',
]


def plain(value):
    """A record or list, open or not, as what is closed in it."""
    if isinstance(value, Record):
        fields = object.__getattribute__(value, "_Record__fields")
        return {k: plain(v) for k, v in fields.items()}
    if isinstance(value, OpenList):
        return [plain(v) for v in value._elements]
    return [plain(v) for v in value] if isinstance(value, list) else value


def is_open(value) -> bool:
    if isinstance(value, Record):
        return object.__getattribute__(value, "_Record__open")
    return isinstance(value, OpenList)


def within(part, whole) -> bool:
    """Whether what was closed is in the whole, unchanged."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(k in whole and within(v, whole[k]) for k, v in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(within, part, whole))
    return part == whole


@pytest.mark.parametrize("text", [t for t in TEXTS if t != '{"a": 1, "a": 12}'])
def test_of_every_beginning_what_is_closed_is_in_the_whole_and_only_grows(text):
    whole = json.loads(text)
    before = None
    for n in range(len(text) + 1):
        try:
            now = closed_part(text[:n])
        except Open:
            assert before is None
            continue
        assert within(plain(now), whole), text[:n]
        if before is not None:
            assert within(before, plain(now)), text[:n]
        before = plain(now)
        # Whether it is closed is told by what can follow: only whitespace.
        assert is_open(now) == (not text[:n].strip() or not _is_whole(text[:n]))
    assert before == whole


def _is_whole(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("text", TEXTS)
def test_every_scalar_is_closed_exactly_when_nothing_can_change_it(text):
    """The closed part of a beginning is the same however the text goes on from there."""
    for n in range(len(text) + 1):
        begun = text[:n]
        try:
            now = plain(closed_part(begun))
        except Open:
            continue
        for more in ("0", ".5", "e1", "x", '"', "]", "}", ",", " "):
            try:
                then = plain(closed_part(begun + more))
            except (NotJson, Open):
                continue
            assert within(now, then), (begun, more)


@pytest.mark.parametrize(
    "text, closed",
    [
        ('{"a": 12', {}),
        ('{"a": 12 ', {"a": 12}),
        ('{"a": 12,', {"a": 12}),
        ('{"a": 12}', {"a": 12}),
        ('{"a": 1.', {}),
        ('{"a": -', {}),
        ('{"a": 1e', {}),
        ('{"a": tru', {}),
        ('{"a": true', {"a": True}),
        ('{"a": "x', {}),
        ('{"a": "x\\', {}),
        ('{"a": "x\\"', {}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": {"b": 1', {"a": {}}),
        ('{"a": {"b": 1,', {"a": {"b": 1}}),
        ('{"a"', {}),
        ("[1", []),
        ("[1,", [1]),
        ("[[1,", [[1]]),
    ],
)
def test_what_is_closed(text, closed):
    assert plain(closed_part(text)) == closed


@pytest.mark.parametrize("text", ["", "  ", "12", "-", '"x', "tr"])
def test_nothing_may_be_closed_yet(text):
    with pytest.raises(Open):
        closed_part(text)


@pytest.mark.parametrize(
    "text", ["x", "{1", "{]", '{"a" 1', "[1 2", "[,", "{} {", "[1]]", '["\\q"', "nul1", "[tru,"]
)
def test_what_is_no_json_is_told(text):
    with pytest.raises(NotJson):
        closed_part(text)


def test_deep_nesting_is_no_crash():
    with pytest.raises(NotJson):
        closed_part("[" * 100_000)
    assert last_closed("[" * 100_000) is None
    with pytest.raises(NotJson):
        whole_value("[" * 100_000)


def test_where_the_last_field_is_closed():
    for text, cut in (
        ("", None),
        ('{"a', None),
        ('{"a": 12', None),
        ('{"a": 12 , ', '{"a": 12'),
        ('{"a": "x", "b": [1, 2', '{"a": "x", "b": [1'),
        ('{"a": "x"} and more', '{"a": "x"}'),
        ('{"a": 1, oops', '{"a": 1'),
        ("no json", None),
    ):
        end = last_closed(text)
        assert (None if end is None else text[:end]) == cut


def test_an_open_record_tells_what_is_settled_and_nothing_else():
    now = closed_part('{"name": "Ann", "items": [1, 2, ')
    assert now.name == now["name"] == "Ann"
    assert "name" in now
    assert now
    assert now.items[0] == 1
    assert 2 in now.items
    for ask in (
        lambda: now.age,
        lambda: now["age"],
        lambda: "age" in now,
        lambda: len(now),
        lambda: list(now),
        lambda: now == {},
        lambda: now.items[2],
        lambda: now.items[-1],
        lambda: len(now.items),
        lambda: sum(now.items),
        lambda: 3 in now.items,
        lambda: now.items == [1, 2],
        lambda: getattr(now, "age", None),
        lambda: bool(closed_part("[")),
        lambda: bool(closed_part("{")),
    ):
        with pytest.raises(Open):
            ask()


def test_a_closed_record_is_like_its_object():
    now = whole_value('{"items": [1, {"keys": 2}], "get": null}')
    assert now.items[1].keys == 2
    assert now.get is None
    assert list(now) == ["items", "get"]
    assert len(now) == 2
    assert "age" not in now
    assert now == whole_value('{"get": null, "items": [1, {"keys": 2}]}')
    for ask in (lambda: now.age, lambda: now["age"]):
        with pytest.raises(MissingField, match="age"):
            ask()
    assert getattr(now, "age", 3) == 3
    assert not hasattr(now, "__wrapped__")
    assert "items=[1, Record(keys=2)]" in repr(now)
