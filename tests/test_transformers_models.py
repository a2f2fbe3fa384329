"""Sessions over transformers models agree with plain forward passes, for many architectures.

Tiny models with random weights; the prompts are ragged, rows are copied, dropped and reordered.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

import guided_smc
from guided_smc.models import particles
from guided_smc.models.budget import PAGE
from guided_smc.models.transformers import TransformersModel
from guided_smc.vocabulary import Vocabulary

V = 48
VOCABULARY = Vocabulary([bytes([65 + i]) for i in range(V - 1)] + [b""], eos_ids=[V - 1])
SMALL = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=V - 1,
    pad_token_id=0,
)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8),
    "mistral with a window": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma2 with softcap": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=5, query_pre_attn_scalar=8
    ),
    "gpt_oss with sinks": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=V, n_positions=128, n_embd=32, n_layer=3, n_head=4, eos_token_id=V - 1
    ),
    "bloom with alibi": lambda: transformers.BloomConfig(
        vocab_size=V, hidden_size=32, n_layer=3, n_head=4
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=V, hidden_size=32, state_size=8, num_hidden_layers=3
    ),
    "lfm2 hybrid": lambda: transformers.Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention", "conv"]
    ),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20], [], [30, 31, 32, 33]]
COPIES = [2, 3, 1, 2]


class Ids:
    """Prompts are token ids already."""

    def encode(self, prompt, *, chat=None):
        return list(prompt)


def build(name: str) -> TransformersModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    return TransformersModel(model, VOCABULARY, name=name)


@torch.no_grad()
def plain_logits(lm: TransformersModel, tokens: list[int]) -> torch.Tensor:
    """Logits `[T, V]` of a forward pass without a cache, with the model's own attention."""
    ours = lm.model.config._attn_implementation
    lm.model.set_attn_implementation(lm.own_attention)
    try:
        return lm.model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    finally:
        lm.model.set_attn_implementation(ours)


def same_counts(step: int, n: int) -> torch.Tensor:
    return torch.full((n,), 1 + step % 3)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("in_place", [1, particles.IN_PLACE], ids=["in place", "in windows"])
def test_logits_equal_those_of_a_plain_forward_pass(name, in_place, monkeypatch):
    monkeypatch.setattr(particles, "IN_PLACE", in_place)
    lm = build(name)
    if in_place == 1 and not lm.uses_particle_cache:
        pytest.skip("keeps no K/V by position")
    session = lm.start_session()
    session.prefill(PROMPTS, COPIES)
    rows = [list(p) for p, n in zip(PROMPTS, COPIES, strict=True) for _ in range(n)]
    generator = torch.Generator().manual_seed(1)
    orders = [
        [1, 1, 2, 3, 4, 5, 6, 7],  # a copy within a prompt
        [0, 1, 4, 2, 2, 5, 7, 6],
        [0, 3, 4, 6, 7],  # rows dropped, a prompt with them
        [0, 1, 1, 2, 3, 4],  # and one more particle
    ]
    for step in range(8):
        width = 3
        tokens = torch.randint(0, V - 1, (len(rows), width), generator=generator)
        if lm.uses_particle_cache:
            counts = torch.randint(1, width + 1, (len(rows),), generator=generator)
        else:
            counts = same_counts(step, len(rows))
        last_only = step % 2 == 0
        logits = session.extend(tokens, counts, last_only=last_only)
        for r, row in enumerate(rows):
            n = int(counts[r])
            before = len(row)
            row += tokens[r, :n].tolist()
            expected = plain_logits(lm, row)[before:]
            found = logits[r] if last_only else logits[r, :n]
            reference = expected[-1] if last_only else expected
            assert torch.allclose(found, reference, atol=2e-4), (name, step, r)
        if step % 2 == 1:
            order = orders[step // 2]
            session.reorder(torch.tensor(order))
            rows = [list(rows[i]) for i in order]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", True), ("gemma3", True), ("gpt2", True), ("mamba", False), ("lfm2 hybrid", False)],
)
def test_recurrent_layers_take_the_general_session(name, expected):
    assert build(name).uses_particle_cache is expected


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2 hybrid"])
def test_prompts_that_join_later_do_not_disturb_those_that_run(name):
    lm = build(name)
    session = lm.start_session()
    session.prefill([[1, 2, 3]], [2])
    one = torch.tensor([[4], [5]])
    session.extend(one, torch.tensor([1, 1]), last_only=True)
    session.prefill([[9] * 7, [8]], [1, 2])
    tokens = torch.tensor([[6], [7], [1], [2], [3]])
    logits = session.extend(tokens, torch.ones(5, dtype=torch.int64), last_only=True)
    rows = [[1, 2, 3, 4, 6], [1, 2, 3, 5, 7], [9] * 7 + [1], [8, 2], [8, 3]]
    for r, row in enumerate(rows):
        assert torch.allclose(logits[r], plain_logits(lm, row)[-1], atol=2e-4)


def test_equal_continuations_of_different_prompts_do_not_share_logits():
    lm = build("llama")
    session = lm.start_session()
    session.prefill([[1, 2, 3], [3, 2, 1]], [1, 1])
    logits = session.extend(torch.tensor([[7, 7]] * 2), torch.tensor([2, 2]), last_only=True)
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)
    for r, prompt in enumerate([[1, 2, 3], [3, 2, 1]]):
        assert torch.allclose(logits[r], plain_logits(lm, [*prompt, 7, 7])[-1], atol=2e-4)


def test_a_prompt_is_encoded_once_and_not_once_per_particle(monkeypatch):
    lm = build("llama")
    shapes = []
    forward = lm.forward

    def spy(tokens, *args, **kwargs):
        shapes.append(tuple(tokens.shape))
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr(lm, "forward", spy)
    session = lm.start_session()
    session.prefill([[1] * 9, [2] * 4], [8, 8])
    assert shapes == [(2, 9)]


def test_what_stands_behind_a_rows_count_leaves_no_trace():
    lm = build("llama")
    session = lm.start_session()
    session.prefill([[1, 2]], [2])
    session.extend(torch.tensor([[3, 40, 41], [3, 4, 5]]), torch.tensor([1, 3]), last_only=False)
    logits = session.extend(torch.tensor([[6], [6]]), torch.tensor([1, 1]), last_only=True)
    for r, row in enumerate([[1, 2, 3, 6], [1, 2, 3, 4, 5, 6]]):
        assert torch.allclose(logits[r], plain_logits(lm, row)[-1], atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_rows_of_a_prompt_of_one_token_can_be_copied(name):
    """Nothing is prefilled then: the engine holds the only token back."""
    lm = build(name)
    session = lm.start_session()
    session.prefill([[]], [2])
    session.extend(torch.tensor([[3], [4]]), torch.tensor([1, 1]), last_only=True)
    session.reorder(torch.tensor([1, 1, 1]))
    logits = session.extend(torch.tensor([[5], [6], [7]]), torch.tensor([1] * 3), last_only=True)
    for r, row in enumerate([[4, 5], [4, 6], [4, 7]]):
        assert torch.allclose(logits[r], plain_logits(lm, row)[-1], atol=2e-4)


@pytest.mark.parametrize(("name", "kind"), [("llama", "particle"), ("mamba", "general")])
def test_the_result_says_which_cache_served(name, kind):
    lm = guided_smc.LM(build(name), encoder=Ids())
    result = lm.generate([1, 2, 3], n_particles=2, max_tokens=3, seed=0)
    assert result.usage.kv_cache == kind


def test_particles_hold_a_long_prompt_once():
    lm = build("llama")
    held = {}
    for n in (1, 32):
        session = lm.start_session()
        session.prefill([[1] * 1000], [n])
        session.extend(torch.full((n, 1), 2), torch.ones(n, dtype=torch.int64), last_only=True)
        prompt = 1000 * 2 * 3 * 2 * 8 * 4  # keys and values, layers, heads, head_dim, bytes
        tails = n * (PAGE + 64) / 1000 * prompt  # a page, and a window's first columns
        held[n] = session.cache.nbytes - tails
    assert held[32] < 1.3 * held[1]


def test_long_runs_with_resampling_read_their_own_past():
    """Ragged prompts, some in place, over many resamplings and page borders."""
    lm = build("llama")
    session = lm.start_session()
    prompts, copies = [[3] * 60, [4, 5], [6] * 20], [20, 4, 3]
    session.prefill(prompts, copies)
    assert [in_place for _, *in_place in session._runs()] != []
    rows = [list(p) for p, n in zip(prompts, copies, strict=True) for _ in range(n)]
    first = [0, 20, 24, 27]
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        tokens = torch.randint(0, V - 1, (len(rows), 4), generator=generator)
        counts = torch.randint(1, 5, (len(rows),), generator=generator)
        logits = session.extend(tokens, counts, last_only=True)
        for r, row in enumerate(rows):
            row += tokens[r, : counts[r]].tolist()
        if step % 3 == 2:
            for r in range(0, len(rows), 5):
                assert torch.allclose(logits[r], plain_logits(lm, rows[r])[-1], atol=2e-4)
        order = torch.cat(
            [
                torch.randint(a, b, (b - a,), generator=generator).sort().values
                for a, b in itertools.pairwise(first)
            ]
        )
        session.reorder(order)
        session.table.check()
        rows = [list(rows[i]) for i in order.tolist()]
