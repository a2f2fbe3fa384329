"""Metaschemas in one piece against the official ones."""

import jsonschema
import pytest

from guided_smc.grammars.schema.metaschemas import flaw

DIALECTS = (
    *(jsonschema.Draft4Validator, jsonschema.Draft6Validator, jsonschema.Draft7Validator),
    *(jsonschema.Draft201909Validator, jsonschema.Draft202012Validator),
)


def _values(document):
    yield document
    for part in document.values() if isinstance(document, dict) else []:
        yield from _values(part)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.__name__)
def test_a_metaschema_in_one_piece_says_what_the_official_one_says(dialect):
    wrong = [None, -1, 1.5, "x", [], {}, True, ["a", "a"], [{}, {"type": 1}], {"a": {"type": 1}}]
    keywords = {
        k
        for d in DIALECTS
        for part in _values(d.META_SCHEMA)
        if isinstance(part, dict)
        for k in part.get("properties", ())
        if isinstance(part["properties"], dict)
    }
    keywords |= jsonschema.Draft202012Validator.VALIDATORS.keys() | {"$anchor", "$id", "$defs"}
    assert len(keywords) > 40
    no_formats = jsonschema.FormatChecker(formats=())
    official = dialect(dialect.META_SCHEMA, format_checker=no_formats)
    for document in [{k: v} for k in sorted(keywords) for v in wrong] + wrong:
        inside = {"properties": {"p": {"items": document}}}
        for each in (document, inside):
            assert (flaw(dialect, each) is None) == official.is_valid(each), each
