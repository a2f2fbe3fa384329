"""What strangers hand in ends with one clear error, within its limits."""

from __future__ import annotations

import json
import math
import sys
import threading
import time

import misbehaving
import pytest
from languages import completion

from guided_smc.errors import ConstraintError, OptionError
from guided_smc.grammars import (
    LarkText,
    Limits,
    PartialRegex,
    explain,
    json_schema,
    lark,
    regex,
    start_worker,
    worker,
)
from guided_smc.grammars.worker import compiled_in_worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs processes that fork")

SECONDS = 0.5
UNTRUSTED = Limits.untrusted(max_compile_seconds=SECONDS)
SLACK = 20.0
"""Seconds beyond the limit that a machine with much else to do may take to tell (alone: one)."""


@pytest.fixture(scope="module", autouse=True)
def _started():
    start_worker()


def chain(length):
    """Definitions that refer to one another, one inside the other."""
    definitions = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def doubled(depth, keyword):
    """Each definition refers twice to the next one."""
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {
        keyword: {"$ref": "#/$defs/d0"},
        "$defs": {**definitions, f"d{depth}": {"type": "null"}},
    }


def objects(n):
    names = {f"p{j}": {"type": "integer"} for j in range(20)}
    return [{"type": "object", "properties": names, "required": [f"p{i % 20}"]} for i in range(n)]


MANY_RULES = "start: " + "|".join(f"r{i}" for i in range(2000)) + "\n"
MANY_RULES += "\n".join(f'r{i}: "a{i}" r{i * 7 % 2000} | "b{i}"' for i in range(2000))


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (json_schema, chain(8000)),
        (json_schema, {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
        (json_schema, {"oneOf": objects(1500)}),
        (LarkText, MANY_RULES),
        (LarkText, 'start: t{a}\nt{x}: "(" t{t{x}} ")" | x\na: "a"\n'),  # templates without end
        (LarkText, "start: " + " | ".join(f'"w{i}"' for i in range(20_000))),
    ],
)  # fmt: skip
def test_what_takes_long_to_compile_is_stopped_and_the_next_one_is_served(make, source):
    begin = time.monotonic()
    with pytest.raises(ConstraintError, match=r"takes more than the limit of 0\.5 seconds"):
        make(source, limits=UNTRUSTED)
    assert time.monotonic() - begin < SECONDS + SLACK
    assert make({} if make is json_schema else 'start: "a"', limits=Limits.untrusted())
    assert time.monotonic() - begin < 2 * (SECONDS + SLACK)


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (json_schema, json.dumps({"enum": ["x" * 100] * 100_000}), "has 10[0-9]* bytes, more than"),
        (json_schema, {"enum": list(range(100_000))}, "too big"),
        (json_schema, doubled(40, "not"), "more than 20000 subschemas apply to one value"),
        (json_schema, doubled(40, "allOf"), "not valid JSON Schema"),
        (json_schema, doubled(40, "if") | {"then": False}, "subschemas apply to one value"),
        (json_schema, {"allOf": [{"anyOf": objects(2)}] * 20}, "schema too large"),
        (json_schema, "[" * 100_000, "not JSON|nested too deeply"),
        (json_schema, '{"not":' * 5000 + "{}" + "}" * 5000, "nested too deeply|nested 5001 deep"),
        (regex, "(" * 5000 + "a" + ")" * 5000, "nested too deeply"),
        (regex, "a" * 2_000_000, "2000000 bytes, more than the limit"),
        (PartialRegex, "(" * 5000 + "a" + ")" * 5000, "recursion"),
        (PartialRegex, "a" * 2_000_000, "2000000 bytes, more than the limit"),
        (LarkText, "start: " + '"a" ' * 500_000, "2000007 bytes, more than the limit"),
        (lark, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested more than the limit of 64"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limits", [Limits(), UNTRUSTED], ids=["here", "in a worker"])
def test_what_is_too_large_or_too_deep_is_refused_with_the_reason(make, source, message, limits):
    begin = time.monotonic()
    with pytest.raises(ConstraintError, match=f"{message}|more than the limit of 0.5 seconds"):
        make(source, limits=limits)
    assert time.monotonic() - begin < SLACK


@pytest.mark.parametrize(
    "pattern",
    ["((a{1,900}){1,900}){1,900}", "((.{1,900}x){1,900})", r"(\w*\d.{15}){3}", "(a?){900}a{900}"],
)
def test_patterns_that_repeat_repetitions_compile_or_tell_and_so_do_their_masks(pattern):
    begin = time.monotonic()
    try:
        explain(regex(pattern, limits=Limits.untrusted()), "aaaaaaax1aaaa" * 3)
    except ConstraintError as error:
        assert "limits" in str(error)
    assert time.monotonic() - begin < SLACK


def test_many_remainders_are_checked_and_not_compiled():
    begin = time.monotonic()
    primes = (7, 11, 13, 17, 19, 23, 29, 31)
    together = json_schema({"allOf": [{"multipleOf": p} for p in primes]})
    large = json_schema({"type": "integer", "multipleOf": 999_983})
    assert time.monotonic() - begin < SLACK
    assert explain(together, str(7 * 11 * 13 * 17 * 19 * 23 * 29 * 31)).accepted
    assert not explain(together, str(7 * 11 * 13 * 17 * 19 * 23 * 29 * 30)).accepted
    assert [r.keyword for r in large.relaxed] == ["multipleOf"]
    assert explain(large, "1999966").accepted
    assert explain(large, "1999967").refusal.keyword == "multipleOf"
    assert json_schema({"multipleOf": 0.01}).relaxed == ()


def test_a_check_whose_references_double_with_each_level_of_a_value_ends():
    again = {"$ref": "#/$defs/t"}
    twice = [{"items": again, "minItems": 1}, {"items": again, "minItems": 1, "maxItems": 9}]
    # Nothing that ends is a `t`, and what is not valid is asked about again.
    schema = {"type": "array", "not": again, "$defs": {"t": {"anyOf": twice}}}
    constraint = json_schema(schema, limits=Limits(max_check_steps=500))
    assert explain(constraint, "[[]]").accepted
    begin = time.monotonic()
    with pytest.raises(ConstraintError, match="more steps to check than the limit"):
        explain(constraint, "[" * 40 + "]" * 40)
    assert time.monotonic() - begin < SLACK


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_memory_is_limited_in_python_and_in_llguidance():
    little = Limits(max_compile_memory=1 << 20)
    with pytest.raises(ConstraintError, match="takes more than the limit of 1 MiB of memory"):
        compiled_in_worker(little, misbehaving.needs_memory)
    with pytest.raises(ConstraintError, match="takes more than the limit of 1 MiB of memory"):
        regex("|".join(f"word{i}x*" for i in range(20_000)), limits=little)
    assert json_schema({}, limits=Limits.untrusted())


def test_whatever_a_compiler_does_there_is_an_error_and_the_worker_lives():
    long = Limits(max_compile_seconds=60)
    with pytest.raises(ConstraintError, match=r"ends the compiler \(exit status -11"):
        compiled_in_worker(long, misbehaving.crashes)
    with pytest.raises(ConstraintError, match="failed: ZeroDivisionError: on purpose"):
        compiled_in_worker(long, misbehaving.raises)
    with pytest.raises(ConstraintError, match=r"the limit of 0\.5 seconds"):
        compiled_in_worker(UNTRUSTED, misbehaving.sleeps)
    compiled_in_worker(long, misbehaving.prints)
    assert compiled_in_worker(UNTRUSTED, misbehaving.has_limits) == Limits()
    (idle,) = worker._workers._idle
    idle._process.kill()
    idle._process.wait()
    compiled_in_worker(long, misbehaving.has_limits)
    for _ in range(worker._REQUESTS_PER_CHILD + 1):  # a child makes room for the next
        compiled_in_worker(long, misbehaving.has_limits)


def test_an_error_in_the_worker_is_the_one_that_would_be_raised_here():
    for schema in ({"type": "integre"}, {"$ref": "other.json"}, {"enum": []}):
        errors = []
        for limits in (Limits(), Limits.untrusted()):
            with pytest.raises(ConstraintError) as caught:
                json_schema(schema, limits=limits)
            errors.append(caught.value)
        here, there = errors
        assert (type(here), str(here), vars(here)) == (type(there), str(there), vars(there))


def test_what_is_compiled_in_a_worker_first_is_the_same_constraint():
    limits = Limits.untrusted()
    for make, source, text in (
        (json_schema, {"type": "array", "uniqueItems": True}, "[1, 2]"),
        (regex, "a+", "aa"),
        (lark, 'start: "a" %json {"type": "integer"}', "a12"),
        (PartialRegex, r"(a)\1", "aa"),
        (LarkText, 'start: "a"+', "aaa"),
    ):
        for bad in ("", "x"):
            assert not explain(make(source, limits=limits), text[:-1] + bad + "]}").accepted
        assert explain(make(source, limits=limits), text).accepted


def test_threads_compile_at_the_same_time():
    said = []

    def slow():
        with pytest.raises(ConstraintError, match="limit of 1 seconds"):
            compiled_in_worker(Limits(max_compile_seconds=1), misbehaving.sleeps)
        said.append("slow")

    def quick():
        said.append(regex("a", limits=Limits.untrusted()).pattern)

    threads = [threading.Thread(target=slow), threading.Thread(target=quick)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == ["a", "slow"]


def test_no_worker_is_asked_unless_the_limits_say_so(monkeypatch):
    def asked(*_):
        raise AssertionError("a worker was asked")

    monkeypatch.setattr(worker._workers, "ask", asked)
    json_schema({})
    regex("a")
    lark('start: "a"')
    LarkText('start: "a"')
    PartialRegex("a")
    with pytest.raises(AssertionError, match="was asked"):
        regex("a", limits=Limits(max_compile_seconds=1))


def test_limits_that_cannot_be_kept_are_refused():
    with pytest.raises(OptionError, match="max_compile_seconds must be positive, got 0"):
        Limits(max_compile_seconds=0)
    with pytest.raises(OptionError, match="cannot be sent to the worker"):
        compiled_in_worker(Limits.untrusted(), lambda: None)
    assert Limits.untrusted(max_bytes=5).max_bytes == 5


TREES = {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}


def test_what_was_found_valid_is_not_checked_again_by_what_encloses_it():
    constraint = json_schema(TREES, limits=Limits(max_check_steps=4))
    assert explain(constraint, "[" * 200 + "]" * 200).accepted
    refused = explain(constraint, "[" * 150 + "[[]],[[]]")
    assert refused.refusal.keyword == "uniqueItems"
    assert refused.offset == 150 + len("[[]],[[]]") - 1


@pytest.mark.parametrize("negated", [False, True])
def test_a_text_nested_too_deeply_for_its_check_is_refused_and_nothing_breaks(negated):
    node = {
        "additionalProperties": {
            "anyOf": [{"$ref": "#/$defs/node"}, {"type": "array", "uniqueItems": True}]
        },
        "not": {"required": ["z"]},
    }
    if negated:
        node = {"not": {"properties": {"a": {"$ref": "#/$defs/node"}}, "required": ["a"]}}
    check = json_schema({"$ref": "#/$defs/node", "$defs": {"node": node}}).check()
    for deep in (21, 401):
        for frames in range(9):
            text = '{"a":' * deep + "[]" + "}" * deep
            score = _beneath(frames, lambda text=text: check.log_complete([completion(text)])[0])
            assert score == (-math.inf if deep == 401 else 0.0)
            check._readers.clear()
            check._lengths.clear()


def _beneath(frames, ask):
    return _beneath(frames - 1, ask) if frames else ask()


def test_the_mask_of_the_regular_parts_of_a_pattern_keeps_to_the_limits():
    pattern = r"(?=a)(\w{1,50}[a-z]{1,50}){1,50}"
    limits = Limits(max_mask_fuel=150_000)
    assert regex(pattern, limits=limits)._cover.limits is limits
    assert regex(pattern, limits=Limits(max_lexer_fuel=10))._cover is None


def test_the_classes_of_patterns_are_not_remembered_for_ever():
    from guided_smc.grammars import patterns

    assert patterns._matched.cache_info().maxsize is not None
