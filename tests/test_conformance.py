"""A sample of `make conformance`, and the promises that its ratchet file must keep."""

import json

import pytest
from click.testing import CliRunner
from conformance import (
    DRAFTS,
    RATCHET,
    Case,
    Tally,
    _byte_judge,
    _plain,
    in_order,
    judge_case,
    main,
    suite_cases,
    suite_folder,
    worse,
)

SAMPLED = ("uniqueItems", "oneOf", "if-then-else", "propertyNames", "ref", "unevaluatedItems")


def outcome(*cases):
    judge, tally = _byte_judge(), Tally()
    for case in cases:
        judge_case(case, judge, tally)
    return tally


def test_a_sample_of_the_official_suite_holds():
    folder = suite_folder()
    if folder is None:
        pytest.skip("the source distribution of jsonschema cannot be fetched")
    cases = [c for c in suite_cases(folder, ["draft2020-12"]) if c.keywords[0] in SAMPLED]
    tally = outcome(*cases)
    counts = tally.counts["all"]
    assert len(cases) > 50
    assert counts["compiled"] > 0.8 * counts["schemas"]
    bad = [n for n in tally.notes if not n.startswith("refused") and "$id" not in n]
    assert bad == []


def test_what_the_ratchet_holds_has_no_invalid_text_accepted():
    reached = json.loads(RATCHET.read_text())
    for name, counts in reached.items():
        assert counts["all"].get("invalid_accepted", 0) == 0, name
        assert counts["all"]["compiled"] >= 0.9 * counts["all"]["schemas"], name


def test_the_ratchet_only_lets_counts_improve():
    before = {"not": {"compiled": 3, "valid_rejected": 1}}
    assert worse({"not": {"compiled": 3, "valid_rejected": 1}}, before) == []
    assert worse({"not": {"compiled": 4}}, before) == []
    assert worse({"not": {"compiled": 2, "valid_rejected": 1}}, before)
    assert worse({"not": {"compiled": 3, "valid_rejected": 2}}, before)
    assert worse({"not": {"compiled": 3, "invalid_accepted": 1}}, before)


def test_wrong_answers_are_counted_by_kind_and_keyword():
    schema = {"properties": {"a": {}, "b": {}}, "required": ["b", "a"]}
    tests = [
        {"valid": True, "data": {"b": 1, "a": 2}},
        {"valid": True, "data": {"a": 1}},
        {"valid": False, "data": {"a": 1, "b": 2}},
        {"valid": False, "data": {"b": 1}},
    ]
    counts = _plain(outcome(Case("c", schema, tests, ["required"])))
    assert counts["required"] == counts["all"]
    assert counts["all"] == {
        **{"schemas": 1, "compiled": 1, "valid": 2, "invalid": 2},
        **{"invalid_accepted": 1, "valid_rejected": 1},
    }
    refused = _plain(outcome(Case("c", {"$ref": "x.json"}, tests, ["$ref"])))
    assert refused["all"] == {"schemas": 1, "refused": 1}


def test_refusals_are_told_by_reason():
    tests = [{"valid": True, "data": 1}]
    schemas = [{"$ref": "x.json"}, {"$ref": "y.json"}, {"$ref": DRAFTS["draft7"]}, {"type": "int"}]
    tally = outcome(*(Case("c", schema, tests, []) for schema in schemas))
    assert tally.refusals["$ref to another document"] == 2
    assert tally.refusals["$ref to a metaschema"] == 1
    assert tally.refusals.total() == len(schemas)


def test_masks_and_forks_are_timed_at_each_token_of_an_accepted_text():
    tests = [{"valid": True, "data": [1, 2]}, {"valid": False, "data": {}}]
    tally = outcome(Case("c", {"type": "array"}, tests, []))
    assert len(tally.mask_us) == len(tally.fork_us) == len("[1, 2]")
    assert min(*tally.mask_us, *tally.fork_us, *tally.compile_ms) > 0


def test_times_are_written_with_the_machine_and_fail_nothing(tmp_path):
    file, output = tmp_path / "bench.jsonl", tmp_path / "times.json"
    tests = [{"valid": True, "data": [1, 2]}]
    file.write_text(json.dumps({"id": "c", "schema": {"type": "array"}, "tests": tests}))
    words = ["--only", "maskbench", "--bytes", "--maskbench", str(file), "--output", str(output)]
    done = CliRunner().invoke(main, words)
    assert "compile, ms" in done.output
    times = json.loads(output.read_text())
    assert times["settings"] == {"tokens": "bytes"}
    assert {"cpu", "cores", "load_before", "versions"} <= times["machine"].keys()
    (found,) = times["collections"].values()
    assert (found["schemas"], found["compile_ms"]["times"]) == (1, 1)
    assert found["mask_us"]["times"] == found["fork_us"]["times"] == len("[1, 2]")
    for row in (found["compile_ms"], found["mask_us"], found["fork_us"]):
        assert 0 < row["median"] <= row["p99"] <= row["most"]
    assert str(tmp_path) not in output.read_text()


def test_instances_are_put_into_the_order_of_the_schema():
    inner = {"anyOf": [{"type": "null"}, {"properties": {"y": {}, "x": {}}}]}
    schema = {"properties": {"b": {"items": inner}, "a": {}}}
    ordered = in_order({"z": 1.0, "a": 2, "b": [{"x": 1, "y": 2}]}, schema)
    assert json.dumps(ordered) == '{"b": [{"y": 2, "x": 1}], "a": 2, "z": 1.0}'
