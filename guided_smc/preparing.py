"""What is settled before a prompt runs: what nobody chose is decided, what cannot be is refused."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from guided_smc import rewards
from guided_smc.errors import OptionError, PromptError
from guided_smc.models.base import LanguageModel
from guided_smc.models.parallel import agreed
from guided_smc.options import BlockSize, Method, Options
from guided_smc.potentials import Potential, Tilt
from guided_smc.vocabulary import Vocabulary

DEFAULT_BLOCK_SIZE = 4
"""With a draft, where nobody chose one."""


def derive_seed(seed: int, index: int) -> int:
    """The seed of the prompt at `index` of a run; that of index 0 is the run's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def decide_seed(seed: int | None, index: int, *, exact: bool, split: bool) -> int:
    """The seed of one prompt.

    Args:
        seed: Of the run; None draws one.
        index: Of the prompt.
        exact: Use the seed as it is, whatever the index.
        split: Whether several processes run the model: they have to draw alike.
    """
    if seed is None:
        drawn = secrets.randbits(63)
        return agreed(drawn) if split else drawn
    return seed if exact else derive_seed(seed, index)


def decide_block_size(options: Options, *, with_draft: bool) -> tuple[BlockSize, list[str]]:
    """The block size, and what to warn of.

    Raises:
        OptionError: An option is for a draft, and there is none.
    """
    warnings: list[str] = []
    block_size = options.block_size
    if options.method != "smc":
        if with_draft and block_size is None:
            warnings.append(
                f"no tokens were drafted: method={options.method!r} draws from the target"
            )
        block_size = 0
    if block_size is None:
        block_size = DEFAULT_BLOCK_SIZE if with_draft else 0
    elif block_size == "auto" and not with_draft:
        block_size = 0
    elif block_size != 0 and not with_draft:
        raise OptionError(
            f"block_size={block_size} needs a draft model: load(..., draft=...), or "
            "block_size=0 to let the target propose for itself",
            option="block_size",
        )
    if not with_draft and options.draft_temperature is not None:
        raise OptionError(
            "draft_temperature needs a draft model: load(..., draft=...)",
            option="draft_temperature",
        )
    greedy = options.temperature / options.power < 1e-3 or options.top_k == 1
    if block_size != 0 and greedy:
        block_size = 0
        warnings.append(
            "no tokens were drafted: the target is greedy, so a drafted token has weight 0 "
            "wherever it is not the target's own choice"
        )
    if block_size != 0 and options.draft_temperature == 0:
        warnings.append(
            "draft_temperature=0: a greedy draft proposes one text only, so the particles "
            "cover just what it reaches; log_evidence is a lower bound"
        )
    return block_size, warnings


def as_tilt(reward: Any, *, beta: float | None, on: str | None) -> Tilt | None:
    """The potential of a callable or a reward, with its β and when it speaks set, where given.

    Raises:
        OptionError: It is neither; or there is none, and something is set.
    """
    own: dict[str, Any] = {"beta": beta, "on": on}
    own = {name: value for name, value in own.items() if value is not None}
    if reward is None:
        if own:
            raise OptionError(
                "beta and reward_on go with reward=; a potential has its own: "
                "guided_smc.reward(function, beta=..., on=...)"
            )
        return None
    if isinstance(reward, rewards.Reward):
        return reward.with_(**own) if own else reward
    if isinstance(reward, Potential):
        raise OptionError(
            f"reward must be a function or a reward, and {reward.name!r} is a potential: pass it "
            "as potential="
        )
    return rewards.reward(reward, **own)


def check_method(method: Method, scores: Sequence[Potential], *, constrained: bool) -> None:
    """Refuse a method that lacks what it chooses by.

    Raises:
        OptionError: It does.
    """
    if method == "token_masking" and not constrained:
        raise OptionError(
            'method="token_masking" needs a constraint (output_type=, or a potential that is one)',
            option="method",
        )
    tilted = any(isinstance(score, Tilt) and score.beta != 0 for score in scores)
    if method in ("best_of_n", "soft_best_of_n") and not tilted:
        raise OptionError(
            f"method={method!r} needs a reward with a beta other than 0", option="method"
        )


def check_length(n_prompt: int, max_tokens: int, models: Sequence[LanguageModel]) -> None:
    """Refuse what would go past the context of a model.

    Args:
        n_prompt: Tokens of the prompt.
        max_tokens: Most that may be generated.
        models: All that read them.

    Raises:
        PromptError: It would.
    """
    limit = min((m.context_length for m in models if m.context_length is not None), default=None)
    if limit is None:
        return
    if n_prompt > limit:
        raise PromptError(
            f"the prompt has {n_prompt} tokens, the model's context {limit}; shorten the prompt",
            too_long="prompt",
        )
    if n_prompt + max_tokens > limit:
        raise PromptError(
            f"the prompt has {n_prompt} tokens and max_tokens is {max_tokens}, together "
            f"over the model's context of {limit}; shorten the prompt or lower max_tokens",
            too_long="max_tokens",
        )


def checked_bias(bias: Mapping[int, float], vocabulary: Vocabulary) -> dict[int, float]:
    """What is added to logits, by token id.

    Raises:
        OptionError: Of no token, or not a finite number.
    """
    checked: dict[int, float] = {}
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int):
            raise _wrong_bias(f"token ids are whole numbers, got {token!r}")
        if not 0 <= token < len(vocabulary) or not vocabulary.real[token]:
            raise _wrong_bias(f"the model has no token {token}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_bias(f"of token {token} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise _wrong_bias(f"of token {token} must be finite, got {value!r}")
        checked[token] = float(value)
    return checked


def _wrong_bias(said: str) -> OptionError:
    return OptionError(f"logit_bias: {said}", option="logit_bias")
