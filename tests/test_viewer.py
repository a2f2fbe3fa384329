"""The viewer in a real browser, with records in a file."""

from __future__ import annotations

import json
import math

import pytest
from browsers import Watched, chromium
from support import VOCABULARY, Language, request, results
from viewing import LETTERS, node, record_of

from guided_smc import LM, Vocabulary, reward, viewer
from guided_smc.cli.records import encode
from guided_smc.engine import run
from guided_smc.models.table import TableModel

SCRIPT = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def result():
    """With a draft, a constraint and a reward that steers, so that particles are cut."""
    draft = TableModel.random(VOCABULARY, seed=22, eos_probability=0.1)
    target = TableModel.random(VOCABULARY, seed=11, eos_probability=0.1)
    r = request(
        target,
        (0,),
        n_particles=8,
        max_tokens=9,
        block_size=1,
        seed=5,
        constraint=Language(lambda t: len(t) >= 3 and "dd" not in t, 9),
        potentials=[reward(lambda t: float(t.count("a")), beta=1.2, on="step", name="many a")],
    )
    (found,) = results(run(target, [r], draft=draft))
    assert any(step.resampled for step in found.steps)
    return found


def opened(browser, tmp_path, records, **settings):
    """A page of records, read from a file as a user would."""
    path = tmp_path / "page.html"
    path.write_text(viewer.page(json.loads(encode({"r": records}))["r"]), "utf-8")
    watched = Watched(browser, **{"viewport": {"width": 1400, "height": 1000}, **settings})
    watched.page.goto(path.as_uri())
    watched.page.wait_for_selector("h1")
    return watched


def text_of(page):
    return page.get_by_test_id("text").inner_text()


def text_at(result, step, slot):
    """What a particle has said up to a step, followed back by hand."""
    tokens = []
    for t in range(step, -1, -1):
        tokens = [*result.steps[t].tokens[slot], *tokens]
        if t:
            slot = result.steps[t - 1].ancestors[slot]
    return VOCABULARY.decode(tokens)


def test_a_page_from_a_file_asks_no_network_and_has_nothing_to_complain_about(
    browser, tmp_path, result
):
    watched = opened(browser, tmp_path, [record_of(result), record_of(result, 1)])
    page = watched.page
    page.get_by_role("option", name="1", exact=False).first.click()
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowLeft")
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith(("file:", "data:"))] == []


def test_the_answer_is_shown_first_with_its_text_and_its_way(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    assert page.get_by_test_id("answer").inner_text() == result.text
    assert text_of(page).replace("end", "") == result.text
    assert "the answer" in page.get_by_test_id("fate").inner_text()


def test_a_click_on_any_particle_shows_its_text_then_also_of_one_that_was_cut(
    browser, tmp_path, result
):
    page = opened(browser, tmp_path, [record_of(result)]).page
    cut = [
        (t, s)
        for t, step in enumerate(result.steps)
        for s in range(8)
        if step.resampled and s not in step.ancestors and step.status[s] == "live"
    ]
    for t, s in [cut[0], cut[-1], (1, 3)]:
        page.mouse.click(*node(page, t, s))
        assert page.locator("#particle-title").inner_text() == f"Particle {s} at step {t}"
        assert text_of(page).replace("end", "") == text_at(result, t, s)
        gone = "then cut" in page.get_by_test_id("fate").inner_text()
        assert gone == ((t, s) in cut)


def test_arrow_keys_walk_along_particles_and_steps(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    page.get_by_role("application").focus()
    t, s = len(result.steps) - 1, result.steps[-1].ancestors[result.selected[0]]
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
        t, s = t - 1, result.steps[t - 1].ancestors[s]
        assert page.locator("#particle-title").inner_text() == f"Particle {s} at step {t}"
        assert text_of(page).replace("end", "") == text_at(result, t, s)
    page.keyboard.press("Home")
    assert page.locator("#particle-title").inner_text().endswith("at step 0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    page.keyboard.press("a")
    assert "the answer" in page.get_by_test_id("selection").inner_text()
    page.keyboard.press("w")
    weights = result.steps[-1].log_weights
    heaviest = weights.index(max(weights))
    assert f"particle {heaviest}," in page.get_by_test_id("selection").inner_text()


def test_keys_walk_wherever_the_focus_is(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result), record_of(result, 1)]).page
    title = page.locator("#particle-title")
    answer = title.inner_text()
    places = ["body", "[role=application]", "[id^=slot-] >> nth=0", ".tools button >> nth=1"]
    places += [".posterior button >> nth=0", ".token >> nth=0", ".summary pre >> nth=0"]
    for place in places:
        page.locator(place).focus()
        if place.startswith("[id^=slot-]"):
            page.locator(".population .list").focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Home")
        assert title.inner_text().endswith("at step 0"), place
        page.keyboard.press("a")
        assert title.inner_text() == answer, place
        if not place.startswith(".token"):  # among tokens they go to the neighbours
            page.keyboard.press("ArrowLeft")
            assert title.inner_text().endswith(f"at step {len(result.steps) - 2}"), place
            page.keyboard.press("w")
            page.keyboard.press("a")


def test_keys_that_mean_something_else_are_left_alone(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result, i) for i in range(3)]).page
    title = page.locator("#particle-title")
    page.keyboard.press("Home")
    start = title.inner_text()
    page.get_by_role("searchbox").press_sequentially("aw?")
    page.keyboard.press("End")
    assert page.get_by_role("searchbox").input_value() == "aw?"
    page.get_by_role("searchbox").fill("")
    page.locator(".particle select").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".particle select").input_value() == "surprise"
    assert title.inner_text() == start
    page.get_by_role("button", name="Colours").focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Colours: dark").wait_for()
    page.keyboard.press("Control+a")
    page.keyboard.press("PageDown")  # scrolls
    assert title.inner_text() == start
    page.get_by_role("listbox", name="Records").focus()
    page.keyboard.press("End")
    assert page.locator("[id^=run-][aria-selected=true] .slot").inner_text() == "2"


def test_the_keys_are_listed_with_a_question_mark(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    title = page.locator("#particle-title")
    start = title.inner_text()
    assert page.get_by_role("dialog").count() == 0
    page.keyboard.press("?")
    assert "the heaviest particle" in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Home")
    assert title.inner_text() == start
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
    page.get_by_role("button", name="Keys").click()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("Home")
    assert title.inner_text().endswith("at step 0")


def test_every_number_says_what_it_is(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    texts = {p.text for p in result.particles if p.weight}
    facts = page.locator(".facts")
    told = facts.inner_text()
    assert f"different texts\n{len(texts)}, in effect {result.diversity.distinct:.1f}" in told
    assert f"{result.log_evidence:.2f} nats".replace("-", "−") in told
    assert facts.locator(".fact").count() == facts.locator(".fact[title]").count()
    assert "1/Σw²" in facts.get_by_title("final particles of different text").get_attribute("title")
    page.get_by_text("What do the numbers mean?").click()
    assert "a difference of 1 nat is a factor of e" in page.locator(".glossary").inner_text()
    page.get_by_role("combobox").select_option("difference")
    assert "3 nats or more" in page.locator(".scale").inner_text()
    page.keyboard.press("Home")
    growing = sum(status == "live" for status in result.steps[0].status)
    step = page.locator(".population header").inner_text()
    assert f"{growing} of 8 particles are still growing" in step
    assert f"effective sample size {result.steps[0].ess:.1f} of 8" in step


def test_a_run_that_broke_off_says_why_there_is_nothing_to_draw(browser, tmp_path):
    error = {"type": "PotentialError", "message": "the reward raised", "line": 1}
    record = {"index": 0, "prompt": "", "text": None, "log_evidence": None, "error": error}
    page = opened(browser, tmp_path, [record, {"index": 1, "text": "", "error": None}]).page
    said = page.locator("main").inner_text()
    assert "leaves no steps" in said and "(empty)" in said
    assert "log-evidence" not in said  # nothing is known of it
    page.get_by_role("option").nth(1).click()
    assert "The answer is an empty text." in page.locator("main").inner_text()


def test_islands_are_told_apart_and_restarts_begin_new_curves(browser, tmp_path):
    settings = {"n_particles": 6, "max_tokens": 4, "max_restarts": 1, "seed": 0}
    islands = LM(LETTERS).generate("a", islands=3, **settings)
    dead = LM(LETTERS).generate("a", potential=reward(lambda t: -math.inf), **settings)
    records = [record_of(islands, sampling={"method": "smc", "islands": 3, "ess_threshold": 0.5})]
    page = opened(browser, tmp_path, [*records, record_of(dead, 1)]).page
    assert page.locator(".island").count() == 2
    assert "6, on 3 islands" in page.locator(".facts").inner_text()
    assert (
        page.locator(".track .threshold").count() <= 1
    )  # of log-evidence: each island has its own
    page.get_by_role("option", name="all particles died").click()
    assert page.locator(".track .curve").first.get_attribute("d").count("M") == 2
    assert page.locator(".badge", has_text="all particles died").count()


def test_everything_can_be_reached_by_tab_and_shows_where_the_focus_is(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result), record_of(result, 1)]).page
    reached = set()
    for _ in range(24):
        page.keyboard.press("Tab")
        role, outline = page.evaluate(
            """() => { const e = document.activeElement;
                return [e.getAttribute('role') ?? e.tagName, getComputedStyle(e).outlineStyle]; }"""
        )
        reached.add(role)
        assert outline != "none" or role == "BODY", role
    assert {"application", "listbox", "button", "SELECT", "INPUT", "BUTTON"} <= reached


def test_a_token_tells_its_numbers(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    particle = result.particles[result.selected[0]]
    page.locator(".token").nth(1).hover()
    told = page.get_by_role("tooltip").inner_text().replace("−", "-")
    log_p, log_q = particle.token_log_p[1], particle.token_log_q[1]
    for value in (log_p, log_q, log_p - log_q):
        assert f"{value:.3f}" in told
    assert f"{100 * math.exp(log_p):.1f} %" in told
    assert "allowed here" in told and "text might end here" in told


def test_tokens_are_coloured_by_what_they_weigh(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    particle = result.particles[result.selected[0]]
    shades = page.locator(".token").evaluate_all(
        "all => all.map(e => [e.style.getPropertyValue('--side'), "
        "parseInt(e.style.getPropertyValue('--much'))])"
    )
    for (side, much), log_p, log_q in zip(
        shades, particle.token_log_p, particle.token_log_q, strict=True
    ):
        assert much == pytest.approx(62 * min(abs(log_p - log_q) / 3, 1), abs=1)
        assert side == ("var(--minus)" if log_p < log_q else "var(--plus)") or much == 0


def test_a_token_is_chosen_with_keys_and_takes_to_its_step(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    assert "token" in page.get_by_role("tooltip").inner_text()
    page.keyboard.press("Enter")
    assert page.locator("#particle-title").inner_text().endswith("at step 0")


def test_the_particles_of_a_step_are_a_list_to_choose_from(browser, tmp_path, result):
    page = opened(browser, tmp_path, [record_of(result)]).page
    options = page.locator("[role=option][id^=slot-]")
    assert options.count() == 8
    options.nth(6).click()
    assert "Particle 6" in page.locator("#particle-title").inner_text()
    assert options.nth(6).get_attribute("aria-selected") == "true"
    page.get_by_role("listbox", name="Particles at step").press("ArrowUp")
    assert "Particle 5" in page.locator("#particle-title").inner_text()


def test_dark_and_light_follow_the_system_until_one_is_chosen(browser, tmp_path, result):
    def becomes(page, colour: str) -> None:
        back = "getComputedStyle(document.body).backgroundColor"
        page.wait_for_function(f"() => {back} === '{colour}'")  # the page draws when it comes to it

    dark = opened(browser, tmp_path, [record_of(result)], color_scheme="dark").page
    light = opened(browser, tmp_path, [record_of(result)], color_scheme="light").page
    becomes(dark, "rgb(14, 18, 23)")
    becomes(light, "rgb(244, 246, 248)")
    light.get_by_role("button", name="Colours: auto").click()
    becomes(light, "rgb(14, 18, 23)")
    light.reload()
    becomes(light, "rgb(14, 18, 23)")


def test_texts_can_neither_run_nor_hide(browser, tmp_path, result):
    record = record_of(result, prompt=SCRIPT, text="a\u202eb\x1b[0m" + SCRIPT)
    record["warnings"] = [SCRIPT]
    record["constraint"] = SCRIPT
    record["token_texts"] = {
        t: SCRIPT if text else text for t, text in record["token_texts"].items()
    }
    failed = {"index": 1, "text": None, "error": {"type": SCRIPT, "message": SCRIPT}}
    watched = opened(browser, tmp_path, [record, failed])
    page = watched.page
    assert SCRIPT in page.get_by_test_id("text").inner_text()
    answer = page.get_by_test_id("answer").inner_text()
    assert "⟨202E⟩" in answer and "␛" in answer and "\u202e" not in answer
    page.mouse.move(*node(page, 0, 0))
    page.get_by_role("option").nth(1).click()
    assert SCRIPT in page.get_by_role("alert").inner_text()
    assert page.evaluate("() => window.pwned") is None
    assert watched.complaints == []


def test_records_are_found_by_words_and_failed_ones_say_why(browser, tmp_path, result):
    error = {"type": "PromptError", "message": "the prompt is empty", "line": 3}
    records = [record_of(result, i, prompt=f"prompt number {i}") for i in range(3)]
    records.append({"index": 3, "text": None, "error": error})
    records.append({"index": 4, "text": "only a text", "finish_reason": "stop"})
    page = opened(browser, tmp_path, records).page
    assert page.locator("[id^=run-]").count() == 5
    page.get_by_role("searchbox").fill("NUMBER 2")
    assert page.locator("[id^=run-]").count() == 1
    page.locator("[id^=run-]").click()
    assert "prompt number 2" in page.locator(".summary").inner_text()
    page.get_by_role("searchbox").fill("prompterror")
    page.locator("[id^=run-]").click()
    assert "PromptError (line 3): the prompt is empty" in page.get_by_role("alert").inner_text()
    page.get_by_role("searchbox").fill("only")
    page.locator("[id^=run-]").click()
    assert "has no steps to show" in page.locator("main").inner_text()


def test_characters_in_several_tokens_and_starts_that_died_are_shown(browser, tmp_path):
    vocabulary = Vocabulary([b"a", "é".encode()[:1], "é".encode()[1:], b""], eos_ids=[3])
    said = (0, 1, 2, 0)

    def row(context):
        at = len(context) - 1
        chances = [0.0] * 4
        chances[said[at] if at < len(said) else 3] = 1.0
        return chances

    whole = LM(TableModel(row, vocabulary)).generate("a", n_particles=2, max_tokens=8, seed=0)
    dead = LM(TableModel.random(VOCABULARY, seed=1, eos_probability=0.5)).generate(
        "a", potential=reward(lambda t: -math.inf), n_particles=3, max_tokens=4, max_restarts=1
    )
    records = [record_of(whole), record_of(dead, 1, error={"type": "x", "message": "y"})]
    page = opened(browser, tmp_path, records).page
    assert text_of(page) == "a·éaend"
    page.get_by_role("option").nth(1).click()
    assert page.locator(".restart-label").text_content() == "start 2"
    assert "gives this text the weight 0" in page.get_by_test_id("fate").inner_text()


def test_32_particles_over_100_steps_are_few_elements_and_quick_to_walk(browser, tmp_path):
    out = LM(LETTERS).generate(
        "a",
        potential=reward(lambda t: 0.2 * t.count("e"), on="step"),
        n_particles=32,
        max_tokens=100,
        ess_threshold=0.9,
        seed=1,
    )
    assert len(out.steps) == 100
    page = opened(browser, tmp_path, [record_of(out)]).page
    assert page.locator(".frame svg *").count() < 400
    page.get_by_role("application").focus()
    slowest = page.evaluate(
        """async () => {
            const frame = document.querySelector('[role=application]');
            const times = [];
            for (let i = 0; i < 40; i++) {
                const start = performance.now();
                const key = i < 30 ? 'ArrowLeft' : 'ArrowUp';
                frame.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
                times.push(performance.now() - start);
            }
            return times.sort((a, b) => a - b)[20];
        }"""
    )
    assert "at step 69" in page.locator("#particle-title").inner_text()
    assert slowest < 1000  # a median; measured 20 to 30 ms


def test_nothing_sticks_out_of_a_narrow_window(browser, tmp_path, result):
    records = [record_of(result, i) for i in range(2)]
    page = opened(browser, tmp_path, records, viewport={"width": 380, "height": 800}).page
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 380


def test_names_stay_in_view_when_a_picture_is_scrolled(browser, tmp_path):
    out = LM(LETTERS).generate("a", n_particles=4, max_tokens=60, seed=1)
    record = record_of(out)
    page = opened(browser, tmp_path, [record], viewport={"width": 380, "height": 800}).page
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('.frame').scrollLeft > 100")
    left = page.locator(".frame").bounding_box()["x"]
    page.wait_for_function(
        "left => [...document.querySelectorAll('.frame .title')].every("
        "(t) => Math.abs(t.getBoundingClientRect().x - left - 8) < 3)",
        arg=left,
    )
    before = page.locator("#particle-title").inner_text()
    page.locator(".frame").click(position={"x": 60, "y": 60})  # on a label, not what is below it
    assert page.locator("#particle-title").inner_text() == before
