"""guided-smc: exact constrained and reward-guided text generation by Sequential Monte Carlo.

    import guided_smc

    lm = guided_smc.load("smollm2-135m")
    out = lm.generate("Invent a person.", output_type=Person, n_particles=8, seed=0)
    out.value  # a Person

Names are imported when they are first used, so that `import guided_smc` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from guided_smc.lazy import lazily

if TYPE_CHECKING:
    from guided_smc.api import LM, load
    from guided_smc.costs import CostModel
    from guided_smc.errors import (
        ConstraintError,
        GuidedSMCError,
        IncompleteOutputError,
        ModelError,
        OptionError,
        OutOfPagesError,
        OutputError,
        OutputValidationError,
        PotentialError,
        PromptError,
        TokenizerMismatchError,
        UnsupportedConstraintError,
    )
    from guided_smc.grammars import (
        LarkText,
        PartialRegex,
        PrefixConstraint,
        choice,
        json_schema,
        lark,
        predicate,
        regex,
    )
    from guided_smc.models.table import TableModel
    from guided_smc.options import Options
    from guided_smc.potentials import Completion, Constraint, Potential, Tilt
    from guided_smc.preparing import derive_seed
    from guided_smc.results import (
        Diversity,
        ErrorEvent,
        Estimate,
        Particle,
        Result,
        ResultEvent,
        RewardEstimate,
        Step,
        StepEvent,
        Usage,
        Weighted,
    )
    from guided_smc.rewards import reward
    from guided_smc.sweep import Point, Sweep
    from guided_smc.vocabulary import Vocabulary

__version__ = "0.1.0"

_HOMES = {
    "api": ("LM", "load"),
    "costs": ("CostModel",),
    "errors": (
        "ConstraintError",
        "GuidedSMCError",
        "IncompleteOutputError",
        "ModelError",
        "OptionError",
        "OutOfPagesError",
        "OutputError",
        "OutputValidationError",
        "PotentialError",
        "PromptError",
        "TokenizerMismatchError",
        "UnsupportedConstraintError",
    ),
    "grammars": (
        "LarkText",
        "PartialRegex",
        "PrefixConstraint",
        "choice",
        "json_schema",
        "lark",
        "predicate",
        "regex",
    ),
    "models.table": ("TableModel",),
    "options": ("Options",),
    "potentials": ("Completion", "Constraint", "Potential", "Tilt"),
    "preparing": ("derive_seed",),
    "results": (
        "Diversity",
        "ErrorEvent",
        "Estimate",
        "Particle",
        "Result",
        "ResultEvent",
        "RewardEstimate",
        "Step",
        "StepEvent",
        "Usage",
        "Weighted",
    ),
    "rewards": ("reward",),
    "sweep": ("Point", "Sweep"),
    "vocabulary": ("Vocabulary",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LM",
    "Completion",
    "Constraint",
    "ConstraintError",
    "CostModel",
    "Diversity",
    "ErrorEvent",
    "Estimate",
    "GuidedSMCError",
    "IncompleteOutputError",
    "LarkText",
    "ModelError",
    "OptionError",
    "Options",
    "OutOfPagesError",
    "OutputError",
    "OutputValidationError",
    "PartialRegex",
    "Particle",
    "Point",
    "Potential",
    "PotentialError",
    "PrefixConstraint",
    "PromptError",
    "Result",
    "ResultEvent",
    "RewardEstimate",
    "Step",
    "StepEvent",
    "Sweep",
    "TableModel",
    "Tilt",
    "TokenizerMismatchError",
    "UnsupportedConstraintError",
    "Usage",
    "Vocabulary",
    "Weighted",
    "choice",
    "derive_seed",
    "json_schema",
    "lark",
    "load",
    "predicate",
    "regex",
    "reward",
]


__getattr__, __dir__ = lazily(globals(), _HOME_OF)
