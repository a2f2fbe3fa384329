"""Objects named as `module:name`."""

import collections
import importlib
import sys

import pytest

from guided_smc.errors import OptionError
from guided_smc.references import load_object


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, and modules and paths forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_a_name_in_an_installed_module_is_found():
    assert load_object("collections:OrderedDict") is collections.OrderedDict
    assert load_object("collections:OrderedDict.fromkeys")("a") == {"a": None}


def test_a_module_in_the_current_folder_is_found(folder):
    (folder / "mine_a.py").write_text("def score(text):\n    return len(text)\n")
    assert load_object("mine_a:score")("abc") == 3


def test_a_module_in_a_package_is_found(folder):
    (folder / "mine_b").mkdir()
    (folder / "mine_b" / "scores.py").write_text("LIMIT = 3\n")
    assert load_object("mine_b.scores:LIMIT") == 3


@pytest.mark.parametrize(
    "spec", ["", "collections", ":name", "collections:", "a:b:c", "m:a..b", ".m:a", "m:a b", "m:1"]
)
def test_another_form_is_refused(spec):
    with pytest.raises(OptionError, match="module:name"):
        load_object(spec)


def test_a_missing_module_is_named(folder):
    with pytest.raises(OptionError, match="no module 'no_such_module'"):
        load_object("no_such_module:f")
    with pytest.raises(OptionError, match=r"no module 'collections\.no_such'"):
        load_object("collections.no_such:f")
    with pytest.raises(OptionError, match="no module 'no_such_module'"):
        load_object("no_such_module.deeper:f")


def test_a_missing_attribute_is_named_with_what_is_close():
    with pytest.raises(OptionError, match=r"'OrderedDct'.*OrderedDict"):
        load_object("collections:OrderedDct")
    with pytest.raises(OptionError, match=r"collections\.OrderedDict has no attribute 'nothing'"):
        load_object("collections:OrderedDict.nothing")


@pytest.mark.parametrize(
    "source, reason, line",
    [
        ("x = 1\n\nimport no_such_library\n", "ModuleNotFoundError.*no_such_library", 3),
        ("def f():\n    raise ValueError('two\\nlines')\n\nf()\n", "ValueError: two lines", 2),
        ("import json\njson.loads('{')\n", "JSONDecodeError", 2),
        ("x = 1\ny = = 2\n", "SyntaxError", 2),
        ("import sys\nsys.exit(3)\n", "SystemExit", 2),
        ("from collections import no_such_name\n", "ImportError", 1),
    ],
)
def test_an_error_while_importing_is_one_line_with_its_place(folder, source, reason, line):
    (folder / "broken_c.py").write_text(source)
    with pytest.raises(OptionError, match=f"broken_c.py:{line}: .*{reason}") as failed:
        load_object("broken_c:f")
    assert "\n" not in str(failed.value)
    assert failed.value.__cause__ is not None


def test_a_property_that_raises_is_not_a_missing_attribute(folder):
    (folder / "lazy_d.py").write_text(
        "def __getattr__(name):\n    raise RuntimeError('cannot load ' + name)\n"
    )
    with pytest.raises(OptionError, match=r"lazy_d.py:2: RuntimeError: cannot load model"):
        load_object("lazy_d:model")
