"""Rewards named in specs and files are those that their functions make."""

import textwrap

import pytest
import torch
from reward_texts import completions
from test_reward_models import write_classifier, write_encoder

from guided_smc.errors import OptionError
from guided_smc.rewards import (
    from_file,
    keywords,
    length,
    matches,
    parse,
    readability,
    sentiment,
    sequence_classifier,
    similarity,
)

TEXTS = ("The sea is blue. It is 5 miles wide, and I love it.", "", "seaside", "No numbers here!")

OWN = """
from guided_smc.rewards import length
from guided_smc import regex

def vowels(text):
    return sum(text.count(v) for v in "aeiou")

def by_column(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

short = length(5, beta=3)
NUMBER = 3
CONSTRAINT = regex("a")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    import sys

    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_rewards", None)


def same(found, expected):
    given = completions(*TEXTS)
    assert found.rewards(given) == pytest.approx(expected.rewards(given))
    assert (found.on, found.name, found.beta) == (expected.on, expected.name, expected.beta)
    assert found.schedule == expected.schedule


@pytest.mark.parametrize(
    "spec, make",
    [
        ("length:20", lambda: length(20)),
        (" length:20 ", lambda: length(20)),
        ("length:5,unit=words,band=2", lambda: length(5, unit="words", band=2)),
        ("length:unit=words,target=5", lambda: length(5, unit="words")),
        ("length:20,on=end", lambda: length(20, on="end")),
        ("0.7*length:20", lambda: 0.7 * length(20)),
        ("-1 * length:20", lambda: -1 * length(20)),
        ("1e-1*length:20", lambda: 0.1 * length(20)),
        ("keywords:sea, blue", lambda: keywords(["sea", "blue"])),
        (r"matches:\d+, a{1,3}", lambda: matches(r"\d+, a{1,3}")),
        ("readability:8", lambda: readability(8)),
        (
            "readability:60,metric=flesch_reading_ease",
            lambda: readability(60, metric="flesch_reading_ease"),
        ),
        ("sentiment", sentiment),
        ("2*sentiment", lambda: 2 * sentiment()),
    ],
)
def test_a_spec_is_what_its_function_makes(spec, make):
    same(parse(spec), make())


def test_functions_and_rewards_of_ones_own(own):
    assert parse("own_rewards:vowels").rewards(completions("sea")) == [2.0]
    assert parse("0.5*own_rewards:vowels").name == "0.5*vowels"
    assert parse("own_rewards:short").beta == 3.0
    given = completions("a", columns={"answer": "a"})
    assert parse("own_rewards:by_column").rewards(given) == [1.0]


def test_models(tmp_path):
    write_classifier(tmp_path / "judge", labels=2, names=["no", "yes"])
    found = parse(f"hf:{tmp_path / 'judge'},label=yes,batch_size=2,dtype=bfloat16")
    expected = sequence_classifier(str(tmp_path / "judge"), label="yes", dtype="bfloat16")
    assert found.loaded.model.dtype == torch.bfloat16
    assert found.rewards(completions("a")) == expected.rewards(completions("a"))
    write_encoder(tmp_path / "encoder")
    (tmp_path / "r.yaml").write_text(
        f"rewards: [{{reward: 'similarity:the sea, blue', model: {tmp_path / 'encoder'}}}]"
    )
    same(
        from_file(tmp_path / "r.yaml"),
        similarity("the sea, blue", model=str(tmp_path / "encoder")),
    )


@pytest.mark.parametrize(
    "spec, message",
    [
        ("lenght:5", r"no reward 'lenght', did you mean 'length'\?"),
        ("lenght", r"no reward 'lenght', did you mean 'length'\?.*keywords.*module:function"),
        ("length", "'length' needs arguments: write length:TARGET"),
        ("length:x", "needs a whole number for target, got 'x'"),
        ("length:5,unit", "does not know 'unit'.*unit="),
        ("length:5,uint=words", "does not know 'uint=words'.*unit="),
        ("length:unit=words", "'length' needs `target`"),
        ("length:5,unit=miles", "unit='miles'"),
        ("length:0", "target of 1 or more"),
        ("readability:x", "needs a number for grade"),
        ("sentiment:5", "takes no arguments: write sentiment"),
        ("matches:(", "malformed"),
        ("keywords:", "needs words"),
        ("", "named by a text"),
        ("2*", "no reward"),
        (None, "named by a text"),
        ("own_rewards:missing", "no attribute 'missing'"),
        ("own_rewards:NUMBER", "not a function or a reward"),
        ("own_rewards:CONSTRAINT", "not a function or a reward"),
        ("nowhere:fn", "no module 'nowhere'"),
        ("2*own_rewards:short", "beta belongs to the whole"),
    ],
)
def test_a_spec_that_cannot_be_says_why(own, spec, message):
    with pytest.raises(OptionError, match=message):
        parse(spec)


YAML = """
beta: 2
schedule: linear
name: style
rewards:
  - reward: length
    target: 20
    unit: characters
    weight: 0.7
    on: sentence
  - 0.3*sentiment
  - reward: own_rewards:vowels
    name: open vowels
    timeout: 5
    on: step
"""

TOML = """
beta = 2
schedule = "linear"
name = "style"

[[rewards]]
reward = "0.7*length"
target = 20
on = "sentence"

[[rewards]]
reward = "sentiment"
weight = 0.3

[[rewards]]
reward = "own_rewards:vowels"
name = "open vowels"
on = "step"
"""


@pytest.mark.parametrize("name, text", [("r.yaml", YAML), ("r.yml", YAML), ("r.toml", TOML)])
def test_a_file_is_a_weighted_sum_with_a_beta_of_its_own(own, name, text):
    (own / name).write_text(text)
    found = from_file(own / name)
    from own_rewards import vowels

    from guided_smc.rewards import reward

    expected = 0.7 * length(20, on="sentence") + 0.3 * sentiment()
    expected = expected + reward(vowels, on="step", name="open vowels")
    assert expected.name == "0.7*length + 0.3*sentiment + open vowels"
    same(found, expected.with_(beta=2, schedule="linear", name="style"))


def test_a_file_with_one_reward_is_that_reward(tmp_path):
    (tmp_path / "r.yaml").write_text("rewards:\n  - length:20\n")
    same(from_file(tmp_path / "r.yaml"), length(20))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a mapping with `rewards`"),
        ("rewards: []", "at least one"),
        ("rewards: length:20", "must be a list"),
        ("reward: [length:20]", r"unknown key 'reward', did you mean 'rewards'\?"),
        ("rewards: [length:20, sentimant]", r"rewards\[1\]: there is no reward 'sentimant'"),
        ("rewards: [3]", r"rewards\[0\]: expected a spec"),
        ("rewards: [{target: 20}]", r"rewards\[0\]: expected a spec"),
        (
            "rewards: [{reward: length, targt: 20}]",
            r"rewards\[0\]: unknown key 'targt' of length, did you mean 'target'\?.*unit.*weight",
        ),
        ("rewards: [{reward: length, target: 20, beta: 2}]", r"unknown key 'beta' of length"),
        ("rewards: [{reward: length, unit: words}]", "'length' needs `target`"),
        ("rewards: [{reward: 'length:20', target: 30}]", "has 'target' twice"),
        ("rewards: [{reward: 2*length, target: 20, weight: 1}]", "weight is given twice"),
        ("rewards: [{reward: length, target: 20, weight: x}]", "weight must be a number"),
        ("rewards: [{reward: length, target: x}]", r"rewards\[0\]: length needs a target"),
        ("rewards: [{reward: length, target: 20, on: never}]", '"sentence"'),
        ("rewards: [length:20]\nbeta: high", "beta must be"),
        ("rewards: [length:20]\nschedule: slow", "schedule must be"),
        ("rewards: [length:20\n", "line"),
    ],
)
def test_a_file_that_cannot_be_says_why_and_where(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(OptionError, match=message) as failed:
        from_file(tmp_path / "r.yaml")
    assert str(failed.value).startswith(str(tmp_path / "r.yaml"))
    assert "\n" not in str(failed.value)


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "r.toml").write_text("rewards = [")
    (tmp_path / "r.txt").write_text("rewards: [sentiment]")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    for name, message in (
        ("r.toml", "Invalid|line"),
        ("r.txt", ".yaml, .yml or .toml"),
        ("missing.yaml", "cannot be read: No such file"),
        ("bytes.yaml", "cannot be read"),
    ):
        with pytest.raises(OptionError, match=message):
            from_file(tmp_path / name)


def test_a_file_cannot_make_python_objects(tmp_path):
    text = textwrap.dedent("""\
        rewards: !!python/object/apply:os.system ["echo"]
    """)
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(OptionError, match="could not determine a constructor"):
        from_file(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("inf*length:20", "the weight 'inf' is not a finite number"),
        ("nan * sentiment", "the weight 'nan' is not a finite number"),
        ("-length:3", r"a weight is a number and \*, as in '-1\*"),
    ],
)
def test_a_weight_that_is_none_is_told_as_such(spec, message):
    with pytest.raises(OptionError, match=message):
        parse(spec)
