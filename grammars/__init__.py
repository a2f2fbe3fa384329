"""Constraints: languages that a text must belong to."""

from guided_smc.grammars.json_schema import JsonSchema, from_output_type, json_schema
from guided_smc.grammars.lark_text import LarkText
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.partial_regex import PartialRegex
from guided_smc.grammars.predicates import PrefixConstraint, predicate

__all__ = [
    "JsonSchema",
    "LarkText",
    "Limits",
    "PartialRegex",
    "PrefixConstraint",
    "from_output_type",
    "json_schema",
    "predicate",
]
