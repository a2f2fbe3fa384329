"""K/V of many ragged rows in one slab per layer, with the key's position as its column.

Because column and position are the same, causal and sliding-window masks follow from positions
alone: a query at position t sees the columns up to t. Columns behind a row's length hold stale
values that no query sees until they are overwritten, so rows of different lengths need neither
left padding nor holes, and forgetting tokens costs nothing.

The slab plugs into transformers by a cache (`RowCache.update` writes the new keys) and an
attention function (registered as `ATTENTION`) that attends to the slab.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from guided_smc.models.transformers import TransformersModel

ATTENTION = "guided_smc_rows"

_GROWTH = 64  # columns
_PREFILL_TOKENS = 4096  # padded tokens in one prefill pass


class RowLayer(CacheLayerMixin):
    """The slab of one layer: keys and values `[rows, heads, columns, head_dim]`."""

    is_sliding = False

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the rows and columns that the cache has now."""
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (self.cache.row_capacity, key_states.shape[1], self.cache.column_capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def grow(self, rows: int, columns: int) -> None:
        """Copy into a larger slab."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[R, heads, L, head_dim]` at the rows' positions; return the columns in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n_rows, _, width, _ = key_states.shape
        used = self.cache.columns
        keys, values = self.keys[:n_rows, :, :used], self.values[:n_rows, :, :used]
        start = self.cache.uniform_start
        if start is not None:
            keys[:, :, start : start + width] = key_states
            values[:, :, start : start + width] = value_states
        else:
            rows, columns = self.cache.scatter
            keys[rows, :, columns] = key_states.transpose(1, 2)
            values[rows, :, columns] = value_states.transpose(1, 2)
        return keys, values

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.cache.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns in use, from 0."""
        return self.cache.columns, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    # The name that transformers had for it before.
    get_max_cache_shape = get_max_length


class RowCache(Cache):
    """The slabs of all layers, and where the current pass writes."""

    def __init__(self, n_layers: int) -> None:
        self.row_capacity = 0
        self.column_capacity = 0
        self.columns = 0
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        self.uniform_start: int | None = None
        self.scatter: tuple[torch.Tensor, torch.Tensor]
        self._masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = {}
        super().__init__(layers=[RowLayer(self) for _ in range(n_layers)])

    def reserve(self, rows: int, columns: int) -> None:
        """Make room."""
        if rows <= self.row_capacity and columns <= self.column_capacity:
            return
        self.row_capacity = max(rows, self.row_capacity)
        if columns > self.column_capacity:
            self.column_capacity = -(-columns // _GROWTH) * _GROWTH
        for layer in self.layers:
            layer.grow(self.row_capacity, self.column_capacity)

    def begin_pass(self, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """Prepare to append `width` columns behind `lengths` `[R]`; returns positions `[R, L]`."""
        self.columns = int(lengths.max()) + width
        self.reserve(len(lengths), self.columns)
        self.positions = lengths.unsqueeze(1) + torch.arange(width)
        first = int(lengths[0])
        self.uniform_start = first if bool((lengths == first).all()) else None
        self.scatter = (torch.arange(len(lengths)).unsqueeze(1), self.positions)
        self._masks.clear()
        return self.positions

    def mask(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor:
        """`[R, 1, groups · L, columns]`: 0 where a query sees a key, else −inf.

        Made once per pass, and as numbers: attention would turn bools into them in every layer.
        """
        key = (window, groups, like.dtype)
        if key not in self._masks:
            position = self.positions.to(like.device).unsqueeze(-1)
            column = torch.arange(self.columns, device=like.device)
            visible = column <= position
            if window is not None:
                visible &= column > position - window
            mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(~visible, float("-inf"))
            self._masks[key] = mask.repeat(1, groups, 1).unsqueeze(1)
        return self._masks[key]


class _Current(threading.local):
    """The cache of the pass that this thread is in: the attention function has no other way to
    it that holds for every architecture.
    """

    cache: RowCache | None = None


_current = _Current()


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` `[R, Hq, L, D]` to the slab's columns `[R, Hkv, C, D]`.

    Returns `[R, L, Hq, D]`. The mask that the model made is ignored: positions tell.
    """
    cache = _current.cache
    if cache is None:
        raise RuntimeError("this attention only runs inside a guided_smc session")
    n_rows, n_heads, width, dim = query.shape
    n_kv = key.shape[1]
    groups = n_heads // n_kv
    # Query heads that share a key head go side by side: no key is repeated.
    packed = query.reshape(n_rows, n_kv, groups * width, dim)
    mask = cache.mask(sliding_window, groups, query)
    if softcap is None and s_aux is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=mask, scale=scaling
        )
    else:
        scores = packed @ key.transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.float() + mask
        if s_aux is not None:
            # A learnt sink per query head takes part in the softmax and then gives nothing.
            sink = s_aux.float().view(1, n_kv, groups, 1).expand(n_rows, -1, -1, width)
            scores = torch.cat([scores, sink.reshape(n_rows, n_kv, groups * width, 1)], dim=-1)
        probs = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
        out = probs @ value
    return out.reshape(n_rows, n_heads, width, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, row_attention)


class RowSession:
    """Rows of the whole batch in one slab."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self.n_layers = model.model.config.get_text_config().num_hidden_layers
        self.cache = RowCache(self.n_layers)
        self.lengths = torch.zeros(0, dtype=torch.int64)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Encode each prompt once, in passes of prompts of similar length, then copy the rows."""
        first = len(self.lengths)
        total = first + sum(copies)
        starts = [first + sum(copies[:g]) for g in range(len(prompts))]
        longest = max((len(p) for p in prompts), default=0)
        self.cache.reserve(total, max(longest, int(self.lengths.max()) if first else 0))
        self.lengths = torch.cat(
            [
                self.lengths,
                torch.tensor([len(p) for p in prompts]).repeat_interleave(torch.tensor(copies)),
            ]
        )
        by_length = sorted(
            (g for g in range(len(prompts)) if prompts[g]), key=lambda g: len(prompts[g])
        )
        while by_length:
            width = len(prompts[by_length[-1]])
            size = max(1, _PREFILL_TOKENS // width)
            batch, by_length = by_length[-size:], by_length[:-size]
            self._prefill_pass(
                [prompts[g] for g in batch], [starts[g] for g in batch], [copies[g] for g in batch]
            )

    def _prefill_pass(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int], copies: Sequence[int]
    ) -> None:
        width = max(len(p) for p in prompts)
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
        for g, prompt in enumerate(prompts):
            tokens[g, : len(prompt)] = torch.tensor(prompt)
        scratch = RowCache(self.n_layers)
        self._forward(
            self.model, tokens, scratch, torch.zeros(len(prompts), dtype=torch.int64), keep=1
        )
        for layer, source in zip(self.cache.layers, scratch.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            for g, prompt in enumerate(prompts):
                rows, n = slice(starts[g], starts[g] + copies[g]), len(prompt)
                layer.keys[rows, :, :n] = source.keys[g, :, :n]
                layer.values[rows, :, :n] = source.values[g, :, :n]

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """Append tokens to every row."""
        logits = self.extend_at(self.model, self.lengths, tokens, counts, last_only=last_only)
        self.lengths = self.lengths + counts
        return logits

    @torch.inference_mode()
    def extend_at(
        self,
        model: TransformersModel,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        *,
        last_only: bool,
    ) -> torch.Tensor:
        """Run a model of the same shape over tokens behind the first `lengths` of each row.

        What it writes there is not committed: the rows keep their lengths.
        """
        at = (counts - 1).clamp(min=0)
        same = bool((at == at[0]).all())
        keep: int | torch.Tensor = 0
        if last_only and tokens.shape[1] > 1:
            keep = at[:1].to(model.device) if same else 0
        logits = self._forward(model, tokens, self.cache, lengths, keep=keep)
        if not last_only:
            return logits
        return logits[:, 0] if same else logits[torch.arange(len(at)), at.to(logits.device)]

    def _forward(
        self,
        model: TransformersModel,
        tokens: torch.Tensor,
        cache: RowCache,
        lengths: torch.Tensor,
        *,
        keep: int | torch.Tensor,
    ) -> torch.Tensor:
        positions = cache.begin_pass(lengths, tokens.shape[1])
        _current.cache = cache
        try:
            return model.forward(tokens, cache, positions=positions, logits_to_keep=keep)
        finally:
            _current.cache = None

    @torch.inference_mode()
    def reorder(self, index: torch.Tensor) -> None:
        """Copy only the rows that change; survivors that keep their place do not move."""
        n = len(index)
        self.cache.reserve(n, 0)
        columns = int(self.lengths.max()) if len(self.lengths) else 0
        moved = torch.flatten(torch.nonzero(index != torch.arange(n)))
        if len(moved):
            source = index[moved]
            for layer in self.cache.layers:
                if layer.is_initialized:
                    for slab in (layer.keys, layer.values):
                        to, of = moved.to(slab.device), source.to(slab.device)
                        slab[to, :, :columns] = slab[of, :, :columns]
        self.lengths = self.lengths[index]
