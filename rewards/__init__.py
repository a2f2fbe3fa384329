"""Rewards: scores of texts that are multiplied into the target as `exp(β·R)`.

    from guided_smc.rewards import length, sentiment

    style = (0.7 * length(200) + 0.3 * sentiment()).with_(beta=2)
    lm.generate("Say something about the sea.", potential=style)

What needs transformers is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from guided_smc.lazy import lazily
from guided_smc.rewards.base import Reward
from guided_smc.rewards.callable import reward
from guided_smc.rewards.scoring import Active, active
from guided_smc.rewards.texts import field, keywords, length, matches, readability, sentiment

if TYPE_CHECKING:
    from guided_smc.rewards.likelihood import language_model
    from guided_smc.rewards.model_rewards import sequence_classifier, similarity
    from guided_smc.rewards.specs import from_file, parse

_HOME_OF = {
    "from_file": "specs",
    "language_model": "likelihood",
    "parse": "specs",
    "sequence_classifier": "model_rewards",
    "similarity": "model_rewards",
}

__all__ = [
    "Active",
    "Reward",
    "active",
    "field",
    "from_file",
    "keywords",
    "language_model",
    "length",
    "matches",
    "parse",
    "readability",
    "reward",
    "sentiment",
    "sequence_classifier",
    "similarity",
]


__getattr__, __dir__ = lazily(globals(), _HOME_OF)
