"""The int8 twin: close to its target, reading its cache, and leaving no trace in it."""

from __future__ import annotations

import math

import pytest
import torch
from test_transformers_models import Ids, V, build, plain_logits

from guided_smc import LM, ModelError, TableModel
from guided_smc.models.int8 import Int8Twin
from guided_smc.models.linears import Int8, replace_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_quantised_linear_is_close_to_the_float_one(rows, dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, dtype=dtype)
    x = torch.randn(rows, 2, 64, dtype=dtype)
    found = Int8(linear.weight.detach(), linear.bias.detach())(x)
    error = (found - linear(x)).abs().max() / linear(x).abs().max()
    assert error < 0.03


def test_siblings_with_one_input_are_one_product_with_the_same_results():
    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = torch.nn.Linear(32, 24, bias=False)
            self.up_proj = torch.nn.Linear(32, 24, bias=False)
            self.other = torch.nn.Linear(24, 8)

        def forward(self, x):
            return self.other(self.gate_proj(x) * self.up_proj(x))

    block = Block()
    x = torch.randn(5, 32)
    expected = block(x)
    replace_linears(block, Int8)
    products = [m for m in block.modules() if isinstance(m, Int8)]
    assert len(products) == 2
    assert torch.allclose(block(x), expected, atol=0.05 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral with a window", "gpt2"])
def test_the_twin_drafts_close_to_its_target_and_leaves_no_trace(name):
    lm = build(name)
    twin = Int8Twin(lm)
    target = lm.start_session()
    target.prefill([[1, 2, 3, 4, 5], [9]], [2, 1])
    session = twin.follow(target)
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [9]]
    one = torch.ones(3, dtype=torch.int64)
    for block in range(2):
        session.begin_block()
        drafted = torch.randint(0, V - 1, (3, 3), generator=torch.Generator().manual_seed(block))
        for k in range(3):
            logits = session.extend(drafted[:, k : k + 1], one, last_only=True)
            for r, row in enumerate(rows):
                expected = plain_logits(lm, [*row, *drafted[r, : k + 1].tolist()])[-1]
                distance = 0.5 * (logits[r].softmax(-1) - expected.softmax(-1)).abs().sum()
                assert distance < 0.1
        other = torch.full((3, 3), 7)
        exact = target.extend(other, 3 * one, last_only=True)
        rows = [[*row, 7, 7, 7] for row in rows]
        for r, row in enumerate(rows):
            assert torch.allclose(exact[r], plain_logits(lm, row)[-1], atol=2e-4)


def test_weights_are_those_of_what_was_really_sampled():
    """With the twin as draft, log p of each particle is the target's own."""
    model = build("llama")
    lm = LM(model, draft=Int8Twin(model), encoder=Ids())
    prompt = [3, 1, 4, 1, 5]
    result = lm.generate(prompt, block_size=3, n_particles=6, max_tokens=11, seed=0)
    assert result.usage.draft_passes > 0
    for p in result.particles:
        ids = [*prompt, *p.token_ids]
        log_probs = plain_logits(model, ids).log_softmax(-1)
        at = range(len(prompt) - 1, len(ids) - 1)
        log_p = sum(float(log_probs[i, ids[i + 1]]) for i in at)
        if p.finish_reason == "stop":
            log_p += float(log_probs[len(ids) - 1, V - 1])
        assert p.log_p == pytest.approx(log_p, abs=1e-3)
    assert any(abs(p.log_weight) > 1e-6 for p in result.particles)
    assert math.isfinite(result.log_evidence)


def test_a_target_that_keeps_other_state_has_no_twin():
    with pytest.raises(ModelError, match="second model"):
        Int8Twin(build("mamba"))


def test_the_twin_shares_what_is_not_quantised():
    model = build("llama")
    twin = Int8Twin(model)
    embedding = model.model.get_input_embeddings().weight
    assert twin.model.model.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()


def test_the_twin_is_a_draft_for_its_own_target_alone():
    model = build("llama")
    with pytest.raises(ModelError, match="own target"):
        Int8Twin(model).start_session()
    assert not hasattr(TableModel, "follow")
