"""A language model given as a table: exact, enumerable, and small.

It drives the same engine as a real model, so that a potential or a sampler can be tested against
the exact posterior, string by string.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from guided_smc.errors import ModelError, PromptError
from guided_smc.vocabulary import Vocabulary

Context = tuple[int, ...]


class TableModel:
    """A model whose next-token distribution is a function of all tokens before it.

    Args:
        probabilities: Maps a context (prompt and text so far, as ids) to `[V]` probabilities that
            sum to 1. Called once per context; the result is kept.
        vocabulary: Its tokens.
        name: For messages.
    """

    context_length = None

    def __init__(
        self,
        probabilities: Callable[[Context], Sequence[float] | np.ndarray],
        vocabulary: Vocabulary,
        *,
        name: str = "table",
    ) -> None:
        self.vocabulary = vocabulary
        self.name = name
        self._probabilities = probabilities
        self._rows: dict[Context, np.ndarray] = {}

    @classmethod
    def random(
        cls,
        vocabulary: Vocabulary,
        *,
        seed: int,
        concentration: float = 1.0,
        eos_probability: float | None = None,
    ) -> TableModel:
        """A model with Dirichlet-distributed rows, the same for the same seed.

        Args:
            vocabulary: Its tokens; padding gets probability 0.
            seed: Of the table.
            concentration: Of the symmetric Dirichlet; small is peaked.
            eos_probability: Total mass of the end tokens in every row (None: as it falls).
        """
        real = np.flatnonzero(vocabulary.real)
        eos = list(vocabulary.eos_ids)

        def row(context: Context) -> np.ndarray:
            digest = hashlib.blake2b(repr((seed, context)).encode(), digest_size=8).digest()
            rng = np.random.default_rng(int.from_bytes(digest, "big"))
            p = np.zeros(len(vocabulary))
            p[real] = rng.dirichlet(np.full(len(real), concentration))
            if eos_probability is not None:
                others = 1.0 - p[eos].sum()
                p[eos] *= eos_probability / p[eos].sum()
                rest = np.setdiff1d(real, eos)
                p[rest] *= (1.0 - eos_probability) / others
            return p

        return cls(row, vocabulary, name=f"random table {seed}")

    def probabilities(self, context: Sequence[int]) -> np.ndarray:
        """`p(· | context)`, float64 `[V]`.

        Raises:
            ModelError: The table's row is no distribution over the real tokens.
        """
        key = tuple(context)
        if key not in self._rows:
            row = np.asarray(self._probabilities(key), dtype=np.float64)
            if row.shape != (len(self.vocabulary),):
                raise ModelError(
                    f"{self.name}: row of context {key} has shape {row.shape}, "
                    f"expected ({len(self.vocabulary)},)"
                )
            if not (np.all(row >= 0) and np.isclose(row.sum(), 1.0)):
                raise ModelError(f"{self.name}: row of context {key} is no distribution: {row}")
            if np.any(row[~self.vocabulary.real] > 0):
                raise ModelError(f"{self.name}: row of context {key} gives mass to padded ids")
            self._rows[key] = row
        return self._rows[key]

    def encode(self, prompt: str | Sequence[int], *, chat: bool | None = None) -> list[int]:
        """Tokens of a prompt: longest match over the vocabulary's bytes, or ids as they are.

        An empty prompt is the end token, as for models without a token that begins a text.

        Raises:
            PromptError: The text cannot be spelt with the vocabulary; ids outside it; a chat asked
                for.
        """
        if chat:
            raise PromptError(f"{self.name} has no chat template")
        if not isinstance(prompt, str | list | tuple):
            raise PromptError(f"a prompt is a text or a list of token ids, got {prompt!r}")
        if not isinstance(prompt, str):
            ids = list(prompt)
            if any(not isinstance(i, int) or not 0 <= i < len(self.vocabulary) for i in ids):
                raise PromptError(f"prompt ids must be in 0..{len(self.vocabulary) - 1}: {ids}")
            return ids or [self.vocabulary.eos_ids[0]]
        left = prompt.encode()
        ids = []
        while left:
            fits = [i for i, t in enumerate(self.vocabulary.tokens) if t and left.startswith(t)]
            if not fits:
                raise PromptError(f"{self.name} has no token for {left!r}")
            ids.append(max(fits, key=lambda i: len(self.vocabulary.tokens[i] or b"")))
            left = left[len(self.vocabulary.tokens[ids[-1]] or b"") :]
        return ids or [self.vocabulary.eos_ids[0]]

    def continuation(self, text: str) -> list[int]:
        """Tokens of a text that goes on from a prompt, as `encode` spells it."""
        return self.encode(text) if text else []

    def enumerate(self, prompt: Sequence[int], max_tokens: int) -> dict[Context, float]:
        """`p(x | prompt)` of every finished text of at most `max_tokens` tokens.

        A text is given by its tokens without the end token; its probability includes the end
        token's (all end tokens together). What is missing to 1 is the mass of longer texts.
        """
        finished: dict[Context, float] = {}
        level: dict[Context, float] = {(): 1.0}
        eos = list(self.vocabulary.eos_ids)
        for length in range(max_tokens + 1):
            following: dict[Context, float] = {}
            for text, mass in level.items():
                row = self.probabilities((*prompt, *text))
                if (p_eos := float(row[eos].sum())) > 0:
                    finished[text] = mass * p_eos
                if length < max_tokens:
                    for v in np.flatnonzero(row):
                        if v not in self.vocabulary.eos_ids:
                            following[(*text, int(v))] = mass * float(row[v])
            level = following
        return finished

    def start_session(self) -> TableSession:
        """A session with no rows."""
        return TableSession(self)


class TableSession:
    """Rows of a table model: the tokens themselves are the cache."""

    kv_cache = "none"
    attention = ""
    reads_tokens = True

    def __init__(self, model: TableModel) -> None:
        self.model = model
        self.rows: list[Context] = []

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Append `copies[g]` rows holding prompt g."""
        for prompt, n in zip(prompts, copies, strict=True):
            self.rows += [tuple(prompt)] * n

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """Append tokens; logits are log-probabilities, −inf where the table has 0."""
        n_rows, width = tokens.shape
        probs = np.zeros((n_rows, width, len(self.model.vocabulary)))
        for r in range(n_rows):
            for j in range(int(counts[r])):
                self.rows[r] = (*self.rows[r], int(tokens[r, j]))
                probs[r, j] = self.model.probabilities(self.rows[r])
        if last_only:
            probs = probs[np.arange(n_rows), np.maximum(counts.numpy() - 1, 0)]
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(probs)).float()

    def reorder(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]`."""
        self.rows = [self.rows[i] for i in index.tolist()]
