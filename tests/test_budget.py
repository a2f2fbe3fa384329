"""With a budget of pages, requests wait and nothing fails; what never fits is refused at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from test_transformers_models import VOCABULARY, Ids, build

import guided_smc
from guided_smc.cli.main import cli
from guided_smc.cli.reading import PromptSource
from guided_smc.cli.sampling import refuse_no_room
from guided_smc.engine import Engine
from guided_smc.errors import ModelError, OptionError, OutOfPagesError
from guided_smc.models import budget as budgets
from guided_smc.models.budget import PAGE, Budget, Need
from guided_smc.models.pages import NoMemoryError, PageTable, Pool
from guided_smc.models.transformers import TransformersModel
from guided_smc.options import make_options
from guided_smc.results import ErrorEvent, ResultEvent

PROMPTS = [[1 + i % 30] * (3 + 7 * i) for i in range(8)]
SETTINGS = dict(n_particles=4, max_tokens=20, seed=3)


def limited(tokens: int | None, draft: bool = False) -> guided_smc.LM:
    def model(name: str) -> TransformersModel:
        plain = build(name)
        return TransformersModel(plain.model, VOCABULARY, name=name, max_total_tokens=tokens)

    return guided_smc.LM(model("llama"), draft=model("qwen3") if draft else None, encoder=Ids())


@pytest.mark.parametrize("draft", [False, True])
def test_requests_that_wait_for_pages_end_as_they_do_with_room_for_all(draft):
    lm, roomy = limited(20 * PAGE, draft), limited(None, draft)
    expected = roomy.generate(PROMPTS, **SETTINGS)
    engine = Engine(lm.model, lm.draft)
    for i, prompt in enumerate(PROMPTS):
        engine.add(lm.request(prompt, index=i, **SETTINGS))
    found, waited, most = {}, 0, 0
    while engine.busy:
        events = list(engine.step())
        rows = sum(p.capacity for p in engine._running)
        waited += bool(engine._waiting) and rows + 4 <= engine.max_rows
        found |= {e.index: e.result for e in events if isinstance(e, ResultEvent)}
        for session in engine._sessions.with_rows:
            session.table.check()
            most = max(most, session.table.used)
            assert session.table.capacity <= 20
            pools = [store.key_pool for store in session.cache.stores]
            assert all(pool.room <= 20 for pool in pools)
    assert waited > 5  # rows were free, pages were not
    assert most > 8  # more than one request at a time
    assert all(session.table.used == 0 for session in engine._sessions.with_rows)
    for i, result in enumerate(expected):
        tokens = [p.token_ids for p in result.particles]
        assert [p.token_ids for p in found[i].particles] == tokens


def test_what_would_fit_is_said_and_does():
    lm = limited(20 * PAGE)
    with pytest.raises(OutOfPagesError, match="max_total_tokens=320") as caught:
        lm.request([1] * 20, n_particles=12, max_tokens=40)
    assert (caught.value.needed, caught.value.fit) == (2 + 12 * 3, 20)
    assert "6 particles with max_tokens=40 or 12 particles with max_tokens=15" in str(caught.value)
    assert "set max_total_tokens=608" in str(caught.value)
    for settings in (dict(n_particles=6, max_tokens=40), dict(n_particles=12, max_tokens=15)):
        assert lm.generate([1] * 20, seed=0, **settings).text
        over = {name: n + 1 for name, n in settings.items()}
        with pytest.raises(OutOfPagesError):
            lm.request([1] * 20, **over)
    with pytest.raises(OutOfPagesError, match="a shorter prompt could fit, or set"):
        limited(2 * PAGE).request([1] * 100, max_tokens=4)


def test_room_is_kept_for_as_many_particles_as_there_may_be():
    lm = limited(20 * PAGE)
    adaptive = dict(n_particles=4, target_ess=3, max_particles=30, max_tokens=10)
    with pytest.raises(OutOfPagesError, match="30 particles"):
        lm.request([1, 2], **adaptive)
    roomy = limited(None).request([1, 2], **adaptive)
    with pytest.raises(OutOfPagesError, match="30 particles"):
        Engine(lm.model).add(roomy)


def test_a_draft_with_less_room_refuses_too():
    small, large = limited(4 * PAGE), limited(None)
    lm = guided_smc.LM(large.model, draft=small.model, encoder=Ids())
    with pytest.raises(OutOfPagesError, match="llama may hold 4"):
        lm.request([1, 2], n_particles=8, max_tokens=10)


@pytest.mark.parametrize("value", [0, PAGE - 1, -1, 1.5, True, "100"])
def test_a_budget_is_a_number_of_tokens(value):
    with pytest.raises(OptionError, match="whole number from 16"):
        Budget.of(value, "model")
    assert Budget.of(2 * PAGE + 5, "model").pages == 2


def test_a_model_without_pages_takes_no_budget():
    plain = build("mamba")
    with pytest.raises(ModelError, match=r"MambaForCausalLM.*leave it out"):
        TransformersModel(plain.model, VOCABULARY, name="mamba", max_total_tokens=64)


def test_a_prompt_waits_for_pages_side_by_side():
    table = PageTable()
    for _ in range(3):
        table.add_prompt(2 * PAGE, 1)
    assert table.has_runs([2 * PAGE], 8) and not table.has_runs([2 * PAGE, 1], 8)
    table.reorder(np.array([0, 2]))
    assert not table.has_runs([3 * PAGE], 8)  # four are free, two and two
    assert table.has_runs([2 * PAGE, 2 * PAGE, 0], 8)
    assert table.prompt_start(table.add_prompt(2 * PAGE, 1)) == 2 * PAGE


def test_any_order_of_coming_and_going_stays_within_the_budget():
    lm = limited(24 * PAGE)
    rng = np.random.default_rng(0)
    engine = Engine(lm.model)
    done = 0
    for i in range(25):
        prompt = [1] * int(rng.integers(1, 60))
        n, tokens = int(rng.integers(1, 5)), int(rng.integers(1, 30))
        engine.add(lm.request(prompt, index=i, n_particles=n, max_tokens=tokens, seed=i))
        for event in engine.step():
            assert not isinstance(event, ErrorEvent)
            done += isinstance(event, ResultEvent)
        assert engine._sessions.target.table.capacity <= 24
    while engine.busy:
        done += sum(isinstance(event, ResultEvent) for event in engine.step())
    assert done == 25
    assert engine._sessions.target.table.used == 0


@pytest.mark.parametrize("traced", [False, True])
def test_a_device_without_memory_for_the_pages_says_how_many_fit(traced, monkeypatch):
    allocate = Pool._allocate

    def refuse(self, *sizes):
        if sizes[-1] > 24:
            raise NoMemoryError(sizes[-1]) from torch.OutOfMemoryError("CUDA out of memory")
        return allocate(self, *[n for n in sizes if n <= 24])

    page_bytes = 2 * 3 * 2 * PAGE * 8 * 4  # keys and values, layers, heads, tokens, head_dim
    monkeypatch.setattr(Pool, "_allocate", refuse)
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 3 * page_bytes + 100)
    model = build("llama")
    if traced:
        model.warm_up()
        assert model._traced._graph is not None
    session = model.start_session()
    session.prefill([[1] * 20], [8])
    tokens, counts = torch.ones(8, 11, dtype=torch.int64), torch.full((8,), 11)
    for _ in range(2):
        session.extend(tokens, counts, last_only=True)
    with pytest.raises(OutOfPagesError) as caught:
        session.extend(tokens, counts, last_only=True)
    message = str(caught.value)
    assert (caught.value.needed, caught.value.fit) == (26, 18 + 3)
    assert (
        "llama: cpu has no memory for 26 pages of K/V (16 tokens and 0.00586 MiB each)" in message
    )
    assert "About 21 fit beside the model: 5 particles of the present 53 tokens" in message
    assert "or 8 particles with a context of 32 tokens that share nothing" in message
    assert "set max_total_tokens=336" in message
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_an_allocation_that_fails_is_tried_without_the_spare_pages(monkeypatch):
    pool = Pool(torch.zeros(2, 1, 4))
    pool.reserve(8)
    asked = []

    class Full:
        shape = pool.data.shape

        def new_zeros(self, heads, slots, head_dim):
            asked.append(slots // PAGE - 1)  # one page is nobody's
            raise RuntimeError("not enough memory")

    monkeypatch.setattr(pool, "data", Full())
    Full.is_cuda = False
    with pytest.raises(NoMemoryError) as caught:
        pool.reserve(9)
    assert asked == [10, 9]
    assert caught.value.pages == 9


def test_a_need_counts_the_prompt_once_and_each_particle_to_its_cap():
    need = Need.of(prompt_ids=33, rows=3, max_tokens=16)
    assert (need.prompt, need.tail) == (32, 17)
    assert need.pages == 2 + 3 * 2


def test_windows_are_as_wide_as_the_widest_and_may_hold_as_much_as_the_pages():
    budget = Budget.of(1600, "model", in_place_from=64)
    short, long = Need.of(9, rows=4, max_tokens=15), Need.of(101, rows=2, max_tokens=299)
    assert (short.columns(64), long.columns(64)) == (16 + 8, 300 + 32)
    assert budget.size([short]) == 6  # windows of 4 rows and 24 columns; 5 pages
    assert budget.size([long]) == 7 + 2 * 19 + 0
    assert budget.size([short, long]) == 125  # 6 rows of 332 columns; 50 pages
    assert not budget.holds([short, long]) and Budget.of(1600, "model").holds([short, long])
    assert budget.size([]) == 0


@pytest.mark.parametrize(("prompt", "rows", "tokens"), [(9, 40, 60), (101, 40, 10), (9, 39, 15)])
def test_what_would_fit_fits_with_windows_too(prompt, rows, tokens):
    budget = Budget.of(640, "model", in_place_from=64)
    with pytest.raises(OutOfPagesError) as caught:
        budget.require(Need.of(prompt, rows, tokens))
    ways = re.findall(r"(\d+) particles? with max_tokens=(\d+)", caught.value.allows)
    assert ways
    for n, cap in ways:
        need = Need.of(prompt, int(n), int(cap))
        assert budget.holds([need])
        bigger = [replace(need, rows=need.rows + 1), replace(need, tail=need.tail + 1)]
        assert not all(budget.holds([one]) for one in bigger)


def test_the_command_takes_a_budget_and_records_what_does_not_fit(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Hi", "n_particles": n} for n in (1, 8, 2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["generate", str(prompts), "--model", str(folder), "--max-tokens", "4", "--quiet"]
    output = tmp_path / "out.jsonl"
    CliRunner().invoke(cli, [*command, "--max-total-tokens", "60", "-o", str(output)])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    types = [record.get("error", {}).get("type") for record in records]
    assert types == [None, "OutOfPagesError", None]
    assert "max_total_tokens=48): 2 particles with max_tokens=4" in records[1]["error"]["message"]
    with pytest.raises(OptionError, match="max_total_tokens must be a whole number from 16"):
        guided_smc.load(str(folder), max_total_tokens=3)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate p.txt --max-total-tokens 3", r"'--max-total-tokens': 3 is not in .* x>=16"),
        (
            "generate p.jsonl --max-total-tokens 32 --max-tokens 64",
            "room for no prompt: .* 8 particles with --max-tokens 64 may need 640 tokens of K/V; "
            "1 particle with max_tokens=31 would fit",
        ),
        ("generate - --format txt --max-total-tokens 32 --max-tokens 64", "room for no prompt"),
        (
            "sweep p.txt --reward length:5 --max-total-tokens 32 --n-particles 2 --max-tokens 20",
            "1 particle with max_tokens=20 or 2 particles with max_tokens=15 would fit",
        ),
        ("tune ./nowhere --particles 1,4 --max-total-tokens 100", "4 particles with --max-tokens"),
    ],
)
def test_a_budget_for_no_prompt_at_all_is_refused_before_anything_runs(
    command, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("Hi\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi", "max_tokens": 100}\n{"prompt": "Hi"}\n{')
    with pytest.raises(click.UsageError) as refused:
        CliRunner().invoke(cli, command.split(), standalone_mode=False, catch_exceptions=False)
    assert re.search(message, refused.value.format_message())


def test_a_budget_for_one_line_of_a_file_is_not_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 9, "n_particles": 1}\n')
    base = make_options(max_tokens=500)
    asked = PromptSource(str(path)).options(base)
    refuse_no_room(32, asked)
    refuse_no_room(16, [])
    with pytest.raises(click.UsageError, match="room for no prompt"):
        refuse_no_room(32, [base])


def test_where_less_of_everything_would_fit_it_is_said():
    budget = Budget.of(48, "model")
    with pytest.raises(OutOfPagesError, match=r": 1 particle with max_tokens=15 would fit, or set"):
        budget.require(Need.of(32, rows=8, max_tokens=64))
    budget.require(Need.of(32, rows=1, max_tokens=15))
