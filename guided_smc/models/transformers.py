"""Causal language models of transformers behind the session interface.

Two sessions, chosen by architecture:

- `ParticleSession`: prompts once, tails in pages, through transformers' attention and cache
  extension points. For models whose layers are full or sliding-window attention.
- `GroupSession`: a transformers cache of its own for each prompt. For every other architecture
  (recurrent and hybrid layers, attention that does not go through the interface).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from guided_smc.errors import ModelError
from guided_smc.models.base import Session
from guided_smc.models.budget import Budget
from guided_smc.models.groups import GroupSession
from guided_smc.models.linears import Packed, can_pack, replace_linears
from guided_smc.models.paged import PagedAttention, paged_attention
from guided_smc.models.particles import ATTENTION, ParticleSession
from guided_smc.models.traced import TracedPass
from guided_smc.vocabulary import Vocabulary


class TransformersModel:
    """A causal language model of transformers.

    Takes the module over: its attention becomes ours, and on the CPU its linears are packed.

    Args:
        model: A `PreTrainedModel` with a language-model head, in eval mode.
        vocabulary: Its tokens, as wide as its logits.
        name: For messages.
        pack: Whether linears on the CPU go into the layout that serves few rows at a time, which
            is twice as fast there and the same in the results but for rounding.
        split: Whether transformers has split it over several processes (see `parallel`). It is
            then left as it is: neither packed nor traced.
        max_total_tokens: The most tokens whose K/V a session holds at once, in whole pages; None:
            as many as memory allows.

    Raises:
        ModelError: The architecture takes no cache, or it has no pages to limit.
        OptionError: `max_total_tokens` is no such number.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        *,
        name: str,
        pack: bool = True,
        split: bool = False,
        max_total_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.name = name
        self.split = split
        config = model.config.get_text_config()
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        # The name has changed over transformers' versions and is another for recurrent models.
        names = [n for n in ("cache", "past_key_values", "cache_params") if n in parameters]
        if not names:
            raise ModelError(
                f"model {name!r} ({type(model).__name__}) takes no cache, so it cannot be "
                "continued token by token; use another model"
            )
        self._cache_argument = names[0]
        self._takes_positions = "position_ids" in parameters
        self.n_layers: int = config.num_hidden_layers
        self.uses_particle_cache = _particle_cache_serves(model)
        self.budget: Budget | None = None
        if max_total_tokens is not None:
            self.budget = Budget.of(max_total_tokens, name)
            if not self.uses_particle_cache:
                raise ModelError(
                    f"max_total_tokens limits pages of K/V, and {name!r} ({type(model).__name__}) "
                    "keeps a cache of its own for each prompt: leave it out"
                )
        self.own_attention = model.config._attn_implementation
        self._traced: TracedPass | None = None
        if self.uses_particle_cache:
            model.set_attn_implementation(ATTENTION)
            if self._takes_positions and not split:
                self._traced = TracedPass(model, self._call, self.n_layers)
        self.attention, self.notes = self._choose_attention()
        if pack and not split and can_pack(model):
            replace_linears(model, Packed)
            for rest in model.parameters():
                # What is left may be a view of a file that holds all of the weights.
                rest.data = rest.data.clone()

    def _choose_attention(self) -> tuple[type[PagedAttention] | None, tuple[str, ...]]:
        """What attends to pages, and what users should know if nothing does."""
        if not self.uses_particle_cache:
            return None, ()
        found = paged_attention(self.device, self.dtype, self.model.config.get_text_config())
        if isinstance(found, str):
            return None, (f"{self.name}: attention runs in torch, which is slower; {found}",)
        return found, ()

    def paged_attention(self) -> PagedAttention | None:
        """What attends to the pages of a session; None: torch does, to windows."""
        return None if self.attention is None else self.attention()

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def warm_up(self) -> None:
        """Do now what is otherwise done once the model has run for a while."""
        if self._traced is not None:
            with torch.inference_mode():
                self._traced.prepare(self.device)

    def start_session(self) -> Session:
        """A session with no rows."""
        return ParticleSession(self) if self.uses_particle_cache else GroupSession(self)

    def with_module(self, module: Any, *, name: str) -> TransformersModel:
        """The same, over another module of the same architecture and shapes."""
        other = copy.copy(self)
        other.model, other.name = module, name
        if other._traced is not None:
            other._traced = TracedPass(module, other._call, other.n_layers)
        return other

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        cache: Any,
        *,
        positions: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        """Logits `[R, kept, V]` in float32.

        Args:
            tokens: int64 `[R, L]`.
            cache: What the architecture's layers read and write.
            positions: int64 `[R, L]`, or None where the cache tells.
            logits_to_keep: Number of last positions to give logits for; 0 is all; or, for all rows
                alike, the indices of the positions.
        """
        tokens = tokens.to(self.device)
        if positions is not None:
            positions = positions.to(self.device)
        if self._traced is not None and positions is not None:
            return self._traced(tokens, positions, logits_to_keep, cache).float()
        return self._call(tokens, positions, logits_to_keep, cache).float()

    def run_module(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits `[R, L, V]` in the module's dtype, of tensors that are where the module is; with
        nothing traced or copied on the way, so that a graph can be made of it.
        """
        return self._call(tokens, positions, 0, cache)

    @property
    def logit_width(self) -> int:
        """Logits per position."""
        width: int = self.model.config.get_text_config().vocab_size
        return width

    def _call(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """The module itself."""
        inputs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if positions is not None and self._takes_positions:
            inputs["position_ids"] = positions
        output = self.model(input_ids=tokens, logits_to_keep=logits_to_keep, **inputs)
        logits: torch.Tensor = output.logits
        return logits


def _particle_cache_serves(model: Any) -> bool:
    """Whether every layer is full or sliding-window attention that takes its function from the
    attention interface.
    """
    config = model.config.get_text_config()
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"]
    if set(kinds) - {"full_attention", "sliding_attention"}:
        return False
    if not getattr(model, "_supports_attention_backend", False):
        return False
    # Recurrent state, cross-attention or a chunked window need more than K/V by position.
    unlike = ("is_encoder_decoder", "attention_chunk_size", "mamba_d_state", "num_kv_shared_layers")
    return not any(getattr(config, name, None) for name in unlike)
