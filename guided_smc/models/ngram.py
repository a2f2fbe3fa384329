"""A draft without a model: it copies from the prompt and from what was said before.

For text that repeats its source (extraction, code edits, summaries) copied continuations are often
what the target says, and they cost nothing. The distribution is proper and has no zeros: copied
continuations are mixed with a smoothed unigram, so that the weights stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from guided_smc.vocabulary import Vocabulary

LONGEST_MATCH = 4
"""Tokens of context that are looked up, at most."""

COPY = 0.75
"""Mass of the copied continuations, where the context has occurred before."""

SEEN = 0.5
"""Share of what is left that goes to the tokens seen so far; the rest is uniform."""


class NGramModel:
    """Proposes what followed the same tokens earlier.

    `q = COPY · q_copy + (1 − COPY) · (SEEN · q_seen + (1 − SEEN) · uniform)`, where `q_copy` is
    the empirical distribution of what followed the longest context (up to `LONGEST_MATCH` tokens)
    that has occurred before, and `q_seen` that of all tokens so far.

    Args:
        vocabulary: The target's.
    """

    context_length: int | None = None
    name: str = "n-gram"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._real = np.flatnonzero(vocabulary.real)

    def start_session(self) -> NGramSession:
        """A session with no rows."""
        return NGramSession(self)

    def probabilities(self, context: np.ndarray) -> np.ndarray:
        """`q(· | context)`, float64 `[V]`, of a context int64 `[T]`."""
        uniform = np.zeros(len(self.vocabulary))
        uniform[self._real] = 1.0 / len(self._real)
        if not len(context):
            return uniform
        seen = np.bincount(context, minlength=len(uniform)) / len(context)
        rest: np.ndarray = SEEN * seen + (1 - SEEN) * uniform
        followers = _followers(context)
        if not len(followers):
            return rest
        copied = np.bincount(followers, minlength=len(uniform)) / len(followers)
        mixed: np.ndarray = COPY * copied + (1 - COPY) * rest
        return mixed


def _followers(context: np.ndarray) -> np.ndarray:
    """What came after earlier occurrences of the longest recurring end of the context."""
    at = np.flatnonzero(context[:-1] == context[-1])
    for n in range(2, LONGEST_MATCH + 1):
        longer = at[at >= n - 1]
        longer = longer[context[longer - (n - 1)] == context[-n]] if len(context) >= n else at[:0]
        if not len(longer):
            break
        at = longer
    return context[at + 1]


class NGramSession:
    """Rows of tokens."""

    kv_cache = "none"
    attention = ""
    reads_tokens = True

    def __init__(self, model: NGramModel) -> None:
        self.model = model
        self.rows: list[np.ndarray] = []

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """Append `copies[g]` rows holding prompt g."""
        for prompt, n in zip(prompts, copies, strict=True):
            self.rows += [np.asarray(prompt, dtype=np.int64)] * n

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, *, last_only: bool
    ) -> torch.Tensor:
        """Append tokens; logits are log-probabilities, −inf for padding alone."""
        n_rows, width = tokens.shape
        probs = np.zeros((n_rows, 1 if last_only else width, len(self.model.vocabulary)))
        for r, (new, count) in enumerate(zip(tokens.numpy(), counts.tolist(), strict=True)):
            start = len(self.rows[r])
            self.rows[r] = np.concatenate([self.rows[r], new[:count]])
            for j in range(max(count - 1, 0) if last_only else 0, count):
                place = 0 if last_only else j
                probs[r, place] = self.model.probabilities(self.rows[r][: start + j + 1])
        with np.errstate(divide="ignore"):
            logits = torch.from_numpy(np.log(probs)).float()
        return logits[:, 0] if last_only else logits

    def reorder(self, index: torch.Tensor) -> None:
        """Row i becomes the old row `index[i]`."""
        self.rows = [self.rows[i] for i in index.tolist()]
