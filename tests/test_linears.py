"""Linears in other forms, and passes as graphs, give what the module gives."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from test_transformers_models import V, build, plain_logits

from guided_smc.models import particles, traced
from guided_smc.models.linears import Alone, Int8, Member, Packed, can_pack, replace_linears


class Attention(torch.nn.Module):
    """Three linears, of which one may be given another input than the others."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(12, 8, bias=bias)
        self.k_proj = torch.nn.Linear(12, 4, bias=bias)
        self.v_proj = torch.nn.Linear(12, 4, bias=bias)
        self.out = torch.nn.Linear(16, 12, bias=not bias)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(x)], dim=-1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("same", [False, True], ids=["another input", "one input"])
@torch.no_grad()
def test_packed_linears_give_what_the_dense_ones_give(bias, dtype, same):
    torch.manual_seed(0)
    module = Attention(bias).to(dtype)
    if dtype == torch.bfloat16 and not can_pack(module):
        assert not torch.cpu._is_avx512_supported()
        pytest.skip("a CPU without AVX-512 packs no bfloat16")
    assert can_pack(module)
    weights = {name: module.get_submodule(name).weight.clone() for name in ("k_proj", "out")}
    xs = [torch.randn(*shape, 12, dtype=dtype) for shape in ((1,), (3, 5))]
    expected = [module(x, x if same else -x) for x in xs]
    replace_linears(module, Packed)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for x, y in zip(xs, expected, strict=True):
        assert torch.allclose(module(x, x if same else -x), y, atol=tolerance)
    for name, weight in weights.items():
        assert torch.equal(module.get_submodule(name).weight, weight)
        assert (module.get_submodule(name).bias is None) == (name == "k_proj" and not bias) or (
            name == "out" and bias
        )


@torch.no_grad()
def test_packed_linears_can_be_quantised():
    torch.manual_seed(0)
    module = Attention(True)
    x = torch.randn(4, 12)
    expected = module(x, x)
    replace_linears(module, Packed)
    replace_linears(module, Int8)
    assert not any(isinstance(m, Packed) for m in module.modules())
    assert torch.allclose(module(x, x), expected, atol=0.05 * expected.abs().max().item())


def test_a_model_that_is_taken_over_has_packed_linears():
    lm = build("llama")
    kinds = {type(m) for m in lm.model.modules()}
    assert {Packed, Alone, Member} <= kinds and torch.nn.Linear not in kinds


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral with a window", "gpt2"])
def test_a_graph_takes_over_and_gives_bit_for_bit_the_same(name, monkeypatch):
    found = []
    for after in (2, 10**9):
        monkeypatch.setattr(traced, "AFTER", after)
        lm = build(name)
        session = lm.start_session()
        session.prefill([[1, 2, 3, 4], [5]], [2, 1])
        generator = torch.Generator().manual_seed(0)
        logits = []
        for step in range(6):
            width = 1 + step % 3
            tokens = torch.randint(0, V - 1, (3, width), generator=generator)
            counts = torch.full((3,), width)
            logits.append(session.extend(tokens, counts, last_only=step % 2 == 0))
            session.reorder(torch.tensor([1, 1, 2]))
        assert (lm._traced._graph is not None) == (after == 2)
        found.append(logits)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_module_whose_path_depends_on_its_input_is_not_traced(monkeypatch):
    monkeypatch.setattr(traced, "AFTER", 2)
    lm = build("llama")
    forward = lm.model.forward

    def branching(*args, **kwargs):
        output = forward(*args, **kwargs)
        if output.logits[0, -1, 0] > -1e9:
            output.logits = output.logits + 1.0
        return output

    monkeypatch.setattr(lm.model, "forward", branching)
    session = lm.start_session()
    session.prefill([[1, 2]], [1])
    for token in (3, 4, 5):
        logits = session.extend(torch.tensor([[token]]), torch.tensor([1]), last_only=True)
    assert lm._traced._graph is None
    monkeypatch.undo()
    expected = plain_logits(lm, [1, 2, 3, 4, 5])[-1] + 1.0
    assert torch.allclose(logits[0], expected, atol=2e-4)


def test_an_interrupt_within_a_graph_comes_as_itself_after_the_pass(monkeypatch):
    monkeypatch.setattr(traced, "AFTER", 1)
    lm = build("llama")
    lm._traced.prepare(torch.device("cpu"))
    assert lm._traced._graph is not None
    session = lm.start_session()
    session.prefill([[1, 2]], [1])
    attend = particles.ParticleCache.attend

    def interrupted(self, layer, *rest):
        if layer == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return attend(self, layer, *rest)

    monkeypatch.setattr(particles.ParticleCache, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.extend(torch.tensor([[3]]), torch.tensor([1]), last_only=True)
