"""Constraints: languages that a text must belong to."""

from guided_smc.grammars import library
from guided_smc.grammars.choice import Choice, choice
from guided_smc.grammars.context_free import LarkMasks, lark
from guided_smc.grammars.description import Description, describe
from guided_smc.grammars.explain import Explanation, explain
from guided_smc.grammars.lark import Lark
from guided_smc.grammars.lark_text import LarkText
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.members import sample_members
from guided_smc.grammars.output_types import from_output_type
from guided_smc.grammars.partial_regex import PartialRegex
from guided_smc.grammars.predicates import PrefixConstraint, predicate
from guided_smc.grammars.regex import Regex, regex
from guided_smc.grammars.schema.json_schema import JsonSchema, json_schema
from guided_smc.grammars.schema.relaxing import Relaxed
from guided_smc.grammars.worker import start_worker

__all__ = [
    "Choice",
    "Description",
    "Explanation",
    "JsonSchema",
    "Lark",
    "LarkMasks",
    "LarkText",
    "Limits",
    "PartialRegex",
    "PrefixConstraint",
    "Regex",
    "Relaxed",
    "choice",
    "describe",
    "explain",
    "from_output_type",
    "json_schema",
    "lark",
    "library",
    "predicate",
    "regex",
    "sample_members",
    "start_worker",
]
