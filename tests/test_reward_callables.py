"""How functions are called: columns, chat messages, coroutines, time limits."""

import asyncio
import contextlib
import functools
import gc
import threading
import time

import pytest
from reward_texts import completion, completions, unfinished

from guided_smc.errors import OptionError, PotentialError
from guided_smc.rewards import active, reward

CHAT = [{"role": "user", "content": "Hi"}]


# -- TRL's convention ------------------------------------------------------------------------


def test_columns_reach_the_parameters_of_their_name_as_lists():
    def correct(completions, ground_truth, bonus=0.0, **kwargs):
        assert set(kwargs) == {"prompts", "completion_ids", "task"}
        assert kwargs["task"] == ["sum", "sum"]
        assert kwargs["completion_ids"] == [[52], [53]]
        return [float(c == t) for c, t in zip(completions, ground_truth, strict=True)]

    given = completions("4", "5", columns={"ground_truth": "4", "task": "sum"})
    assert reward(correct).rewards(given) == [1.0, 0.0]


def test_a_function_without_kwargs_gets_what_it_names_and_no_more():
    def only(completion_ids, bonus=1.0):
        return [len(ids) * b for ids, b in zip(completion_ids, bonus, strict=True)]

    scored = reward(only)
    assert scored.convention == "batch"
    assert scored.rewards(completions("ab", columns={"bonus": 3.0, "other": 1})) == [6.0]
    assert reward(lambda completions_ids: map(len, completions_ids)).rewards(
        completions("abc")
    ) == [3.0]


def test_a_bound_parameter_is_not_replaced_by_a_column():
    def scaled(completions, scale):
        return [scale * len(c) for c in completions]

    scored = reward(functools.partial(scaled, scale=10))
    assert scored.rewards(completions("a", columns={"scale": 2})) == [10.0]


def test_a_required_parameter_that_no_column_fills_is_named_with_the_columns_there_are():
    scored = reward(lambda completions, ground_truth: [0.0], name="correct")
    with pytest.raises(PotentialError, match=r"'correct' needs 'ground_truth'.*are: 'task', 'x'"):
        scored.rewards(completions("a", columns={"task": 1, "x": 2}))
    with pytest.raises(PotentialError, match=r"needs 'ground_truth'.*are: none"):
        scored.rewards(completions("a"))
    mixed = [completion("a", columns={"ground_truth": 1}), completion("b")]
    with pytest.raises(PotentialError, match="needs 'ground_truth'"):
        scored.rewards(mixed)


def test_none_says_that_the_reward_does_not_apply_and_adds_nothing():
    def maths(completions, task, **kwargs):
        return [1.0 if t == "maths" else None for t in task]

    given = [completion("a", columns={"task": t}) for t in ("maths", "code")]
    scored = reward(maths, bounds=(-1, 1))
    assert scored.rewards(given) == [1.0, 0.0]
    assert scored.normalised().rewards(given) == [1.0, 0.0]
    assert (reward(len) + scored.normalised()).rewards(given) == [2.0, 1.0]
    with pytest.raises(PotentialError, match="returned None"):
        reward(lambda text: None).rewards(given)


def test_chat_prompts_make_completions_lists_of_messages():
    seen = []

    def polite(prompts, completions):
        seen.append((prompts, completions))
        return [0.0] * len(completions)

    reward(polite).rewards(completions("Hello", prompt=CHAT))
    reward(polite).rewards(completions("Hello"))
    reward(polite, messages=False).rewards(completions("Hello", prompt=CHAT))
    reward(polite, messages=True).rewards(completions("Hello"))
    message = [{"role": "assistant", "content": "Hello"}]
    assert seen == [
        ([CHAT], [message]),
        (["prompt"], ["Hello"]),
        ([CHAT], ["Hello"]),
        ([[{"role": "user", "content": "prompt"}]], [message]),
    ]


def test_messages_needs_a_function_that_takes_completions():
    with pytest.raises(OptionError, match="one positional parameter"):
        reward(len, messages=True)
    with pytest.raises(OptionError, match="messages must be"):
        reward(lambda completions: [], messages="yes")


# -- lookahead -------------------------------------------------------------------------------


def test_another_function_may_be_asked_of_unfinished_texts():
    scored = reward(len, prefix=lambda completions, prompts: [-len(p) for p in prompts])
    assert scored.on == "step"
    assert scored.rewards(completions("abc")) == [3.0]
    assert scored.prefix_rewards(unfinished("abc")) == [-6.0]


def test_an_estimate_that_is_never_asked_for_is_refused():
    with pytest.raises(OptionError, match='on="end"'):
        reward(len, prefix=len, on="end")
    with pytest.raises(OptionError, match="callable"):
        reward(len, prefix=3)
    with pytest.raises(OptionError, match="signature"):
        reward(len, prefix=lambda a, b: 0.0)


def test_an_error_of_the_estimate_tells_its_convention():
    scored = reward(len, prefix=lambda completions: 1.0, name="odd")
    with pytest.raises(PotentialError, match=r"'odd'.*batch convention"):
        scored.prefix_rewards(unfinished("abc"))


# -- coroutines ------------------------------------------------------------------------------


async def slow_length(text):
    await asyncio.sleep(0.05)
    if text == "bad":
        raise KeyError("missing")
    return len(text)


class SlowLength:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [len(c) for c in completions]


@pytest.mark.parametrize(
    "fn",
    [
        slow_length,
        functools.partial(slow_length),
        SlowLength(),
        lambda text: slow_length(text),
        lambda completions: SlowLength()(completions),
    ],
    ids=range(5),
)
def test_coroutine_functions_are_awaited(fn):
    assert reward(fn).rewards(completions("a", "bb", "a")) == [1.0, 2.0, 1.0]


def test_texts_are_awaited_together():
    most = [0, 0]

    async def counted(text):
        most[0] += 1
        most[1] = max(most)
        await asyncio.sleep(0.01)
        most[0] -= 1
        return 0.0

    reward(counted).rewards(completions(*"abcdef"))
    assert most == [0, 6]


def test_coroutines_are_awaited_inside_a_running_event_loop_too():
    async def server():
        return reward(slow_length).rewards(completions("abc"))

    assert asyncio.run(server()) == [3.0]


def test_an_error_of_a_coroutine_names_its_text():
    with pytest.raises(PotentialError, match=r"slow_length.*KeyError.*'bad'") as failed:
        reward(slow_length).rewards(completions("good", "bad"))
    assert failed.value.text == "bad"
    assert isinstance(failed.value.__cause__, KeyError)


def test_a_coroutine_that_cancels_itself_is_an_error():
    async def gives_up(text):
        raise asyncio.CancelledError

    with pytest.raises(PotentialError, match=r"'gives_up' was cancelled.*'a'"):
        reward(gives_up).rewards(completions("a"))


# -- time limits -----------------------------------------------------------------------------


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def reward_threads():
    return [t for t in threading.enumerate() if t.name == "guided-smc reward"]


def test_a_function_that_computes_for_ever_is_stopped():
    def spins(text):
        if text == "good":
            return 1.0
        while True:
            pass

    with pytest.raises(PotentialError, match=r"'spins' took longer than timeout=0.1.*'bad'"):
        reward(spins, timeout=0.1).rewards(completions("good", "bad", "after"))
    wait_until(lambda: not reward_threads())


def test_a_function_that_catches_exceptions_is_stopped_too():
    def stubborn(text):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(PotentialError, match="stubborn"):
        reward(stubborn, timeout=0.1).rewards(completions("a"))
    wait_until(lambda: not reward_threads())


def test_what_is_computed_while_it_is_iterated_over_is_within_the_limit():
    def lazy(completions):
        yield 1.0
        while True:
            pass

    with pytest.raises(PotentialError, match="took longer"):
        reward(lazy, timeout=0.1).rewards(completions("a", "b"))
    wait_until(lambda: not reward_threads())


def test_a_function_that_sleeps_is_left_behind():
    began = time.monotonic()
    with pytest.raises(PotentialError, match=r"'sleeps' took longer.*'a'"):
        reward(lambda completions: time.sleep(1.0), name="sleeps", timeout=0.1).rewards(
            completions("a")
        )
    assert time.monotonic() - began < 0.9
    wait_until(lambda: not reward_threads())


def test_coroutines_are_cancelled_and_the_text_that_waits_is_named():
    cancelled = []

    async def waits(text):
        try:
            await asyncio.sleep(0 if text == "good" else 60)
        except asyncio.CancelledError:
            cancelled.append(text)
            raise
        return 0.0

    with pytest.raises(PotentialError, match="'bad'"):
        reward(waits, timeout=0.1).rewards(completions("good", "bad"))
    wait_until(lambda: not reward_threads())
    assert cancelled == ["bad"]


def test_a_coroutine_that_never_yields_is_stopped_without_a_word(caplog, capfd):
    async def spins(text):
        while True:
            pass

    with pytest.raises(PotentialError, match="took longer"):
        reward(spins, timeout=0.1).rewards(completions("a", "b"))
    wait_until(lambda: not reward_threads())
    gc.collect()
    assert not caplog.records
    assert not capfd.readouterr().err


def test_within_its_time_a_function_is_what_it_is_without_a_limit():
    assert reward(len, timeout=5).rewards(completions("ab")) == [2.0]

    def fails(text):
        raise KeyError("missing")

    with pytest.raises(PotentialError, match="KeyError") as failed:
        reward(fails, timeout=5).rewards(completions("ab"))
    assert isinstance(failed.value.__cause__, KeyError)


def test_interrupts_pass_through_a_time_limit():
    def interrupted(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reward(interrupted, timeout=5).rewards(completions("a"))


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), "5"])
def test_a_time_limit_is_a_number_above_zero(timeout):
    with pytest.raises(OptionError, match="timeout"):
        reward(len, timeout=timeout)


# -- what is being scored --------------------------------------------------------------------


def test_a_reward_at_work_can_be_seen_from_another_thread():
    go, seen = threading.Event(), []

    def waits(text):
        assert go.wait(5)
        return 0.0

    worker = threading.Thread(target=reward(waits).rewards, args=(completions("a", "b"),))
    assert active() is None
    worker.start()
    wait_until(lambda: active() is not None)
    seen = active()
    go.set()
    worker.join()
    assert (seen.name, seen.texts) == ("waits", 2)
    assert seen.seconds >= 0
    assert active() is None


def test_nothing_is_at_work_after_an_error():
    def fails(text):
        raise KeyError

    with pytest.raises(PotentialError):
        reward(fails).rewards(completions("a"))
    assert active() is None


def test_a_spec_in_the_place_of_a_function_is_told_where_it_goes():
    with pytest.raises(OptionError, match=r"must be callable, got 'length:60'; .*rewards\.parse"):
        reward("length:60")
    with pytest.raises(OptionError, match=r"must be callable, got 5$"):
        reward(5)
