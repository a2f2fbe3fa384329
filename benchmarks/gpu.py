"""Speed on a CUDA card, at the shapes of Llama 3.1-8B with 3.2-1B as its draft.

    python benchmarks/gpu.py

Needs this repository, torch, transformers and Triton, and no weights: they are random, since what
a step computes does not depend on their values. So that the draft agrees with the target as a real
one does, the heads of both are scaled: each gives logits with the standard deviation `SPREAD / √2`,
so `log p − log q` of a drafted token has `SPREAD`, and what came of it is in the results as
`draft_variance`. Texts hardly ever end, and every step has all of its rows.

What is timed is a step of the engine, prefill and recording left out: a text grows by K + 1 tokens
in it. Steps follow each other as in a run, where the next one has begun when one is told of, so
nothing waits for the card between them. `transformers.generate` is timed likewise, by what more
tokens take longer. The roofline is what reading weights and K/V takes at the bandwidth that a copy
reaches, or the arithmetic at the speed of a large product, whichever is longer, for each pass of
the step.

`--quick` runs every line of this on tiny shapes, also without a card.
"""

from __future__ import annotations

import gc
import re
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import click
import torch
from gpu_kernels import kernel_table, measure_kernels
from harness import RESULTS, machine, report, spread
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

import guided_smc
from guided_smc import LM, Vocabulary
from guided_smc.engine import Engine
from guided_smc.models.transformers import TransformersModel
from guided_smc.options import StepOn

SPREAD = 0.45
"""Standard deviation of log p − log q per drafted token, as of a 135M model and its int8 twin."""

PROMPT = 260
"""Tokens. With all that is timed behind it, windows stay in one bucket of columns."""

WARM_UP = 4
STEPS = 12
NO_CARD = (
    "There is no card: in the kernels' places their references ran, and no graph was recorded. "
    "This shows that the lines run, and says nothing of speed or of errors."
)

LIMIT_S = 420
"""When it is over, what is left is left out."""

PEERS_S = 150
"""The same of transformers, which compiles for each number of rows."""

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PATTERN = "[a-z ]*"
"""Its masks are tables on the device; those of the schema are made by the host."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    particles: int
    block_size: int
    constraint: str = "free"
    step_on: StepOn = "graphs"

    @property
    def name(self) -> str:
        """As the table shows it."""
        of = [f"N={self.particles} K={self.block_size}"]
        of += [self.constraint] if self.constraint != "free" else []
        of += [self.step_on] if self.step_on != "graphs" else []
        return " ".join(of)


def shape(**changes: Any) -> LlamaConfig:
    settings = dict(
        vocab_size=128_256,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaConfig(**{**settings, **changes})


def shapes(quick: bool) -> tuple[LlamaConfig, LlamaConfig]:
    """The target's and the draft's."""
    if quick:
        tiny = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=515)
        return (
            shape(**tiny, num_hidden_layers=3, num_key_value_heads=2),
            shape(**tiny, num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True),
        )
    return (
        shape(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        shape(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
        ),
    )


@click.command()
@click.option("--quick", is_flag=True, help="Tiny shapes, few steps: shows that it runs.")
@click.option("--only", metavar="PATTERN", help="Cases whose name this regular expression finds.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write.")
def main(quick: bool, only: str | None, out: Path | None) -> None:
    """Time steps, kernels and the roofline on this machine's card."""
    if not quick and not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA card here; --quick runs tiny shapes without one")
    started = time.perf_counter()
    found = machine()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limits = measure_limits(device, quick)
    target_config, draft_config = shapes(quick)
    target = build(target_config, device, dtype)
    left_out: list[str] = []

    def timed(what: str, measure: Callable[[], Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """What was measured, by its name; nothing if there was no time, or it failed."""
        if time.perf_counter() - started >= limit_s:
            left_out.append(f"{what} (no time)")
            return {}
        try:
            return {what: measure()}
        except Exception as error:  # one of many, and there may be no second try on a card
            left_out.append(f"{what} ({type(error).__name__}: {str(error).splitlines()[0]})")
            return {}
        finally:
            collect(device)

    # Before our own attention takes the module's place.
    peers = {}
    for n in (1,) if quick else (1, 8, 4, 12):
        name = f"transformers N={n}"
        if re.search(only or "", name):
            peers |= timed(name, partial(time_generate, target, n, quick), PEERS_S)
    torch.compiler.reset()
    collect(device)
    lm = together(target, build(draft_config, device, dtype), target_config.vocab_size)
    of_kernels = partial(
        measure_kernels, device, limits["bytes_per_s"], target_config.vocab_size, quick
    )
    kernels = timed("kernels", of_kernels).get("kernels", {})
    measured: dict[str, Any] = {}
    for case in cases(quick):
        if re.search(only or "", case.name):
            measured |= timed(case.name, partial(time_steps, lm, case, limits, quick))
    add_ratios(measured)
    results = {
        "benchmark": "gpu",
        "card": found.get("gpu", "none: this ran on a CPU"),
        "machine": found,
        "settings": {
            "quick": quick,
            "dtype": str(dtype).removeprefix("torch."),
            "target": sizes(lm.model),
            "draft": sizes(lm.draft),
            "spread": SPREAD,
            "prompt_tokens": PROMPT,
            "attention": lm.model.start_session().attention,
        },
        "without_a_card": NO_CARD if device.type != "cuda" else None,
        "limits": limits,
        "peers": peers,
        "cases": measured,
        "kernels": kernels,
        "left_out": left_out,
        "seconds": time.perf_counter() - started,
    }
    notes = ["Medians over steps, (lowest-highest). Rates are of one text, which grows by K + 1."]
    if device.type != "cuda":
        notes += [NO_CARD]
    notes += [f"Left out: {', '.join(left_out)}."] if left_out else []
    card = re.sub(r"[^a-z0-9]+", "-", str(results["card"]).lower()).strip("-")
    path = out or RESULTS / f"gpu-{card}.json"
    report(results, [case_table(measured, peers), kernel_table(kernels)], path, notes=notes)


def cases(quick: bool) -> Iterator[Case]:
    """What is timed, the most telling first."""
    if quick:
        yield from (Case(1, 0), Case(2, 0), Case(2, 2), Case(2, 2, "schema"), Case(2, 2, "regex"))
        yield from (Case(2, 2, step_on="device"), Case(2, 2, step_on="host"))
        return
    yield from (Case(1, 0), Case(8, 0), Case(8, 8), Case(8, 8, "schema"), Case(8, 8, "regex"))
    yield from (Case(8, 8, step_on="device"), Case(8, 8, step_on="host"))
    grid = [Case(n, k) for n in (1, 4, 8, 12) for k in (0, 4, 8, 12)]
    yield from (case for case in grid if (case.particles, case.block_size) not in GIVEN)
    yield from (replace(case, constraint="schema") for case in grid if case != Case(8, 8))


GIVEN = {(1, 0), (8, 0), (8, 8)}
"""Cases of the grid that come first."""


# -- models --------------------------------------------------------------------------------------


def build(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of this shape, made where it runs, whose logits have the spread that is asked for."""
    torch.manual_seed(config.num_hidden_layers)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tokens = torch.arange(1, 65, device=device).unsqueeze(0)
    with torch.inference_mode():
        deviation = float(model(input_ids=tokens).logits.float().std(dim=-1).mean())
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SPREAD / 2**0.5 / deviation)
    return model


class Ids:
    """Prompts are token ids already."""

    def encode(self, prompt: Any, *, chat: bool | None = None) -> list[int]:
        """The same."""
        return list(prompt)


def together(target: Any, draft: Any, width: int) -> LM:
    """Both, over a vocabulary of bytes and made-up words."""
    words = (
        "".join(letters).encode()
        for n in range(2, 6)
        for letters in product(string.ascii_lowercase, repeat=n)
    )
    tokens = [b"", *(bytes([i]) for i in range(256)), *islice(words, width - 257)]
    vocabulary = Vocabulary(tokens, eos_ids=[0])
    models = [
        TransformersModel(model, vocabulary, name=name)
        for model, name in ((target, "target"), (draft, "draft"))
    ]
    return LM(models[0], draft=models[1], encoder=Ids())


def sizes(model: Any) -> dict[str, int]:
    config = model.model.config
    return {
        "parameters": sum(p.numel() for p in model.model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
    }


# -- steps ---------------------------------------------------------------------------------------


def time_steps(lm: LM, case: Case, limits: dict[str, float], quick: bool) -> dict[str, Any]:
    """Seconds of the engine's steps, and what follows from them."""
    of = {
        "free": None,
        "schema": SCHEMA,
        "regex": guided_smc.regex(PATTERN),
    }
    request = lm.request(
        [1 + i % 200 for i in range(PROMPT)],
        output_type=of[case.constraint],
        n_particles=case.particles,
        block_size=case.block_size,
        max_tokens=2048,
        seed=0,
    )
    engine = Engine(lm.model, lm.draft, max_rows=case.particles, step_on=case.step_on)
    engine.add(request)
    start = time.perf_counter()
    list(engine.step())
    (population,) = engine._running
    for _ in range(0 if quick else WARM_UP - 1):
        list(engine.step())
    synchronise()
    warm_up = time.perf_counter() - start
    seconds, ess = [], []
    for _ in range(2 if quick else STEPS):
        start = time.perf_counter()
        event, *_ = engine.step()
        seconds.append(time.perf_counter() - start)
        ess.append(event.step.ess)
        if len(population.live) < case.particles:
            break  # a text has ended: another number of rows
    median = spread(seconds)["median"]
    bound = roofline(lm, case, limits)
    drafted = population.agreement.drafted
    return {
        "seconds_per_step": spread(seconds),
        "steps": len(seconds),
        "warm_up_seconds": warm_up,
        "tokens_per_s": (case.block_size + 1) / median,
        "particle_tokens_per_s": case.particles * (case.block_size + 1) / median,
        "roofline_seconds": bound,
        "share_of_roofline": bound / median,
        "mean_ess": sum(ess) / len(ess),
        "draft_variance": drafted.variance if drafted.observed else None,
        "steps_on": population.usage.steps_on,
        "all_steps": population.usage.target_passes,
        "steps_ahead": population.usage.steps_ahead,
        "steps_in_vain": population.usage.steps_in_vain,
        "host_seconds": population.usage.seconds,
    }


def roofline(lm: LM, case: Case, limits: dict[str, float]) -> float:
    """Seconds below which no step of this case can come on this machine."""
    n, k = case.particles, case.block_size
    written = (WARM_UP + STEPS // 2) * (k + 1)
    keys = PROMPT + n * written  # the prompt is read once for all

    def of_pass(model: Any, tokens: int) -> float:
        config = model.model.config
        embedding = model.model.get_input_embeddings().weight
        tied = config.tie_word_embeddings
        read = sum(p.numel() for p in model.model.parameters()) - (0 if tied else embedding.numel())
        width = embedding.element_size()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head * keys
        bytes_read = (read + kv) * width
        return max(bytes_read / limits["bytes_per_s"], 2 * read * tokens / limits["flops_per_s"])

    return k * of_pass(lm.draft, n) + of_pass(lm.model, n * (k + 1))


def add_ratios(measured: dict[str, Any]) -> None:
    """How much faster a text grows than without drafting, and what a constraint costs."""
    for name, each in measured.items():
        rate = each["tokens_per_s"]
        n = name.split()[0]
        for what, other in (
            ("over_own_autoregressive", "N=1 K=0"),
            ("over_same_particles_k_0", f"{n} K=0"),
            ("of_free", re.sub(" (schema|regex)$", "", name)),
        ):
            if other in measured and other != name:
                each[what] = rate / measured[other]["tokens_per_s"]


def time_generate(model: Any, n: int, quick: bool) -> dict[str, Any]:
    """What a token takes `generate` with a static cache, compiled as transformers does itself."""
    prompt = torch.tensor([[1 + i % 200 for i in range(PROMPT)]], device=model.device)
    few, many = (2, 4) if quick else (8, 40)

    def run(tokens: int) -> float:
        synchronise()
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_return_sequences=n,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=quick,
        )
        synchronise()
        return time.perf_counter() - start

    start = time.perf_counter()
    run(many), run(few)
    warm_up = time.perf_counter() - start
    rounds = [(run(many) - run(few)) / (many - few) for _ in range(1 if quick else 3)]
    # One round on tiny shapes may come out at nothing.
    per_token = max(spread(rounds)["median"], 1e-9)
    return {
        "seconds_per_token": spread(rounds),
        "tokens_per_s": 1 / per_token,
        "warm_up_seconds": warm_up,
    }


# -- the machine ---------------------------------------------------------------------------------


def measure_limits(device: torch.device, quick: bool) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and flops per second of a large product."""
    size = 2**20 if quick else 2**30
    here = torch.ones(size, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    side = 128 if quick else 8192
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(side, side, device=device, dtype=dtype)
    return {
        "bytes_per_s": 2 * size / best(lambda: there.copy_(here)),
        "flops_per_s": 2 * side**3 / best(lambda: a @ a),
    }


def best(run: Callable[[], Any], repeats: int = 10) -> float:
    """Seconds of the fastest of several calls."""
    found = []
    for _ in range(repeats + 1):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def collect(device: torch.device) -> None:
    """Free what the last case has recorded."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- the table -----------------------------------------------------------------------------------


COLUMNS = (
    *("", "ms a step", "tokens/s", "× N=1 K=0", "of free"),
    *("on", "ahead", "roofline ms", "share"),
)
"""Why steps were not recorded, where they were not, is in the JSON."""


def case_table(measured: dict[str, Any], peers: dict[str, Any]) -> Table:
    table = Table(title="Steps")
    for column in COLUMNS:
        table.add_column(column, justify="left" if not column else "right")
    for name, each in peers.items():
        table.add_row(name, milliseconds(each["seconds_per_token"]), f"{each['tokens_per_s']:.1f}")
    for name, each in measured.items():
        table.add_row(
            name,
            milliseconds(each["seconds_per_step"]),
            f"{each['tokens_per_s']:.1f}",
            ratio_of(each, "over_own_autoregressive"),
            ratio_of(each, "of_free"),
            ", ".join(where.split(":")[0] for where in each["steps_on"]) or "host",
            f"{each['steps_ahead']} of {each['all_steps']}",
            f"{1e3 * each['roofline_seconds']:.2f}",
            f"{each['share_of_roofline']:.0%}",
        )
    return table


def milliseconds(of: dict[str, float]) -> str:
    low, median, high = (f"{1e3 * of[x]:.2f}" for x in ("low", "median", "high"))
    return f"{median} ({low}-{high})"


def ratio_of(each: dict[str, Any], what: str) -> str:
    return f"{each[what]:.2f}" if what in each else ""


if __name__ == "__main__":
    main()
