"""Settings come from flags before the environment before a file; what is decided can be sent."""

import itertools
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from exactness import DRAFT, LANGUAGE, PROMPT, TARGET
from support import Score, request

from guided_smc import OptionError
from guided_smc.cli.main import cli
from guided_smc.cli.serve import FLAGS
from guided_smc.engine import Engine
from guided_smc.results import ResultEvent, Step, StepEvent
from guided_smc.server import Settings
from guided_smc.server.protocol import Smc
from guided_smc.server.serving import load_rewards, serve
from guided_smc.server.settings import read_settings
from guided_smc.server.streaming import decided

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "server.md").read_text()


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch):
    file = tmp_path / "serve.toml"
    file.write_text(
        'port = 1\nmax_rows = 2\nmax_queue = 3\napi_keys = ["k"]\n[rewards]\nbrief = "length:9"\n'
    )
    monkeypatch.setenv("GUIDED_SMC_MAX_ROWS", "20")
    monkeypatch.setenv("GUIDED_SMC_MAX_QUEUE", "30")
    monkeypatch.setenv("GUIDED_SMC_API_KEYS", "a, b")
    found = read_settings(str(file), max_queue=300, port=None)
    assert (found.port, found.max_rows, found.max_queue) == (1, 20, 300)
    assert [key.get_secret_value() for key in found.api_keys] == ["a", "b"]
    assert found.rewards == {"brief": "length:9"}
    assert read_settings(max_queue=7).port == 8000, "the file is of that call alone"
    monkeypatch.setenv("GUIDED_SMC_CONFIG", str(file))
    assert read_settings().port == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_rows": 0}, "max_rows: Input should be greater than 0"),
        ({"beams": 3}, "there is no setting 'beams'"),
        (
            {"max_total_tokens": 16},
            "max_total_tokens is 16, and one particle with max_tokens=256 .* may need 272: ",
        ),
        ({"n_particles": 64}, "n_particles is 64, more than max_particles=32"),
        ({"api_keys": [""]}, "an empty key would let everybody in"),
        ({"config": "nowhere.toml"}, "there is no configuration file nowhere.toml"),
    ],
)
def test_a_setting_that_cannot_be_is_named(given, said):
    with pytest.raises(OptionError, match=said):
        read_settings(**given)


def test_a_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text("port =")
    with pytest.raises(OptionError, match=r"settings of the server .*serve\.toml\)"):
        read_settings(str(file))


def test_keys_are_not_shown_where_settings_are():
    assert "hidden" not in repr(Settings(api_keys=["hidden"]))


def test_every_setting_has_a_flag_with_its_default():
    flags = {name.replace("-", "_"): said for name, _, said in FLAGS}
    apart = {"model", "api_keys", "rewards"}  # an argument, and two that are repeatable
    assert set(flags) == set(Settings.model_fields) - apart
    for name, said in flags.items():
        default = Settings.model_fields[name].default
        if default is not None and name != "max_schema_memory":
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert f"[default: {shown}]" in said, name


def test_the_guide_names_flags_settings_and_errors_as_they_are(tmp_path):
    flags = {f"--{name}" for name, _, _ in FLAGS} | {"--config", "--reward", "--help"}
    ours = {"--full", "--rewards"}  # of generate
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE))
    assert named <= flags | ours
    (toml,) = re.findall(r"^```toml\n(.*?)^```", GUIDE, flags=re.M | re.S)
    (tmp_path / "serve.toml").write_text(toml)
    assert read_settings(str(tmp_path / "serve.toml")).rewards["brief"] == "length:60"
    sources = [p.read_text() for p in (ROOT / "guided_smc" / "server").glob("*.py")]
    codes = set(re.findall(r'code="([a-z_]+)"', "".join(sources)))
    apart = {"slow_reader", "http_error"}  # in no status; any other of HTTP's
    told = set(re.findall(r"`([a-z_]+)`", GUIDE.split("## Errors")[1].split("## Sharing")[0]))
    assert codes - apart <= told


def test_the_guide_lists_the_fields_of_smc():
    part = GUIDE.split("### `smc`")[1].split("### Tools")[0]
    assert set(Smc.model_fields) <= set(re.findall(r"`(\w+)`", part))


def test_the_command_tells_what_is_wrong_in_one_line():
    done = CliRunner().invoke(cli, ["serve", "--reward", "brief"])
    assert done.exit_code == 2 and "NAME=REWARD" in done.output


def test_rewards_are_made_from_specs_and_files_with_their_names_in_errors(tmp_path):
    file = tmp_path / "polite.toml"
    file.write_text('beta = 2\nrewards = ["length:20"]\n')
    made = load_rewards({"brief": "length:9", "polite": str(file)})
    assert made["polite"].beta == 2
    with pytest.raises(OptionError, match="reward 'odd': there is no reward 'nothing'"):
        load_rewards({"odd": "nothing"})


def step(texts, log_weights, ancestors=None):
    made = Step(
        index=0, block_size=0, live=len(texts), ess=1.0, log_evidence=0.0,
        log_weights=tuple(log_weights), resampled=ancestors is not None,
        ancestors=tuple(ancestors or range(len(texts))),
    )  # fmt: skip
    return StepEvent(0, made, tuple(texts))


DEAD = float("-inf")


@pytest.mark.parametrize(
    ("texts", "log_weights", "stops", "expected"),
    [
        (["abc"], [0.0], (), "abc"),
        (["abc", "abd"], [0.0, 0.0], (), "ab"),
        (["abc", "xyz"], [0.0, DEAD], (), "abc"),
        (["abc", "ab"], [0.0, 0.0], (), "ab"),
        (["abc", "abc"], [DEAD, DEAD], (), ""),
        (["tell STO"], [0.0], ("STOP",), "tell "),
        (["tell SS"], [0.0], ("STOP", "SSS"), "tell "),
        (["tell S"], [0.0], ("X",), "tell S"),
        (["é€", "é∞"], [0.0, 0.0], (), "é"),
    ],
)
def test_what_is_decided_is_common_to_all_that_may_be_the_answer(
    texts, log_weights, stops, expected
):
    assert decided(step(texts, log_weights), stops) == expected


def test_a_slot_is_judged_by_the_weight_of_its_ancestor():
    assert decided(step(["ab", "ab"], [DEAD, 0.0], ancestors=[1, 1])) == "ab"


@pytest.mark.parametrize("block_size", [0, 2])
@pytest.mark.parametrize("islands", [1, 2])
def test_what_was_decided_is_never_taken_back(block_size, islands):
    """Whatever resamples, dies and ends: the answer begins with it."""
    score = Score(lambda t: 1.5 * t.count("b") - (99.0 if "dd" in t else 0.0), prefixes=True)
    compiled, sent_early = LANGUAGE.compile(TARGET.vocabulary), 0
    for seed, select in itertools.product(range(15), ["sample", "best", "vote"]):
        engine = Engine(TARGET, DRAFT if block_size else None)
        made = request(
            TARGET, PROMPT, seed=seed, max_tokens=4, n_particles=4,
            potentials=[score], block_size=block_size, islands=islands, ess_threshold=0.9,
            select=select,
        )  # fmt: skip
        made.constraint = compiled
        engine.add(made)
        sent = ""
        while engine.busy:
            for event in engine.step():
                if isinstance(event, StepEvent):
                    now = decided(event)
                    assert now.startswith(sent)
                    sent = now
                elif isinstance(event, ResultEvent) and event.result.selected:
                    assert event.result.text.startswith(sent)
                    sent_early += bool(sent)
    assert sent_early > 1


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OptionError, match=f"cannot listen at 127.0.0.1:{port}: .*another"):
            serve(Settings(model="./no such model", port=port))
