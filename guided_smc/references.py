"""Python objects named on the command line as `module:name`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import Any

from guided_smc.errors import OptionError


def load_object(spec: str) -> Any:
    """Import what `module:name` names; the current folder is looked in first.

    Args:
        spec: A dotted module and, after the colon, a name in it (dots lead into classes).

    Raises:
        OptionError: The spec has another form, there is no such module or name, or importing the
            module, or reading the name, failed (with the file and line).
    """
    module_name, _, path = spec.partition(":")
    names = path.split(".")
    if not module_name or module_name.startswith(".") or not all(n.isidentifier() for n in names):
        raise OptionError(f"expected `module:name`, such as `rewards:politeness`, got {spec!r}")
    found: Any = _import(module_name)
    for i, name in enumerate(names):
        try:
            found = getattr(found, name)
        except AttributeError:
            where = ".".join([module_name, *names[:i]])
            close = difflib.get_close_matches(name, dir(found), n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise OptionError(f"{where} has no attribute {name!r} ({spec}){hint}") from None
        except Exception as error:
            raise _failed(f"reading {name} of {module_name}", error) from error
    return found


def _import(name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"there is no module {error.name!r} in {folder} or among the installed packages"
            ) from None
        raise _failed(f"importing {name}", error) from error
    except (Exception, SystemExit) as error:
        raise _failed(f"importing {name}", error) from error


def _failed(what: str, error: BaseException) -> OptionError:
    """An error of the user's code in one line, with the place in it."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename:
        reason = f"{type(error).__name__}: {error.msg}"
        place = f"{error.filename}:{error.lineno}"
    else:
        ours = (__file__, importlib.__file__)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename not in ours and not frame.filename.startswith("<frozen")
        ]
        # The line in the module itself says more to its author than one deep in a library.
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else "a place without source"
    return OptionError(f"{what} failed at {place}: {' '.join(reason.split())}")
