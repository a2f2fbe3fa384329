"""Constraints: languages that a text must belong to."""

from guided_smc.grammars.json_schema import JsonSchema, from_output_type, json_schema
from guided_smc.grammars.matching import Limits
from guided_smc.grammars.relaxing import Relaxed

__all__ = ["JsonSchema", "Limits", "Relaxed", "from_output_type", "json_schema"]
