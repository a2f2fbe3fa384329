"""Runs on an enumerable model, and what has to be true of them.

Tolerances are 4 standard errors of the mean over independent runs. Texts that are rarely hit have
a standard error that the runs themselves underestimate; theirs is bounded from below by that of a
hit-or-miss estimate with the largest value seen (`standard_error`).
"""

from __future__ import annotations

import math

import numpy as np
from support import VOCABULARY, Language, request, results, unnormalised

from guided_smc.engine import Engine
from guided_smc.models.table import TableModel

PROMPT = (0, 3)
TARGET = TableModel.random(VOCABULARY, seed=11, eos_probability=0.2)
DRAFT = TableModel.random(VOCABULARY, seed=22, eos_probability=0.3)


def member(text: str) -> bool:
    """A language that masking distorts: what is allowed early decides what remains late."""
    return text.count("a") % 2 == 0 and "cc" not in text and "ab" not in text and text != ""


def score(text: str) -> float:
    return 0.6 * text.count("b") - 0.4 * (text[:1] == "c")


LANGUAGE = Language(member, 4)


def standard_error(samples: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of the mean over runs, for each text: `[texts]` from samples `[runs, texts]`."""
    largest_hit = samples.max()
    floor = np.sqrt(expected * largest_hit)
    return np.maximum(samples.std(axis=0), floor) / math.sqrt(len(samples))


def assert_unbiased(found, expected) -> None:
    """Evidence and every text's unnormalised probability agree with enumeration."""
    estimates = [unnormalised(r) for r in found]
    texts = sorted(expected)
    strangers = {t for e in estimates for t in e} - set(texts)
    assert not strangers, f"texts outside the posterior's support: {strangers}"
    samples = np.array([[e.get(t, 0.0) for t in texts] for e in estimates])
    truth = np.array([expected[t] for t in texts])
    error = np.abs(samples.mean(axis=0) - truth) / standard_error(samples, truth)
    worst = int(error.argmax())
    assert error[worst] < 4, f"text {texts[worst]} is off by {error[worst]:.1f} standard errors"
    z = samples.sum(axis=1)
    z_error = abs(z.mean() - truth.sum()) / (z.std() / math.sqrt(len(z)) + 1e-9)
    assert z_error < 4, f"the evidence is off by {z_error:.1f} standard errors"


def runs(n_runs: int, *, engine=Engine, draft=DRAFT, target=TARGET, constraint=None, **options):
    """Independent runs of one request, under seeds 0, 1, 2, ..."""
    compiled = constraint.compile(target.vocabulary) if constraint else None
    requests = []
    for i in range(n_runs):
        r = request(target, PROMPT, index=i, seed=i, **{"max_tokens": 4, **options})
        r.constraint = compiled
        requests.append(r)
    e = engine(target, draft if requests[0].block_size else None, max_rows=10**6)
    for r in requests:
        e.add(r)
    events = []
    while e.busy:
        events += e.step()
    return results(events)
