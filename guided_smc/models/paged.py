"""Attention straight from the pages, level by level: FlashInfer on CUDA, torch to compare with.

The queries that count attend to their rows' tails and to the prompts that they share, by the
segments of a `CascadePlan`, and the two are merged by log-sum-exp. `TorchLevels` says in torch what
a level is to give; `FlashInferLevels` has FlashInfer's kernels give it (its wrapper of paged
prefill, which also decodes: queries of a group of heads fill a tile together). Nothing is gathered
into windows, which is what the CPU does instead (`particles`).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from typing import Any

import torch

from guided_smc.models.attention import Style
from guided_smc.models.budget import PAGE
from guided_smc.models.checks import first_line
from guided_smc.models.pages import Pool
from guided_smc.models.plans import CascadePlan, Level

HEAD_DIMS = (64, 128, 256)
"""Those that FlashInfer has kernels for, with keys and values of one size."""

WORKSPACE = 128 * 2**20
"""Bytes that FlashInfer asks for on each device, for partial results."""

INSTALL = "pip install 'guided-smc[cuda]'"


class PagedAttention(ABC):
    """Attention of a pass by its plan; one for each session."""

    name: str
    """For `Usage.attention`."""

    log_unit = 1.0
    """What a log-sum-exp is to be multiplied by to be a natural one."""

    def attend(
        self,
        plan: CascadePlan,
        query: torch.Tensor,
        keys: Pool,
        values: Pool,
        style: Style,
    ) -> torch.Tensor:
        """Attention of the queries that count to all that each sees; 0 for the others.

        Args:
            plan: Of this pass.
            query: `[R, Hq, L, D]`.
            keys: Pages, the new tokens' keys in them.
            values: Pages of values.
            style: How this layer attends.

        Returns:
            `[R, L, Hq, Dv]`.
        """
        n_rows, n_heads, width, _ = query.shape
        asked = query.transpose(1, 2).flatten(0, 1)
        chosen, of = plan.indices(query.device)
        if chosen is not None:
            asked = asked.index_select(0, chosen)
        pages = (keys.pages, values.pages)
        out, lse = self.level(plan, plan.tails, asked, *pages, style)
        if plan.prompts is not None:
            if of is None:
                found = self.level(plan, plan.prompts, asked, *pages, style)
                out, lse = self.merge(out, lse, *found)
            else:
                found = self.level(plan, plan.prompts, asked[of], *pages, style)
                out[of], lse[of] = self.merge(out[of], lse[of], *found)
        if style.sinks is not None:
            kept = torch.sigmoid(lse * self.log_unit - style.sinks.float())
            out = out * kept.unsqueeze(-1).to(out.dtype)
        if chosen is not None:
            everywhere = out.new_zeros(n_rows * width, *out.shape[1:])
            out = everywhere.index_copy_(0, chosen, out)
        return out.view(n_rows, width, n_heads, -1)

    @abstractmethod
    def level(
        self,
        plan: CascadePlan,
        level: Level,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        style: Style,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What queries `[q, Hq, D]` find in one level, sinks not counted.

        Args:
            plan: The level's.
            level: One of its two.
            query: `[q, Hq, D]`.
            keys: `[pages, Hkv, PAGE, D]`, of any strides.
            values: `[pages, Hkv, PAGE, Dv]`.
            style: How this layer attends.

        Returns:
            `[q, Hq, Dv]`, and the log-sum-exps of the scores, float32 `[q, Hq]`, in units of
            `log_unit`.
        """

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        more: torch.Tensor,
        more_lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two parts of one attention as one; shapes as of `level`."""
        share = torch.sigmoid((more_lse - lse) * self.log_unit).unsqueeze(-1).to(out.dtype)
        return torch.lerp(out, more, share), torch.logaddexp(lse, more_lse)


class TorchLevels(PagedAttention):
    """Segment by segment, as plainly as can be: what the other is measured against."""

    name = "torch, by pages"

    def level(
        self,
        plan: CascadePlan,
        level: Level,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        style: Style,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PagedAttention.level`."""
        mask = None if level.causal else plan.prompt_mask(style.sliding)
        groups = query.shape[1] // keys.shape[1]
        scale = query.shape[-1] ** -0.5 if style.scaling is None else style.scaling
        outs, lses = [], []
        done = 0
        for b, length in enumerate(level.kv_lengths.tolist()):
            mine = query[level.qo_indptr[b] : level.qo_indptr[b + 1]]
            of = level.indices[level.indptr[b] : level.indptr[b + 1]].to(keys.device).long()
            key, value = (  # [Hq, tokens, D]
                x[of].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(groups, dim=0)
                for x in (keys, values)
            )
            scores = (mine.transpose(0, 1) @ key.transpose(1, 2)).float() * scale
            if style.softcap is not None:
                scores = style.softcap * torch.tanh(scores / style.softcap)
            n = len(mine)
            sees = torch.ones(n, length, dtype=torch.bool)
            if level.causal:
                column, last = torch.arange(length), torch.arange(length - n, length).unsqueeze(1)
                sees = column <= last
                if style.sliding is not None:
                    sees &= column > last - style.sliding
            elif mask is not None:
                sees = mask[done : done + n * length].view(n, length)
            done += n * length
            scores = scores.masked_fill(~sees.to(scores.device), -math.inf)
            lse = scores.logsumexp(dim=-1)
            # A query that sees nothing of a prompt finds 0 there.
            weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
            outs.append((weights.to(value.dtype) @ value).transpose(0, 1))
            lses.append(lse.transpose(0, 1))
        return torch.cat(outs), torch.cat(lses)


class FlashInferLevels(PagedAttention):
    """By FlashInfer's kernels. What it plans for a level holds for all layers of one style.

    A plan goes to the device from memory that the next plan overwrites, so the next one waits until
    it has been sent.
    """

    name = "flashinfer"
    log_unit = math.log(2.0)

    def __init__(self) -> None:
        self._flashinfer: Any = importlib.import_module("flashinfer")
        self._workspaces: dict[torch.device, torch.Tensor] = {}
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        self._planned: dict[tuple[Any, ...], CascadePlan] = {}
        self._sent: dict[tuple[Any, ...], torch.cuda.Event] = {}

    def level(
        self,
        plan: CascadePlan,
        level: Level,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        style: Style,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PagedAttention.level`."""
        mask = None if level.causal else plan.prompt_mask(style.sliding)
        # A wrapper keeps the kernels that it chose for its first plan, and not all take a mask.
        masked = mask is not None
        key = (query.device, level.causal, masked, style.scaling, style.sliding, style.softcap)
        if key not in self._wrappers:
            self._wrappers[key] = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace(query.device), "HND"
            )
        if self._planned.get(key) is not plan:
            if key in self._sent:
                self._sent[key].synchronize()
            self._plan(self._wrappers[key], level, mask, query, keys, style)
            self._planned[key] = plan
            if query.is_cuda:
                self._sent[key] = torch.cuda.Event()
                self._sent[key].record(torch.cuda.current_stream(query.device))
        found: tuple[torch.Tensor, torch.Tensor] = self._wrappers[key].run(
            query.contiguous(), (keys, values), return_lse=True
        )
        return found

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        more: torch.Tensor,
        more_lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As above, in one launch."""
        self._flashinfer.merge_state_in_place(out, lse, more, more_lse)
        return out, lse

    def _workspace(self, device: torch.device) -> torch.Tensor:
        if device not in self._workspaces:
            self._workspaces[device] = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        return self._workspaces[device]

    def _plan(
        self,
        wrapper: Any,
        level: Level,
        mask: torch.Tensor | None,
        query: torch.Tensor,
        keys: torch.Tensor,
        style: Style,
    ) -> None:
        window = -1
        if level.causal and style.sliding is not None:
            window = style.sliding - 1
        bounds = (level.qo_indptr, level.indptr, level.indices, level.last_page_len)
        if mask is not None:
            # It is packed on the device, which takes the bounds there.
            mask = mask.to(query.device)
            bounds = tuple(x.to(query.device) for x in bounds)  # type: ignore[assignment]
        wrapper.plan(
            *bounds,
            query.shape[1],
            keys.shape[1],
            query.shape[2],
            PAGE,
            custom_mask=mask,
            causal=level.causal,
            sm_scale=style.scaling,
            window_left=window,
            logits_soft_cap=style.softcap,
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
        )


def paged_attention(
    device: torch.device, dtype: torch.dtype, config: Any
) -> type[PagedAttention] | str | None:
    """What attends to the pages of a model on a device.

    Args:
        device: Of the model.
        dtype: Of its weights, and so of its K/V.
        config: Its text config.

    Returns:
        A kind of `PagedAttention`; or why there is none where one might be expected, and torch
        attends; or None where torch is what is meant: on the CPU.
    """
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("flashinfer") is None:
        return f"FlashInfer is not installed: {INSTALL}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer has no kernels for {str(dtype).removeprefix('torch.')}: use bfloat16"
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    of_values = getattr(config, "v_head_dim", None) or head_dim
    if head_dim not in HEAD_DIMS or of_values != head_dim:
        sizes = f"{head_dim}" if of_values == head_dim else f"{head_dim} and {of_values}"
        return (
            f"FlashInfer has kernels for heads of {', '.join(map(str, HEAD_DIMS))}, and this "
            f"model's have {sizes}"
        )
    try:
        _try_out(device, dtype, head_dim)
    except Exception as error:
        return f"FlashInfer fails on this machine: {type(error).__name__}: {first_line(error)}"
    return FlashInferLevels


def _try_out(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Attend once: FlashInfer compiles its kernels when they are first asked for.

    Raises:
        Exception: Whatever keeps it from that: no compiler, no kernel for this device.
    """
    size = torch.tensor([0, 1], dtype=torch.int32)
    last = torch.ones(1, dtype=torch.int32)
    tails = Level(None, size, size, torch.zeros(1, dtype=torch.int32), last, True)
    plan = CascadePlan(None, tails, None, size.numpy()[:1])
    one = torch.ones(1, 1, 1, head_dim, dtype=dtype, device=device)
    pool = Pool(one)
    pool.reserve(1)
    pool.data[:, :1] = 1.0
    found = FlashInferLevels().attend(plan, one, pool, pool, Style())
    if not bool((found == 1.0).all()):
        raise RuntimeError(f"attention to a single value of 1 gave {found.flatten()[0].item()}")
