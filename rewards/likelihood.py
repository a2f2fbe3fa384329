"""The likelihood of a text under a language model as a reward: experts, amateurs, other prompts.

`π ∝ p · (p'/p'')^β` is contrastive and expert decoding: `language_model(expert) −
language_model(amateur)`. A text grows by a few tokens at a time, so what a model has read of it is
kept, and only new tokens are read.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from guided_smc.errors import OptionError, TokenizerMismatchError
from guided_smc.models.base import LanguageModel, Session
from guided_smc.models.tokenization import check_same_tokenizer
from guided_smc.potentials import Completion
from guided_smc.rewards.base import Reward, as_number
from guided_smc.rewards.scoring import Cache, shorten
from guided_smc.rewards.texts import Settings, check_settings
from guided_smc.vocabulary import Vocabulary

if TYPE_CHECKING:
    from guided_smc.api import LM

_CHUNK = 32  # tokens of a row in one pass: logits are as wide as the vocabulary
_PROMPTS = 16  # whose texts are kept in a model's cache


def language_model(
    model: LM | str,
    *,
    prompt: str | Callable[[Any], Any] | None = None,
    weight: float = 1.0,
    per_token: bool = False,
    end: bool = True,
    chat: bool | None = None,
    **settings: Unpack[Settings],
) -> Reward:
    """The log-likelihood of a text under a language model: `R = log p'(x | prompt)`, in nats.

    If the model has the tokenizer of the one that generates, its own tokens are scored; else the
    text is cut into tokens anew.

    Args:
        model: From `guided_smc.load` (also the one that generates), or the name of one.
        prompt: Where the text goes on from: None for the prompt that it has; a text in its place;
            or a function of the one it has, to what `generate` would take.
        weight: A factor.
        per_token: Whether R is the mean over tokens instead of the sum.
        end: Whether that a finished text ends there counts as well. It does not where a text is as
            long as `max_tokens`, since it is cut there.
        chat: Whether a plain prompt is put into the model's chat template. None: if it has one.
        settings: See `Reward`. `on` is `"step"`.

    Raises:
        OptionError: An argument cannot be.
        ModelError: There is no such model, or it cannot be loaded.
    """
    check_settings("language_model", settings)
    if isinstance(model, str):
        # Not above: the interface imports rewards.
        from guided_smc.api import load

        model = load(model)
    if not hasattr(model, "model") or not hasattr(model, "encoder"):
        raise OptionError(
            f"language_model needs a model from guided_smc.load, or its name; got "
            f"{shorten(repr(model))}"
        )
    if prompt is not None and not isinstance(prompt, str) and not callable(prompt):
        raise OptionError(
            f"prompt must be a text, a function of the prompt, or None; got {shorten(repr(prompt))}"
        )
    factor = as_number(weight)
    if factor is None or not math.isfinite(factor):
        raise OptionError(f"weight must be a finite number, got {weight!r}")
    return Likelihood(
        model.model,
        model.encoder,
        prompt=prompt,
        weight=factor,
        per_token=per_token,
        end=end,
        chat=chat,
        **settings,
    )


class Likelihood(Reward):
    """See `language_model`."""

    natural_on = "step"
    deterministic = True

    def __init__(
        self,
        model: LanguageModel,
        encoder: Any,
        *,
        prompt: str | Callable[[Any], Any] | None,
        weight: float,
        per_token: bool,
        end: bool,
        chat: bool | None,
        **settings: Any,
    ) -> None:
        super().__init__(**{"name": f"language_model:{model.name}", **settings})
        self.model = model
        self.encoder = encoder
        self.prompt = prompt
        self.weight = weight
        self.per_token = per_token
        self.end = end
        self.chat = chat
        self._prompts: Cache[list[int]] = Cache(256)
        self._readers: OrderedDict[tuple[int, ...], PrefixReader] = OrderedDict()
        self._lock = threading.Lock()
        self._judged: tuple[Vocabulary, bool] | None = None

    def score(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`log p'` of finished texts."""
        return self._scores(completions, finished=True)

    def estimate(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`log p'` of the texts so far."""
        return self._scores(completions, finished=False)

    def cache_key(self, completion: Completion) -> Hashable:
        """The tokens, or the text where its tokens mean nothing to the model."""
        same = self._same_tokens(completion.vocabulary)
        read = completion.token_ids if same else completion.text
        return (repr(completion.prompt), read, _is_cut(completion))

    def _scores(self, completions: Sequence[Completion], *, finished: bool) -> list[float]:
        asked: dict[tuple[int, ...], list[int]] = {}
        texts: list[tuple[tuple[int, ...], bool]] = []
        for i, completion in enumerate(completions):
            prompt = tuple(self._prompt_ids(completion))
            ids = self._ids(completion)
            limit = self.model.context_length
            if limit is not None and len(prompt) + len(ids) > limit:
                what = (
                    f"has {len(prompt)} tokens of prompt and {len(ids)} of text to read, together "
                    f"over the context of {self.model.name!r}, {limit}"
                )
                raise self.error(what, [completion])
            asked.setdefault(prompt, []).append(i)
            texts.append((ids, finished and self.end and not _is_cut(completion)))
        values = [0.0] * len(completions)
        with self._lock:
            for prompt, members in asked.items():
                try:
                    found = self._reader(prompt).log_p([texts[i] for i in members])
                except BaseException as error:
                    # Rows that were left in the middle of a pass hold nobody knows what.
                    self._readers.pop(prompt, None)
                    if not isinstance(error, torch.OutOfMemoryError):
                        raise
                    what = (
                        f"ran out of memory with {len(members)} texts: use fewer particles, or "
                        'load the model elsewhere, load(name, device="cpu")'
                    )
                    raise self.error(what, [completions[i] for i in members]) from None
                for i, log_p in zip(members, found, strict=True):
                    ids, ends = texts[i]
                    n = max(1, len(ids) + ends) if self.per_token else 1
                    values[i] = self.weight * log_p / n if self.weight else 0.0
        return values

    def _reader(self, prompt: tuple[int, ...]) -> PrefixReader:
        if prompt not in self._readers:
            self._readers[prompt] = PrefixReader(self.model, prompt)
        self._readers.move_to_end(prompt)
        while len(self._readers) > _PROMPTS:
            self._readers.popitem(last=False)
        return self._readers[prompt]

    def _prompt_ids(self, completion: Completion) -> list[int]:
        key = repr(completion.prompt)
        known = self._prompts.get(key)
        if known is None:
            known = self._encode(completion)
            self._prompts.put(key, known)
        return known

    def _encode(self, completion: Completion) -> list[int]:
        prompt = completion.prompt
        if isinstance(self.prompt, str):
            prompt = self.prompt
        elif callable(self.prompt):
            prompt = self.prompt(prompt)
        is_ids = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], int)
        if is_ids and not self._same_tokens(completion.vocabulary):
            prompt = completion.vocabulary.decode(prompt)
        ids: list[int] = self.encoder.encode(prompt, chat=None if is_ids else self.chat)
        return ids

    def _ids(self, completion: Completion) -> tuple[int, ...]:
        if self._same_tokens(completion.vocabulary):
            return completion.token_ids
        return tuple(self.encoder.continuation(completion.text))

    def _same_tokens(self, vocabulary: Vocabulary) -> bool:
        """Whether the model has these tokens, under the same numbers."""
        if self._judged is None or self._judged[0] is not vocabulary:
            try:
                check_same_tokenizer(self.model.vocabulary, vocabulary)
            except TokenizerMismatchError:
                self._judged = (vocabulary, False)
            else:
                self._judged = (vocabulary, True)
        return self._judged[1]


def _is_cut(completion: Completion) -> bool:
    """Whether a text is as long as it may be."""
    n, most = len(completion.token_ids), completion.max_tokens
    return most is not None and n >= most


@dataclass
class _Row:
    """A row of a session.

    Attributes:
        ids: The text whose tokens have all been given a probability; the last of them is still to
            be fed.
        log_p: Of these.
        idle: Calls since it was last continued; None if it cannot be.
    """

    ids: tuple[int, ...]
    log_p: float
    idle: int | None = 0


class PrefixReader:
    """`log p` of texts that go on from one prompt.

    A row of K/V is kept for each text that was asked about in the last call but one, so that a text
    that grows costs its new tokens. A session that cannot extend its rows by different numbers of
    tokens is not kept.

    Args:
        model: The model.
        prompt: At least one token.
    """

    def __init__(self, model: LanguageModel, prompt: Sequence[int]) -> None:
        self.model = model
        self.prompt = tuple(prompt)
        self.fed = 0
        self._session: Session | None = None
        self._rows: list[_Row] = []

    def log_p(self, texts: Sequence[tuple[tuple[int, ...], bool]]) -> list[float]:
        """Of each text's tokens; with True, also of an end behind them.

        `fed` is raised by the number of tokens that the model was given for it.
        """
        found: dict[tuple[tuple[int, ...], bool], float] = {((), False): 0.0}
        wanted = [text for text in dict.fromkeys(texts) if text not in found]
        if wanted:
            rows = self._rows_for(wanted)
            for text, value in zip(wanted, self._read(rows, wanted), strict=True):
                found[text] = value
        return [found[text] for text in texts]

    def _rows_for(self, wanted: list[tuple[tuple[int, ...], bool]]) -> list[int]:
        """A row of the session for each text, that holds a beginning of it."""
        parents = [self._parent(ids) for ids, _ in wanted]
        kept = [p for p in parents if p is not None]
        idle = [
            i
            for i, row in enumerate(self._rows)
            if i not in set(kept) and row.idle is not None and row.idle < 1
        ]
        if kept or idle:
            assert self._session is not None
            self._session.reorder(torch.tensor([*kept, *idle]))
        else:
            self._session = self.model.start_session()
        old = self._rows
        self._rows = [_Row(old[i].ids, old[i].log_p) for i in kept]
        self._rows += [_Row(old[i].ids, old[i].log_p, (old[i].idle or 0) + 1) for i in idle]
        fresh = len(wanted) - len(kept)
        first_fresh = len(self._rows)
        if fresh:
            self._session.prefill([self.prompt[:-1]], [fresh])
            self.fed += len(self.prompt) - 1
            self._rows += [_Row((), 0.0) for _ in range(fresh)]
        held, new = iter(range(len(kept))), iter(range(first_fresh, len(self._rows)))
        return [next(new) if p is None else next(held) for p in parents]

    def _parent(self, ids: tuple[int, ...]) -> int | None:
        """The row with the longest beginning of a text."""
        best = None
        for i, row in enumerate(self._rows):
            fits = row.idle is not None and row.ids and ids[: len(row.ids)] == row.ids
            if fits and (best is None or len(row.ids) > len(self._rows[best].ids)):
                best = i
        return best

    def _read(self, rows: list[int], wanted: list[tuple[tuple[int, ...], bool]]) -> list[float]:
        """Feed what is new of each text to its row; log p of all of it."""
        session = self._session
        assert session is not None
        total = [0.0] * len(self._rows)
        feeds: list[tuple[int, ...]] = [()] * len(self._rows)
        targets: list[list[int | None]] = [[] for _ in self._rows]
        for r, (ids, ends) in zip(rows, wanted, strict=True):
            row = self._rows[r]
            done = len(row.ids)
            # What each fed token is followed by: the text's next token, or (None) its end.
            feeds[r] = (self.prompt[-1], *ids)[done : len(ids) + ends]
            targets[r] = [*ids[done:], *([None] if ends else [])]
            total[r] = row.log_p
            self._rows[r] = _Row(ids, 0.0, None if ends else 0)
        width = max(map(len, feeds))
        for start in range(0, width, _CHUNK):
            pieces = [feed[start : start + _CHUNK] for feed in feeds]
            counts = torch.tensor([len(piece) for piece in pieces])
            tokens = torch.zeros(len(pieces), int(counts.max()), dtype=torch.int64)
            for r, piece in enumerate(pieces):
                tokens[r, : len(piece)] = torch.tensor(piece)
            self.fed += int(counts.sum())
            logits = session.extend(tokens, counts, last_only=False)
            self._add(total, logits, [t[start : start + _CHUNK] for t in targets])
        for r in rows:
            self._rows[r].log_p = total[r]
        goes_on = any(row.idle is not None for row in self._rows)
        if session.kv_cache == "general" or not goes_on:
            self._session, self._rows = None, []
        return [total[r] for r in rows]

    def _add(
        self, total: list[float], logits: torch.Tensor, targets: list[list[int | None]]
    ) -> None:
        """Add the log-probabilities of targets under logits `[R, L, V]` to each row's total."""
        at = [(r, j) for r, row in enumerate(targets) for j in range(len(row))]
        r, j = (torch.tensor(x, device=logits.device) for x in zip(*at, strict=True))
        chosen = logits[r, j]  # [tokens, V]
        ends = list(self.model.vocabulary.eos_ids)
        end = chosen[:, ends].double().logsumexp(-1)
        ids = [targets[a][b] for a, b in at]
        index = torch.tensor([0 if i is None else i for i in ids], device=logits.device)
        of_token = chosen.gather(1, index[:, None])[:, 0].double()
        is_end = torch.tensor([i is None for i in ids], device=logits.device)
        log_p = torch.where(is_end, end, of_token) - chosen.double().logsumexp(-1)
        for (row, _), value in zip(at, log_p.tolist(), strict=True):
            total[row] += value
