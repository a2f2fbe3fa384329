"""Verification: log p of the drafted tokens, and the bonus draw behind the last of them.

For each row, `count` positions of the target's logits score a drafted token each, and the next one
is what the bonus token is drawn from.
"""

from __future__ import annotations

import torch

from guided_smc.kernels.dispatch import check, operator, runs_kernel
from guided_smc.kernels.sampling import LOGITS, LogProbs, check_rows, reciprocal


def _fake(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    count: torch.Tensor,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor,
    power: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    log_p = tokens.new_empty(tokens.shape, dtype=torch.float64)
    of_rows = [seed.new_empty(seed.shape, dtype=torch.float64) for _ in range(3)]
    return log_p, torch.empty_like(seed), of_rows[0], of_rows[1], of_rows[2]


@operator(_fake)
def verify(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    count: torch.Tensor,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor,
    power: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score K drafted tokens and draw one more from `p^α · mask / Z`, `Z = Σ_v p(v)^α · mask(v)`.

    A row whose text ended within the block has a bonus token too, which its caller ignores.

    Args:
        logits: float32, bfloat16 or float16 `[R, K + 1, V]`, of the target; −inf for ids that
            are no tokens. `p = softmax(logits / T)`.
        tokens: int64 `[R, K]`, drafted.
        count: int64 `[R]` in 0..K, of them that count.
        bitmask: int32 `[R, W]` for the bonus token, or None, as in `sample_masked`.
        temperature: float32 `[R]`; one below `GREEDY_TEMPERATURE` is taken for that.
        power: α, float64 `[R]`.
        seed: int64 `[R]`.
        counter: int64 `[R]`, the number of the draw.
        active: bool `[R]`.

    Returns:
        `log p` of the drafted tokens, float64 `[R, K]`, 0 where they do not count; the bonus
        token int64 `[R]`, its `log p` and `log q̃`, float64 `[R]`, and `log Z`, float64 `[R]`,
        which is exactly 0 for α = 1 without a mask.

        Where nothing is allowed: −1, −inf, −inf, −inf. Where the logits behind the last token
        hold NaN or +inf, or are all −inf: −1, NaN, NaN, NaN. Where those of a drafted token do,
        its log p is NaN. Rows that are not active: −1, and 0 for the rest.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    check("verify", "logits", logits, LOGITS, (None, None, None), logits)
    n_rows, width = logits.shape[0], logits.shape[1] - 1
    check_rows("verify", logits, bitmask, seed, counter, active)
    check("verify", "tokens", tokens, torch.int64, (n_rows, width), logits)
    check("verify", "count", count, torch.int64, (n_rows,), logits)
    check("verify", "temperature", temperature, torch.float32, (n_rows,), logits)
    check("verify", "power", power, torch.float64, (n_rows,), logits)
    if runs_kernel(logits):
        from guided_smc.kernels.sampling_triton import launch

        return launch(logits, tokens, count, bitmask, temperature, power, seed, counter, active)
    return verify_reference(
        logits, tokens, count, bitmask, temperature, power, seed, counter, active
    )


def verify_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    count: torch.Tensor,
    bitmask: torch.Tensor | None,
    temperature: torch.Tensor,
    power: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    active: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`verify` in torch: what it means."""
    width = tokens.shape[1]
    inverse = reciprocal(temperature)
    drafted = LogProbs(logits[:, :width], inverse.unsqueeze(-1).expand(-1, width))
    counts = torch.arange(width, device=count.device) < count.unsqueeze(-1)
    # What does not count may be any number.
    log_p = drafted.of(torch.where(counts, tokens, 0))
    log_p = torch.where(counts & active.unsqueeze(-1), log_p, 0.0)

    behind = count.view(-1, 1, 1).expand(-1, 1, logits.shape[-1])
    last = LogProbs(logits.gather(1, behind).squeeze(1), inverse)
    bonus, *of_bonus = last.draw(bitmask, power, seed, counter)
    bonus_log_p, bonus_log_q, log_z = (torch.where(active, x, 0.0) for x in of_bonus)
    return log_p, torch.where(active, bonus, -1), bonus_log_p, bonus_log_q, log_z
