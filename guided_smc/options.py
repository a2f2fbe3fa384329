"""The options of one request, checked once where they come in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from guided_smc.errors import OptionError

ResamplingScheme = Literal["systematic", "stratified", "multinomial", "residual"]
Selection = Literal["sample", "best", "vote", "all"]
BlockSize = int | Literal["auto"]
Method = Literal["smc", "importance", "best_of_n", "soft_best_of_n", "token_masking"]

StepOn = Literal["auto", "host", "device", "graphs"]
"""Where a step's tokens are drawn: by the host; on the device; or there, with all that is done in a
step recorded as CUDA graphs. `"auto"` is the last for a target on CUDA, else the first."""

GRAPH_FAILED = "recording a graph failed"
"""Of a step that ran otherwise than it should: what `Usage.steps_on` then says, and why."""

GREEDY_TEMPERATURE = 1e-5
"""What a temperature of 0 is computed as: the limit, to float precision, with ties split."""

LEAST_DRAFT_TEMPERATURE = 0.2
"""Of a draft whose temperature nobody chose."""

OUTSIDE = 0.1
"""Share of the proposals that a draft makes without the target's top-k, top-p and min-p."""


class Options(BaseModel):
    """Sampling options of one request.

    Attributes:
        max_tokens: Most tokens before the end token.
        temperature: Of the target; 0 is greedy.
        top_p: Nucleus of the target, in (0, 1]; 1 is off.
        top_k: Most likely tokens of the target that are kept; 0 is off.
        min_p: Tokens below this fraction of the most likely token's probability are cut; 0 is off.
        power: α of the power target `p^α`, from 0.001 to 1000.
        stop: Strings that end a text, not included in it. Not together with a constraint.
        seed: Of this request's generator, in `0..2**63-1`; None draws one, reported in the result.
        method: `"smc"`, or what it is compared with. All draw N texts one by one without resampling
            or drafting, and rewards speak at their ends only; every particle has its true weight
            under the posterior, but the answer is chosen otherwise. `"importance"`: by the
            weights. `"best_of_n"`: the largest reward. `"soft_best_of_n"`: a draw by
            `exp(β·R)`. `"token_masking"`: any, with the constraint's masks and no more.
        n_particles: N; with `target_ess`, only to begin with.
        target_ess: At every resampling draw `N · target_ess / ESS` particles in place of N, so
            that about so many of them count: more where the weights disagree, fewer where they
            agree. None keeps N.
        min_particles: Fewest that `target_ess` may come to, at least 2; None is 2.
        max_particles: Most that it may come to, for which room is kept; None is `n_particles`.
        block_size: K, tokens drafted before each verification; None is 4 with a draft, else 0.
            `"auto"` chooses it at each step, from what passes cost on this machine and from how
            well the draft has agreed with the target so far (see `guided_smc.adaptive`).
        islands: M independent populations of N / M particles, combined by their evidence:
            resampling cannot make all answers one.
        ess_threshold: Resample when ESS < threshold · N, in [0, 1].
        resampling: Scheme.
        draft_temperature: None is the temperature of the target divided by α, but at least 0.2: a
            draft that is surer of itself than that misses what the target would say.
        select: How the answer is taken from the final particles: a draw from the weights, the
            heaviest, the value with the largest total weight, or all distinct values.
        max_restarts: How often to start again when every particle has weight 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    max_tokens: int = Field(256, gt=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    power: float = Field(1.0, ge=1e-3, le=1e3)
    stop: tuple[str, ...] = ()
    seed: int | None = Field(None, ge=0, lt=2**63)
    method: Method = "smc"
    n_particles: int = Field(8, gt=0)
    target_ess: float | None = Field(None, gt=0)
    min_particles: int | None = Field(None, ge=2)
    max_particles: int | None = Field(None, ge=2)
    block_size: BlockSize | None = None
    islands: int = Field(1, gt=0)
    ess_threshold: float = Field(0.5, ge=0, le=1)
    resampling: ResamplingScheme = "systematic"
    draft_temperature: float | None = Field(None, ge=0)
    select: Selection = "sample"
    max_restarts: int = Field(1, ge=0)

    @field_validator("block_size", mode="before")
    @classmethod
    def _number_or_auto(cls, block_size: Any) -> Any:
        # Checked here, for one message where a union would give one for each of its members.
        if block_size is None or block_size == "auto":
            return block_size
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 0:
            raise ValueError('must be a whole number from 0, or "auto"')
        return block_size

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: Any) -> Any:
        if isinstance(stop, str):
            return (stop,)
        return tuple(stop) if isinstance(stop, list) else stop

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        return stop

    @model_validator(mode="after")
    def _method_agrees(self) -> Options:
        if self.method == "smc":
            return self
        for name in ("ess_threshold", "resampling", "target_ess", "islands"):
            if name in self.model_fields_set and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: nothing is resampled with method={self.method!r}; leave it out"
                )
        if self.block_size not in (None, 0):
            raise ValueError(
                f"block_size: nothing is drafted with method={self.method!r}, got "
                f"{self.block_size!r}"
            )
        return self

    @model_validator(mode="after")
    def _islands_agree(self) -> Options:
        if self.n_particles % self.islands:
            raise ValueError(
                f"islands: must divide n_particles={self.n_particles} evenly, got {self.islands}"
            )
        if self.islands > 1 and self.target_ess is not None:
            raise ValueError("islands: have fixed sizes, which target_ess does not; leave one out")
        return self

    @model_validator(mode="after")
    def _particles_agree(self) -> Options:
        if self.target_ess is None:
            for name in ("min_particles", "max_particles"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name}: needs target_ess, got {value}")
            return self
        least, most = self.particle_range
        if not least <= self.n_particles <= most:
            raise ValueError(
                f"n_particles: must be from min_particles={least} to max_particles={most} with "
                f"target_ess, got {self.n_particles}"
            )
        if self.target_ess > most:
            raise ValueError(
                f"target_ess: must be at most max_particles={most}, got {self.target_ess:g}"
            )
        if self.ess_threshold == 0:
            raise ValueError(
                "target_ess: acts where particles are resampled, which ess_threshold=0 rules out"
            )
        return self

    @property
    def particle_range(self) -> tuple[int, int]:
        """Fewest and most particles that there may be."""
        if self.target_ess is None:
            return self.n_particles, self.n_particles
        return self.min_particles or 2, self.max_particles or self.n_particles


def make_options(base: Options | None = None, **changes: Any) -> Options:
    """Options with changes applied.

    Raises:
        OptionError: An unknown option or a value out of range, all of them in one message.
    """
    if base is not None and not isinstance(base, Options):
        raise OptionError(f"options must be guided_smc.Options, got {type(base).__name__}")
    # Numbers of numpy and scalars of torch are numbers.
    plain = {k: v.item() if getattr(v, "shape", None) == () else v for k, v in changes.items()}
    values = {**(base.model_dump(exclude_unset=True) if base else {}), **plain}
    try:
        return Options(**values)
    except ValidationError as error:
        known = ", ".join(Options.model_fields)
        parts = []
        blamed: list[str] = []
        for e in error.errors():
            name = ".".join(map(str, e["loc"]))
            message = e["msg"].removeprefix("Value error, ")
            # What is wrong with several options together begins with the name of one.
            blamed.append(name or message.partition(":")[0])
            if e["type"] == "extra_forbidden":
                parts.append(f"unknown option {name!r} (there are: {known})")
            elif not name:
                parts.append(message)
            else:
                parts.append(f"{name}: {message}, got {e['input']!r}")
        raise OptionError("; ".join(parts), option=blamed[0]) from None


def check_beta(beta: Any) -> float:
    """β of a reward: any finite number.

    Raises:
        OptionError: Not a finite number.
    """
    number = beta.item() if getattr(beta, "shape", None) == () else beta
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise OptionError(f"beta must be a finite number, got {beta!r}")
    if not math.isfinite(number):
        raise OptionError(f"beta must be a finite number, got {beta!r}")
    return float(number)


def columns_of_each(columns: Any, n_prompts: int) -> list[Mapping[str, Any]]:
    """The columns of each of several prompts.

    Raises:
        OptionError: Not a list of as many mappings.
    """
    if isinstance(columns, (list, tuple)) and all(isinstance(one, Mapping) for one in columns):
        if len(columns) == n_prompts:
            return list(columns)
        raise OptionError(f"columns: {len(columns)} of them for {n_prompts} prompts")
    raise OptionError(
        "columns of several prompts are a list of mappings, one for each, such as "
        f"[{{'answer': '4'}}, ...]; got {type(columns).__name__}"
    )
