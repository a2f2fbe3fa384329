"""Masked sampling: from scores, a bitmask and a seed to a token with its log q̃.

A token v is drawn by `argmax (scores_v / T − log E_v)` over those allowed, with independent
exponentials E: an exponential race, or Gumbel-max. So no probability is ever written, and blocks of
the vocabulary can be looked at in any order.
"""

from __future__ import annotations

import torch

from guided_smc.kernels.dispatch import check, operator, runs_kernel
from guided_smc.kernels.philox import exponentials, words
from guided_smc.options import GREEDY_TEMPERATURE

NEG_INF = float("-inf")
LOGITS = (torch.float32, torch.bfloat16, torch.float16)


def _fake(
    scores: torch.Tensor,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    real = seed.new_empty(scores.shape[0], dtype=torch.float64)
    return torch.empty_like(seed), real, torch.empty_like(real)


@operator(_fake)
def sample_masked(
    scores: torch.Tensor,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row from `q̃ ∝ exp(scores / T) · mask`.

    The same (seed, counter) and scores give the same token, whatever the other rows hold. The
    caller counts: two draws with one pair are not independent.

    Args:
        scores: float32, bfloat16 or float16 `[R, V]`, unnormalised log-probabilities; −inf for
            ids that are no tokens.
        bitmask: int32 `[R, W]`, `W ≥ V / 32`; bit v % 32 of word v // 32 allows token v. None
            allows all.
        temperature: float32 `[R]`; one below `GREEDY_TEMPERATURE` is taken for that.
        seed: int64 `[R]`.
        counter: int64 `[R]`, the number of the draw.
        active: bool `[R]`; None is all.

    Returns:
        The token int64 `[R]`; `log q̃` of it, float64 `[R]`; and float64 `[R]`, the log of the
        probability that the mask leaves, exactly 0 without one.

        Where nothing is allowed, or all that is allowed has a score of −inf: −1, −inf, −inf.
        Where a score is NaN or +inf: −1, NaN, NaN. Rows that are not active: −1, 0, 0.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check_rows("sample_masked", scores, bitmask, seed, counter, active)
    check("sample_masked", "scores", scores, LOGITS, (None, None), scores)
    check("sample_masked", "temperature", temperature, torch.float32, (len(scores),), scores)
    if runs_kernel(scores):
        from guided_smc.kernels.sampling_triton import launch

        _, token, _, log_q, log_z = launch(
            scores.unsqueeze(1), None, None, bitmask, temperature, None, seed, counter, active
        )
        return token, log_q, log_z
    return sample_masked_reference(scores, bitmask, temperature, seed, counter, active)


def sample_masked_reference(
    scores: torch.Tensor,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sample_masked` in torch: what it means."""
    log_probs = LogProbs(scores, reciprocal(temperature))
    token, _, log_q, log_z = log_probs.draw(bitmask, None, seed, counter)
    # Scores that are all −inf are no p, but an answer to a draw.
    dead = log_probs.top.squeeze(-1).isneginf()
    log_q, log_z = (torch.where(dead, NEG_INF, x) for x in (log_q, log_z))
    if active is None:
        return token, log_q, log_z
    return (
        torch.where(active, token, -1),
        torch.where(active, log_q, 0.0),
        torch.where(active, log_z, 0.0),
    )


class LogProbs:
    """`p = softmax(logits / T)` of rows `[..., V]`, kept apart as logits and their normaliser.

    Everything is relative to a row's largest logit, and sums of exponentials are float64: at
    temperatures near 0 the logits divided by them would lose the fractions that matter.

    Args:
        logits: float `[..., V]`.
        inverse: float32 `[...]`, 1 / T.

    Attributes:
        logits: float32 `[..., V]`.
        top: float32 `[..., 1]`, the largest of them.
        inverse: float32 `[..., 1]`.
        log_sum: float64 `[...]`, `log Σ exp((logits − top) / T)`.
    """

    def __init__(self, logits: torch.Tensor, inverse: torch.Tensor) -> None:
        self.logits = logits.float()
        self.inverse = inverse.unsqueeze(-1)
        self.top, scaled = _from_top(self.logits, self.inverse)
        self.log_sum = _log_sum_exp(scaled)

    def of(self, token: torch.Tensor) -> torch.Tensor:
        """`log p` of one token per row, float64 `[...]`, from int64 `[...]`."""
        logit = self.logits.gather(-1, token.unsqueeze(-1))
        return ((logit - self.top) * self.inverse).squeeze(-1).double() - self.log_sum

    def draw(
        self,
        bitmask: torch.Tensor | None,
        power: torch.Tensor | None,
        seed: torch.Tensor,
        counter: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A token per row from `p^α · mask / Z`: it, its log p, its log q̃, and log Z, each `[R]`.

        Args:
            bitmask: int32 `[R, W]`, or None.
            power: α, float64 `[R]`; None is 1.
            seed: int64 `[R]`.
            counter: int64 `[R]`.
        """
        width = self.logits.shape[-1]
        allowed = self.logits
        if bitmask is not None:
            allowed = allowed.masked_fill(~unpack(bitmask, width), NEG_INF)
        sharpness = self.inverse if power is None else sharpen(self.inverse, power.unsqueeze(-1))
        top, scaled = _from_top(allowed, sharpness)
        log_sum = _log_sum_exp(scaled)
        race = scaled - exponentials(words(seed, counter, width)).log()
        token = race.argmax(dim=-1)

        shift = ((top - self.top) * sharpness).squeeze(-1).double()
        log_z = shift + log_sum - (self.log_sum if power is None else power * self.log_sum)
        none = log_sum.isneginf()
        log_z = torch.where(none & ~log_z.isnan(), NEG_INF, log_z)
        log_q = scaled.gather(-1, token.unsqueeze(-1)).squeeze(-1).double() - log_sum
        broken = log_z.isnan()
        nothing = torch.where(broken, torch.nan, NEG_INF)
        none = none | broken
        return (
            torch.where(none, -1, token),
            torch.where(none, nothing, self.of(token)),
            torch.where(none, nothing, log_q),
            log_z,
        )


def reciprocal(temperature: torch.Tensor) -> torch.Tensor:
    """1 / T, float32, with 0 as the limit."""
    return 1.0 / temperature.clamp(min=GREEDY_TEMPERATURE)


def sharpen(inverse: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    """α / T, float32, from float32 and float64."""
    return inverse * power.float()


def unpack(bitmask: torch.Tensor, width: int) -> torch.Tensor:
    """Bool `[R, width]` from int32 `[R, W]`."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, :width]


def check_rows(
    function: str,
    logits: torch.Tensor,
    bitmask: torch.Tensor | None,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor | None,
) -> None:
    """Check what every sampler is given for each row of logits `[R, ..., V]`.

    Raises:
        ValueError: It does not fit.
    """
    n_rows, width = logits.shape[0], logits.shape[-1]
    check(function, "seed", seed, torch.int64, (n_rows,), logits)
    check(function, "counter", counter, torch.int64, (n_rows,), logits)
    if active is not None:
        check(function, "active", active, torch.bool, (n_rows,), logits)
    if bitmask is not None:
        check(function, "bitmask", bitmask, torch.int32, (n_rows, None), logits)
        if bitmask.shape[1] * 32 < width:
            raise ValueError(
                f"{function}: bitmask has {bitmask.shape[1]} words of 32 bits for {width} tokens"
            )


def _from_top(logits: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row, `[..., 1]`, and `(logits − largest) · factor`."""
    top = logits.amax(dim=-1, keepdim=True)
    # −inf − (−inf) would be NaN where there is merely nothing.
    return top, (logits - torch.where(top.isneginf(), 0.0, top)) * factor


def _log_sum_exp(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.exp().sum(dim=-1, dtype=torch.float64).log()
