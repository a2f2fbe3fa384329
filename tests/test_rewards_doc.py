"""Every snippet of the guide to rewards runs as it stands there, and shows what it says."""

import inspect
import re
import runpy
from pathlib import Path

import pytest
from test_reward_models import write_classifier

from guided_smc import rewards
from guided_smc.rewards.specs import READY

DOCS = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text()


@pytest.mark.model
def test_the_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_classifier(tmp_path / "judge", labels=2, names=["rude", "polite"])
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", DOCS, flags=re.M | re.S)))
    made = runpy.run_path(str(script))
    shown = capsys.readouterr().out.splitlines()
    said = re.findall(r"^print\(.*\)  # (.*(?:\*|\[').*)$", DOCS, flags=re.M)
    assert len(said) == 3
    assert set(said) <= set(shown)
    assert made["judge"].template == "text"


def test_the_guide_lists_all_ready_rewards_with_their_times():
    listed = dict(re.findall(r'^\| `(\w+)\(.*?\)` \|.*\| `"(\w+)"` \|$', DOCS, flags=re.M))
    ready = {n for n in rewards.__all__ if n.islower()}
    ready -= {"active", "from_file", "parse", "reward"}
    assert set(listed) == ready
    for name, on in listed.items():
        assert f'`on` is `"{on}"`' in inspect.getdoc(getattr(rewards, name))


def test_the_guide_lists_all_specs():
    (listed,) = re.findall(r"^Specs know (.*?)\n\n", DOCS, flags=re.M | re.S)
    assert {name for name in READY if re.search(rf"`{name}[:`]", listed)} == set(READY)
