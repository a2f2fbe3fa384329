"""Attention by pages reads what attention by windows reads.

`TorchLevels` reads nothing but the pages and the plan that FlashInfer gets. A stand-in for the
flashinfer package, which does what its documentation says, shows that the calls made to it mean
the same.
"""

from __future__ import annotations

import importlib.machinery
import math
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from test_transformers_models import (
    COPIES,
    PROMPTS,
    SMALL,
    Ids,
    V,
    build,
    plain_logits,
)

import guided_smc
from guided_smc.models import paged
from guided_smc.models.attention import Style
from guided_smc.models.budget import PAGE
from guided_smc.models.paged import FlashInferLevels, TorchLevels, paged_attention
from guided_smc.models.pages import PageTable, Pool
from guided_smc.models.plans import plan_cascade

PAGED = ["llama", "mistral with a window", "gemma2 with softcap", "gpt_oss with sinks", "gemma3"]


class Wrapper:
    """What the documentation of FlashInfer's wrapper of paged prefill says, for layout HND."""

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        custom_mask=None,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        bounds = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(x.dtype == torch.int32 for x in bounds)
        assert paged_kv_last_page_len.min() >= 1 and paged_kv_last_page_len.max() <= page_size
        self.bounds = [x.tolist() for x in bounds]
        self.heads, self.page_size = (num_qo_heads, num_kv_heads, head_dim_qk), page_size
        # Kernels are chosen at the first plan, and those without a mask do not take one later.
        assert (custom_mask is None) == (getattr(self, "mask", custom_mask) is None)
        self.mask, self.causal, self.window_left = custom_mask, causal, window_left
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.softcap, self.dtypes = logits_soft_cap or 0.0, (q_data_type, kv_data_type)

    def run(self, q, kv, *, return_lse):
        assert return_lse and (q.dtype, kv[0].dtype) == self.dtypes and q.is_contiguous()
        assert kv[0].shape[1:] == (self.heads[1], self.page_size, self.heads[2])
        assert (len(q), *q.shape[1:]) == (self.bounds[0][-1], self.heads[0], self.heads[2])
        out = q.new_zeros(*q.shape[:2], kv[1].shape[-1])
        lse = torch.zeros(q.shape[:2])
        at = 0
        for b in range(len(self.bounds[3])):
            (q0, q1), (p0, p1) = (self.bounds[i][b : b + 2] for i in (0, 1))
            kv_len, qo_len = (p1 - p0 - 1) * self.page_size + self.bounds[3][b], q1 - q0
            for i in range(qo_len):
                seen = torch.arange(kv_len)
                if self.mask is not None:
                    seen = seen[self.mask[at + i * kv_len : at + (i + 1) * kv_len]]
                elif self.causal:
                    seen = seen[seen <= kv_len - qo_len + i]
                if self.window_left >= 0:
                    seen = seen[seen + qo_len + self.window_left >= kv_len + i]
                pages = torch.tensor(self.bounds[2])[p0 + seen // self.page_size]
                for head in range(self.heads[0]):
                    of = head * self.heads[1] // self.heads[0]
                    key = kv[0][pages, of, seen % self.page_size]
                    scores = (key @ q[q0 + i, head]).float() * self.scale
                    if self.softcap:
                        scores = self.softcap * torch.tanh(scores / self.softcap)
                    if len(seen):
                        value = kv[1][pages, of, seen % self.page_size]
                        out[q0 + i, head] = scores.softmax(0).to(value.dtype) @ value
                    lse[q0 + i, head] = scores.logsumexp(0) / math.log(2)
            at += kv_len * qo_len
        return out, lse


def merge_state_in_place(v, s, v_other, s_other):
    own, other = (2.0 ** (x - torch.maximum(s, s_other)) for x in (s, s_other))
    total = own + other
    v.copy_((v * own.unsqueeze(-1) + v_other * other.unsqueeze(-1)) / total.unsqueeze(-1))
    s.copy_(torch.maximum(s, s_other) + total.log2())


@pytest.fixture
def flashinfer(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    module.merge_state_in_place = merge_state_in_place
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(paged, "WORKSPACE", 16)
    return module


class Rows:
    """Rows in a page table, with K/V in pools and in plain lists."""

    def __init__(self, rng: np.random.Generator, heads: int, head_dim: int) -> None:
        self.rng = rng
        self.table = PageTable()
        self.pools = [Pool(torch.zeros(heads, 1, head_dim)) for _ in range(2)]
        self.rows: list[list[torch.Tensor]] = []  # [2, heads, head_dim] for each token
        self.shape = (2, heads, head_dim)

    def new(self, n: int) -> list[torch.Tensor]:
        return list(torch.from_numpy(self.rng.normal(size=(n, *self.shape))).float())

    def write(self, slots: np.ndarray, tokens: list[torch.Tensor]) -> None:
        for which, pool in enumerate(self.pools):
            pool.reserve(self.table.capacity)
            if tokens:
                values = torch.stack([t[which] for t in tokens], dim=1)
                pool.write(torch.from_numpy(slots), values)

    def prompt(self, length: int, rows: int) -> None:
        number = self.table.add_prompt(length, rows)
        tokens = self.new(length)
        self.write(self.table.prompt_start(number) + np.arange(length), tokens)
        self.rows += [list(tokens) for _ in range(rows)]

    def extend(self, counts: np.ndarray) -> None:
        extension = self.table.extend(counts)
        new = [self.new(int(n)) for n in counts]
        for pool in self.pools:
            pool.reserve(self.table.capacity)
            if len(extension.copied):
                pool.copy_pages(torch.from_numpy(extension.copied))
        self.write(extension.slots, [t for row in new for t in row])
        self.rows = [[*row, *more] for row, more in zip(self.rows, new, strict=True)]

    def reorder(self, index: np.ndarray) -> None:
        self.table.reorder(index)
        self.rows = [list(self.rows[i]) for i in index]

    def attended(self, query: torch.Tensor, counts: np.ndarray, style: Style) -> torch.Tensor:
        """`[R, L, Hq, D]`, query by query, each over its own row's list."""
        n_rows, n_heads, width, head_dim = query.shape
        out = torch.zeros(n_rows, width, n_heads, head_dim)
        scale = style.scaling or head_dim**-0.5
        for r, row in enumerate(self.rows):
            for j in range(int(counts[r])):
                at = len(row) - int(counts[r]) + j
                first = 0 if style.sliding is None else max(0, at - style.sliding + 1)
                seen = torch.stack(row[first : at + 1])  # [tokens, 2, heads, D]
                for h in range(n_heads):
                    of = h * self.shape[1] // n_heads
                    scores = seen[:, 0, of] @ query[r, h, j] * scale
                    if style.softcap is not None:
                        scores = style.softcap * torch.tanh(scores / style.softcap)
                    if style.sinks is not None:
                        scores = torch.cat([scores, style.sinks[h : h + 1]])
                    weights = scores.softmax(0)[: len(seen)]
                    out[r, j, h] = weights @ seen[:, 1, of]
        return out


STYLES = {
    "plain": Style(),
    "scaled": Style(scaling=0.3),
    "sliding": Style(sliding=7),
    "sliding far": Style(sliding=25),
    "softcap": Style(softcap=0.8),
    "sinks": Style(sinks=torch.tensor([0.3, -1.0, 2.0, 0.0])),
    "all": Style(0.4, 19, 1.1, torch.tensor([0.1, 1.0, -2.0, 0.5])),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["torch", "flashinfer"])
def test_every_query_sees_the_tokens_of_its_own_row(style, kind, flashinfer):
    attention = TorchLevels() if kind == "torch" else FlashInferLevels()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = Rows(rng, heads=2, head_dim=8)
        for length in ((20, 0, 33), (16, 5), (0,))[seed]:
            rows.prompt(length, int(rng.integers(1, 4)))
        for step in range(4):
            n_rows, width = len(rows.rows), int(rng.integers(1, 6))
            counts = rng.integers(step % 2, width + 1, n_rows)
            counts[rng.integers(n_rows)] = width
            rows.extend(counts)
            query = torch.from_numpy(rng.normal(size=(n_rows, 4, width, 8))).float()
            plan = plan_cascade(rows.table, counts, width)
            found = attention.attend(plan, query, *rows.pools, STYLES[style])
            expected = rows.attended(query, counts, STYLES[style])
            assert torch.allclose(found, expected, atol=1e-5), (seed, step)
            # Resampled within each prompt, and rows that leave or are doubled.
            prompts = rows.table.prompt
            order = [
                int(rng.choice(np.flatnonzero(prompts == p)))
                for p in np.sort(rng.choice(prompts, n_rows))
            ]
            rows.reorder(np.array(order))
            if step == 2:
                rows.prompt(int(rng.integers(0, 20)), 2)


def test_a_prompt_is_one_segment_for_its_rows_and_a_tail_is_one_of_its_own():
    table = PageTable()
    table.add_prompt(PAGE + 3, 3)
    table.add_prompt(2 * PAGE, 1)
    counts = np.array([2, 0, 1, 2])
    table.extend(counts)
    plan = plan_cascade(table, counts, 2)
    assert plan.chosen is not None and plan.chosen.tolist() == [0, 1, 4, 6, 7]
    assert plan.prompts is not None and plan.prompts.queries is None
    assert plan.prompts.qo_indptr.tolist() == [0, 3, 5]
    assert plan.prompts.indptr.tolist() == [0, 2, 4]
    assert plan.prompts.indices.tolist() == [0, 1, 2, 3]
    assert plan.prompts.last_page_len.tolist() == [3, PAGE]
    assert plan.tails.qo_indptr.tolist() == [0, 2, 3, 5]
    assert plan.tails.kv_lengths.tolist() == [2, 1, 2]
    assert plan.positions.tolist() == [PAGE + 3, PAGE + 4, PAGE + 3, 2 * PAGE, 2 * PAGE + 1]


def test_rows_without_a_prompt_ask_nothing_of_that_level():
    table = PageTable()
    table.add_prompt(0, 1)
    table.add_prompt(4, 1)
    counts = np.array([2, 1])
    table.extend(counts)
    plan = plan_cascade(table, counts, 2)
    assert plan.prompts is not None and plan.prompts.queries is not None
    assert plan.prompts.queries.tolist() == [2]
    table.reorder(np.array([0]))
    table.extend(np.array([1]))
    assert plan_cascade(table, np.array([1]), 1).prompts is None


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("kind", ["torch", "flashinfer"])
def test_logits_by_pages_are_those_of_a_plain_forward_pass(name, kind, flashinfer):
    lm = build(name)
    lm.attention = TorchLevels if kind == "torch" else FlashInferLevels
    session = lm.start_session()
    assert session.attention == lm.attention.name
    session.prefill(PROMPTS, COPIES)
    rows = [list(p) for p, n in zip(PROMPTS, COPIES, strict=True) for _ in range(n)]
    generator = torch.Generator().manual_seed(1)
    for step, order in enumerate(([1, 1, 2, 3, 4, 5, 6, 7], [0, 3, 4, 6, 7], [0, 1, 1, 2, 3, 4])):
        tokens = torch.randint(0, V - 1, (len(rows), 3), generator=generator)
        counts = torch.randint(1, 4, (len(rows),), generator=generator)
        logits = session.extend(tokens, counts, last_only=step == 1)
        for r, row in enumerate(rows):
            row += tokens[r, : int(counts[r])].tolist()
            expected = plain_logits(lm, row)[-1]
            found = logits[r] if step == 1 else logits[r, int(counts[r]) - 1]
            assert torch.allclose(found, expected, atol=2e-4), (step, r)
        session.reorder(torch.tensor(order))
        rows = [list(rows[i]) for i in order]
    assert all(store.keys.shape[0] == 0 for store in session.cache.stores)  # no windows


def test_generation_by_pages_gives_the_same_texts(flashinfer):
    results = {}
    for kind in (None, TorchLevels, FlashInferLevels):
        model, draft = build("mistral with a window"), build("llama")
        model.attention = draft.attention = kind
        lm = guided_smc.LM(model, draft=draft, encoder=Ids())
        prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9], [10, 11]]
        results[kind] = lm.generate(prompts, n_particles=4, max_tokens=12, seed=0, block_size=3)
    names = [results[kind][0].usage.attention for kind in results]
    assert names == ["torch", TorchLevels.name, "flashinfer"]
    for kind in (TorchLevels, FlashInferLevels):
        for found, expected in zip(results[kind], results[None], strict=True):
            assert [p.token_ids for p in found.particles] == [
                p.token_ids for p in expected.particles
            ]
            assert found.log_evidence == pytest.approx(expected.log_evidence, abs=1e-3)


CUDA = torch.device("cuda:0")


def config(**changes):
    return transformers.LlamaConfig(**{**SMALL, "head_dim": 64, **changes})


def test_on_the_cpu_torch_attends_and_nothing_is_said():
    assert paged_attention(torch.device("cpu"), torch.float32, config()) is None
    assert build("llama").notes == ()


def test_why_flashinfer_does_not_serve_is_said(flashinfer, monkeypatch):
    bfloat16 = torch.bfloat16
    assert "float32: use bfloat16" in paged_attention(CUDA, torch.float32, config())
    assert "this model's have 8" in paged_attention(CUDA, bfloat16, config(head_dim=8))
    latent = config()
    latent.v_head_dim = 32
    assert "have 64 and 32" in paged_attention(CUDA, bfloat16, latent)
    # There is no such device here, so that trying it out fails, as it would without a compiler.
    assert "fails on this machine" in paged_attention(CUDA, bfloat16, config())
    monkeypatch.setattr(paged, "_try_out", lambda *args: None)
    assert paged_attention(CUDA, bfloat16, config()) is FlashInferLevels
    monkeypatch.setattr(paged.importlib.util, "find_spec", lambda name: None)
    assert "not installed: pip install" in paged_attention(CUDA, bfloat16, config())


def test_flashinfer_is_tried_out_before_it_is_chosen(flashinfer, monkeypatch):
    cpu = torch.device("cpu")
    paged._try_out(cpu, torch.float32, 64)
    monkeypatch.setattr(Wrapper, "run", lambda self, q, kv, return_lse: (q * 0, q[..., 0]))
    with pytest.raises(RuntimeError, match="gave 0"):
        paged._try_out(cpu, torch.float32, 64)


def test_the_result_tells_of_the_fall_back():
    model = build("llama")
    model.notes = ("llama: attention runs in torch, which is slower; FlashInfer is not installed",)
    result = guided_smc.LM(model, encoder=Ids()).generate([1, 2], max_tokens=2, seed=0)
    assert result.usage.attention == "torch"
    assert result.warnings[0] == model.notes[0]
