"""The general session: a transformers cache of its own for each prompt.

It asks of an architecture only what transformers' own generation asks: append tokens, and select
rows. So it serves recurrent and hybrid layers too, at the price of a pass for each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from guided_smc.errors import ModelError

if TYPE_CHECKING:
    from guided_smc.models.transformers import TransformersModel


class GroupSession:
    """Rows in order, each run of them that came from one prompt in a cache of its own.

    All rows of a prompt must be extended by the same number of tokens, but for rows that will not
    be extended again (their text has ended): a recurrent state cannot be taken back.
    """

    kv_cache = "general"
    attention = ""
    reads_tokens = False

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self._caches: list[Any] = []
        self._sizes: list[int] = []
        self._lengths: list[int] = []

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Encode each prompt once, alone, and repeat its state."""
        for prompt, n in zip(prompts, copies, strict=True):
            cache = DynamicCache(config=self.model.model.config)
            if prompt:
                self.model.forward(torch.tensor([list(prompt)]), cache, logits_to_keep=1)
                _select(cache, torch.zeros(n, dtype=torch.int64))
            self._caches.append(cache)
            self._sizes.append(n)
            self._lengths.append(len(prompt))

    @torch.inference_mode()
    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """Append tokens, prompt by prompt."""
        parts: list[torch.Tensor] = []
        at = 0
        for g, size in enumerate(self._sizes):
            rows = slice(at, at + size)
            at += size
            width = int(counts[rows].max())
            logits = self._extend_group(g, tokens[rows, : max(width, 1)], width)
            if last_only:
                # Rows that were given fewer tokens have ended; what is said of them is not read.
                parts.append(logits[:, -1])
            else:
                missing = tokens.shape[1] - logits.shape[1]
                parts.append(torch.nn.functional.pad(logits, (0, 0, 0, missing)))
        return torch.cat(parts)

    def _extend_group(self, g: int, tokens: torch.Tensor, width: int) -> torch.Tensor:
        if width == 0:
            shape = (tokens.shape[0], 1, len(self.model.vocabulary))
            return torch.zeros(shape, device=self.model.device)
        start = self._lengths[g]
        self._lengths[g] += width
        cache = self._caches[g]
        positions = torch.arange(start, start + width).expand(tokens.shape[0], -1)
        # Transformers' own generation feeds recurrent layers one token at a time once they hold a
        # state, and that is all that some of them get right.
        recurrent = any(isinstance(x, LinearAttentionCacheLayerMixin) for x in cache.layers)
        pieces = 1 if recurrent and start > 0 else width
        return torch.cat(
            [
                self.model.forward(t, cache, positions=p)
                for t, p in zip(tokens.split(pieces, 1), positions.split(pieces, 1), strict=True)
            ],
            dim=1,
        )

    @torch.inference_mode()
    def reorder(self, index: torch.Tensor) -> None:
        """Select rows within each prompt; prompts without rows are forgotten."""
        owner = torch.arange(len(self._sizes)).repeat_interleave(torch.tensor(self._sizes))
        start = [sum(self._sizes[:g]) for g in range(len(self._sizes))]
        of = owner[index]
        if bool((of[1:] < of[:-1]).any()):
            raise ModelError("rows of different prompts must keep their order")
        kept = [g for g in range(len(self._sizes)) if bool((of == g).any())]
        sizes = []
        for g in kept:
            local = index[of == g] - start[g]
            if local.tolist() != list(range(self._sizes[g])):
                _select(self._caches[g], local)
            sizes.append(len(local))
        self._caches = [self._caches[g] for g in kept]
        self._lengths = [self._lengths[g] for g in kept]
        self._sizes = sizes


def _select(cache: Any, rows: torch.Tensor) -> None:
    """Select rows in every layer of a transformers cache, whatever the layer keeps."""
    for layer in cache.layers:
        layer.reorder_cache(rows)
