"""The particle cache: K/V of many ragged rows, prompts stored once, tails in pages.

Where things are (see `pages`): a prompt in a run of pages, once for all particles that continue
it; tails in pages with reference counts, which resampling only re-lists. That is the record.

The CPU has no attention over pages, and gathering them in every pass costs several times what the
attention itself does. So each row has a *window*: its columns side by side, refreshed from the
pages only where resampling changed them. Drafted positions live in the window alone, behind the
row's end, until they are verified. A prompt that is long for its rows is not in their windows: it
is attended to in place, once for all of them, and merged with the rest by log-sum-exp.

It plugs into transformers by a cache (which hands the new keys on) and an attention function
(registered as `ATTENTION`), so that no architecture needs code of its own. Column and position
differ by a constant within a row, so causal and sliding-window masks follow from positions alone;
columns behind a row's end hold stale values that no query sees.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from guided_smc.errors import OutOfPagesError
from guided_smc.models.attention import Style, causal
from guided_smc.models.budget import Need, out_of_memory
from guided_smc.models.mirror import sent
from guided_smc.models.paged import PagedAttention
from guided_smc.models.pages import Extension, NoMemoryError, PageTable
from guided_smc.models.passes import Commit, Pass, Store
from guided_smc.models.plans import CascadePlan, plan_cascade

if TYPE_CHECKING:
    from guided_smc.models.transformers import TransformersModel

ATTENTION = "guided_smc_particles"

IN_PLACE = 1024
"""Tokens of a prompt, times the rows that continue it, from which on it is attended to in place.

Below, the calls that this adds cost more than reading the prompt once for each row."""

_PREFILL_TOKENS = 4096  # padded tokens in one prefill pass


class Layer(CacheLayerMixin):
    """Hands the new keys and values on to the attention function, with the layer's number."""

    is_sliding = False

    def __init__(self, cache: ParticleCache, number: int) -> None:
        super().__init__()
        self.cache = cache
        self.number = number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: stores are made when attention first sees keys."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, unchanged."""
        self.cache.layer = self.number
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Of no use here: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the new tokens alone: the masks made from it are not used."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    # The name that transformers had for it before.
    get_max_cache_shape = get_max_length


class ParticleCache(Cache):
    """The stores of all layers, and the pass that they are in.

    Args:
        n_layers: Of the model.
        paged: Attends to the pages themselves; None: to windows.
        limit: The most pages.
    """

    def __init__(
        self, n_layers: int, paged: PagedAttention | None = None, limit: int | None = None
    ) -> None:
        self.paged = paged
        self.limit = limit
        self.failed: NoMemoryError | None = None
        self.stores: list[Store | None] = [None] * n_layers
        self.layer = 0
        self.now: Pass | None = None
        super().__init__(layers=[Layer(self, i) for i in range(n_layers)])

    @property
    def moves(self) -> int:
        """How often anything in it has moved to another address."""
        stores = [store for store in self.stores if store is not None]
        return sum(s.moves + s.key_pool.moves + s.value_pool.moves for s in stores)

    @property
    def nbytes(self) -> int:
        """Bytes of K/V."""
        return sum(store.nbytes for store in self.stores if store is not None)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        style: Style,
    ) -> torch.Tensor:
        """Store the new keys and values and attend to all that each query sees.

        Args:
            layer: Number of the layer.
            query: `[R, Hq, L, D]`.
            key: `[R, Hkv, L, D]`.
            value: `[R, Hkv, L, Dv]`.
            style: How this layer attends.

        Returns:
            `[R, L, Hq, Dv]`.
        """
        assert self.now is not None
        now = self.now.on(key.device)
        store = self.stores[layer]
        if store is None:
            store = self.stores[layer] = Store.like(key, value, self.limit)
        if now.commit is not None:
            for pool, new in ((store.key_pool, key), (store.value_pool, value)):
                try:
                    pool.reserve(now.pages)
                except NoMemoryError as error:
                    self.failed = error  # a traced pass would raise another in its place
                    raise
                now.commit.write(pool, new)
        if now.plan is not None and self.paged is not None:
            pools = (store.key_pool, store.value_pool)
            return self.paged.attend(now.plan, query, *pools, style)
        if now.columns is None:
            return causal(query, key, value, style)
        n_rows, _, width, _ = key.shape
        store.reserve(n_rows, now.used)
        if now.refresh is not None:
            store.refresh(*now.refresh)
        keys, values = store.keys[:n_rows, :, : now.used], store.values[:n_rows, :, : now.used]
        if now.uniform is not None:
            there = slice(now.uniform, now.uniform + width)
            keys[:, :, there] = key
            values[:, :, there] = value
        else:
            rows = torch.arange(n_rows, device=key.device).unsqueeze(1)
            keys[rows, :, now.columns] = key.transpose(1, 2)
            values[rows, :, now.columns] = value.transpose(1, 2)

        n_heads, n_kv = query.shape[1], key.shape[1]
        groups = n_heads // n_kv
        # Query heads that share a key head go side by side: no key is repeated.
        packed = query.reshape(n_rows, n_kv, groups * width, -1)
        mask = now.mask(style.sliding, groups, query)
        out, lse = style.attend(packed, keys, values, mask, want_lse=bool(now.in_place))
        for run, (rows_of, start, tokens) in enumerate(now.in_place):
            mine = packed[rows_of]
            asked = mine.transpose(0, 1).reshape(1, n_kv, -1, mine.shape[-1])
            there = slice(start, start + tokens)
            prompt_mask = now.prompt_mask(run, style.sliding, groups, query)
            found, found_lse = style.attend(
                asked,
                store.key_pool.data[None, :, there],
                store.value_pool.data[None, :, there],
                prompt_mask,
                want_lse=True,
            )
            found = found.reshape(n_kv, len(mine), groups * width, -1).transpose(0, 1)
            found_lse = found_lse.reshape(n_kv, len(mine), -1).transpose(0, 1)
            share = torch.sigmoid(found_lse - lse[rows_of]).unsqueeze(-1).to(found.dtype)
            out[rows_of] = torch.lerp(out[rows_of], found, share)
            lse[rows_of] = torch.logaddexp(lse[rows_of], found_lse)
        out = style.sink(out, lse, n_kv, groups, width)
        return out.reshape(n_rows, n_heads, width, -1).transpose(1, 2)


class _Current(threading.local):
    """The cache of the pass that this thread is in: the attention function has no other way to
    it that holds for every architecture.
    """

    cache: ParticleCache | None = None
    blank: ParticleCache | None = None


_current = _Current()


@contextmanager
def running(cache: ParticleCache, now: Pass) -> Iterator[None]:
    """Forward passes of this thread are this pass over this cache."""
    _current.cache, cache.now = cache, now
    try:
        yield
    finally:
        _current.cache = cache.now = None


@contextmanager
def blank(n_layers: int) -> Iterator[ParticleCache]:
    """A cache that keeps nothing, for passes of this thread that are only looked at.

    Attention then mixes query, key and value of each token in some way.
    """
    _current.blank = ParticleCache(n_layers)
    try:
        yield _current.blank
    finally:
        _current.blank = None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float | None,
    sliding: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if _current.blank is not None:
        groups = query.shape[1] // key.shape[1]
        similar = (query * key.repeat_interleave(groups, dim=1)).mean(dim=-1, keepdim=True)
        mixed: torch.Tensor = value.repeat_interleave(groups, dim=1) + similar.tanh()
        return mixed.transpose(1, 2)
    cache = _current.cache
    if cache is None:
        raise RuntimeError("this attention only runs inside a guided_smc session")
    return cache.attend(layer, query, key, value, Style(scaling, sliding, softcap, sinks))


# As an operator, so that a traced pass can call it.
_library = torch.library.Library("guided_smc", "FRAGMENT")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float? scaling, int? sliding, "
    "float? softcap, Tensor? sinks) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")


def particle_attention(
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
    """Attention of transformers' layers, `query` `[R, Hq, L, D]`; returns `[R, L, Hq, Dv]`.

    The mask that the model made is ignored: positions tell.
    """
    cache = _current.blank or _current.cache
    if cache is None:
        raise RuntimeError("this attention only runs inside a guided_smc session")
    attend = torch.ops.guided_smc.attend if torch.jit.is_tracing() else _attend
    out = attend(query, key, value, cache.layer, scaling, sliding_window, softcap, s_aux)
    return out, None


AttentionInterface.register(ATTENTION, particle_attention)


class ParticleSession:
    """Rows of the whole batch."""

    kv_cache = "particle"
    reads_tokens = False

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self.n_layers = model.n_layers
        limit = None if model.budget is None else model.budget.pages
        self.cache = ParticleCache(self.n_layers, model.paged_attention(), limit)
        self.table = PageTable()
        self.in_place_from = IN_PLACE
        self._in_place: set[int] = set()  # prompts, by number
        self._base = np.zeros(0, dtype=np.int64)  # position of each row's first column
        self._fresh = np.zeros(0, dtype=np.int64)  # columns of each row's window that are right

    @property
    def attention(self) -> str:
        """What attends to the pages."""
        return "torch" if self.cache.paged is None else self.cache.paged.name

    @property
    def lengths(self) -> torch.Tensor:
        """int64 `[R]`, tokens of each row."""
        return torch.from_numpy(self.table.lengths)

    def fits(self, running: Sequence[Need], joining: Sequence[Need]) -> bool:
        """Whether there are pages for all that those who run, and those who join, may need."""
        budget = self.model.budget
        return budget is None or (
            budget.holds([*running, *joining])
            and self.table.has_runs([need.prompt for need in joining], budget.pages)
        )

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Encode each prompt once, in passes of prompts of similar length."""
        numbers = [
            self.table.add_prompt(len(prompt), n) for prompt, n in zip(prompts, copies, strict=True)
        ]
        for number, prompt, n in zip(numbers, prompts, copies, strict=True):
            in_place = len(prompt) * n >= self.in_place_from
            if in_place:
                self._in_place.add(number)
            self._base = np.append(self._base, np.full(n, len(prompt) if in_place else 0))
            self._fresh = np.append(self._fresh, np.zeros(n, dtype=np.int64))
        order = sorted(
            (g for g in range(len(prompts)) if prompts[g] and copies[g]),
            key=lambda g: len(prompts[g]),
        )
        while order:
            size = max(1, _PREFILL_TOKENS // len(prompts[order[-1]]))
            batch, order = order[-size:], order[:-size]
            self._read([prompts[g] for g in batch], [numbers[g] for g in batch])

    def _read(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
        """Put the K/V of prompts into their pages."""
        lengths = np.array([len(p) for p in prompts])
        width = int(lengths.max())
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
        for g, prompt in enumerate(prompts):
            tokens[g, : len(prompt)] = torch.tensor(prompt)
        starts = [self.table.prompt_start(number) for number in numbers]
        slots = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
        nothing = np.zeros((0, 2), dtype=np.int64)
        commit = Commit.of(Extension(slots, nothing), lengths, width, self.model.device)
        positions = torch.arange(width).expand(len(prompts), -1)
        now = Pass(positions=positions, pages=self.table.capacity, commit=commit)
        self._forward(self.model, tokens, now, keep=1)

    @torch.inference_mode()
    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """Append tokens to every row."""
        starts, new = self.table.lengths, counts.numpy()
        extension = self.table.extend(new)
        commit = Commit.of(extension, new, tokens.shape[1], self.model.device)
        plan = None
        if self.cache.paged is not None and new.any():
            plan = plan_cascade(self.table, new, tokens.shape[1])
        logits = self._extend(self.model, starts, tokens, counts, commit, plan, last_only=last_only)
        if plan is None:
            self._fresh = self.table.lengths - self._base
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

        What it says there stays in the windows alone: the rows keep their lengths and pages.
        """
        return self._extend(model, lengths.numpy(), tokens, counts, None, None, last_only=last_only)

    def _extend(
        self,
        model: TransformersModel,
        starts: np.ndarray,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        commit: Commit | None,
        plan: CascadePlan | None,
        *,
        last_only: bool,
    ) -> torch.Tensor:
        width = tokens.shape[1]
        positions = torch.from_numpy(starts[:, None] + np.arange(width))
        now = Pass(positions=positions, pages=self.table.capacity, commit=commit, plan=plan)
        if plan is None:
            columns = (starts - self._base)[:, None] + np.arange(width)
            now.columns = sent(columns, self.model.device)
            now.used = int(columns.max()) + 1
            now.uniform = int(columns[0, 0]) if bool((columns == columns[0]).all()) else None
            now.refresh = self._stale(starts - self._base)
            now.in_place = self._runs()
        at = (counts - 1).clamp(min=0)
        same = bool((at == at[0]).all())
        keep: int | torch.Tensor = 0
        if last_only and width > 1:
            keep = at[:1].to(model.device) if same else 0
        logits = self._forward(model, tokens, now, keep=keep)
        if not last_only:
            return logits
        return logits[:, 0] if same else logits[torch.arange(len(at)), at.to(logits.device)]

    def _stale(self, until: np.ndarray) -> tuple[torch.Tensor, int, torch.Tensor] | None:
        """What windows must take from the pages to be right up to column `until` `[R]`."""
        until = np.minimum(until, self.table.lengths - self._base)
        rows = np.flatnonzero(self._fresh < until)
        if not len(rows):
            return None
        start, stop = int(self._fresh[rows].min()), int(until[rows].max())
        slots = np.zeros((len(rows), stop - start), dtype=np.int64)
        in_window = self.table.prompt_lengths[rows] - self._base[rows]  # prompt columns
        for n in np.unique(in_window).tolist():
            which = np.flatnonzero(in_window == n)
            split = min(max(n, start), stop)
            for i in which.tolist():
                first = self.table.prompt_start(int(self.table.prompt[rows[i]]))
                slots[i, : split - start] = first + np.arange(start, split)
            slots[which, split - start :] = self.table.slots(rows[which], split - n, stop - n)
        device = self.model.device
        self._fresh[rows] = until[rows]
        return sent(rows, device), start, sent(slots, device)

    def _runs(self) -> list[tuple[slice, int, int]]:
        """Rows side by side that continue one prompt in place: rows, first slot, tokens."""
        if not self._in_place:
            return []
        prompts = self.table.prompt
        starts = np.flatnonzero(np.diff(prompts, prepend=-1))
        stops = np.append(starts[1:], len(prompts))
        return [
            (slice(a, b), self.table.prompt_start(p), self.table.prompt_length(p))
            for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
            if (p := int(prompts[a])) in self._in_place
        ]

    def _forward(
        self,
        model: TransformersModel,
        tokens: torch.Tensor,
        now: Pass,
        *,
        keep: int | torch.Tensor,
    ) -> torch.Tensor:
        try:
            with running(self.cache, now):
                return model.forward(
                    tokens, self.cache, positions=now.positions, logits_to_keep=keep
                )
        except Exception:
            if (failed := self.cache.failed) is None:
                raise
            self.cache.failed = None
            raise self.out_of_memory(failed.pages) from failed.__cause__

    def out_of_memory(self, wanted: int) -> OutOfPagesError:
        """The error of there being no memory for so many pages."""
        stores = [store for store in self.cache.stores if store is not None]
        pools = [pool for store in stores for pool in (store.key_pool, store.value_pool)]
        pair = stores[0].key_pool.pages[:0], stores[0].value_pool.pages[:0]
        in_layer = sum(math.prod(p.shape[1:]) * p.element_size() for p in pair)
        held = min(pool.room for pool in pools)
        return out_of_memory(
            self.model.name,
            stores[-1].keys.device,
            wanted=wanted,
            held=held if len(stores) == self.n_layers else 0,
            page_bytes=self.n_layers * in_layer,
            rows=len(self.table),
            longest=int(self.table.lengths.max(initial=0)),
            budget=self.model.budget,
        )

    def invalidate(self) -> None:
        """Let the next pass take all of the windows from the pages again."""
        self._fresh[:] = 0

    def reorder(self, index: torch.Tensor) -> None:
        """Rewrite the lists of pages; no K/V moves but into windows, in the next pass."""
        order = index.numpy()
        common = self.table.reorder(order)
        self._base = self._base[order]
        had = np.zeros(len(order), dtype=np.int64)
        n = min(len(order), len(self._fresh))
        had[:n] = self._fresh[:n]
        # In columns: the prompt's own are common where the prompt is.
        shared = np.where(common < 0, 0, common + self.table.prompt_lengths - self._base)
        self._fresh = np.minimum(had, shared)
        self._in_place &= set(self.table.prompt.tolist())
