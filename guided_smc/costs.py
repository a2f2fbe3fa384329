"""What a pass costs: seconds by the tokens that are fed, measured once per model and kept.

A step of N particles that draft K tokens each takes

    T(N, K) = t_target(N · (K + 1)) + K · t_draft(N)

`t_target` is a function of the number of tokens in one pass, whatever rows they belong to: reading
the weights costs the same for one token as for some, and then arithmetic grows with each. `t_draft`
is one of the number of rows. Both are lines between measured points. They hold all that a pass
entails, transforms of the logits and sampling too, and of a prompt that is short.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guided_smc.errors import OptionError

if TYPE_CHECKING:
    from guided_smc.models.base import LanguageModel

Points = tuple[tuple[int, float], ...]

_FORMAT = 1
_SHAPES = ((1, 0), (1, 1), (4, 0), (4, 3), (8, 3), (16, 7))  # particles, drafted tokens
_SHAPES_WITHOUT_DRAFT = ((1, 0), (4, 0), (8, 0), (16, 0), (32, 0))
_PROMPT_TOKENS = 8
_ROUNDS = 3
_BUDGET_S = 5.0


@dataclass(frozen=True)
class CostModel:
    """Seconds of a pass, as lines between measured points.

    Below the first point the cost is that of the first; beyond the last it goes on as between the
    last two.

    Args:
        target: `(tokens fed, seconds)`, by tokens.
        draft: `(rows, seconds)` of a draft pass, by rows; empty without a draft.

    Raises:
        OptionError: The points are none, not in order, or no positive numbers.
    """

    target: Points
    draft: Points = ()

    def __post_init__(self) -> None:
        _check("target", self.target)
        if self.draft:
            _check("draft", self.draft)

    def target_seconds(self, tokens: Any) -> Any:
        """Of one target pass over so many tokens (a number or an array)."""
        return _on_lines(self.target, tokens)

    def draft_seconds(self, rows: Any) -> Any:
        """Of one draft pass over so many rows (a number or an array).

        Raises:
            OptionError: There is no draft in this model.
        """
        if not self.draft:
            raise OptionError("this cost model knows no draft: give it `draft` points")
        return _on_lines(self.draft, rows)

    def step_seconds(self, rows: int, block_size: Any) -> Any:
        """Of a step in which `rows` particles draft `block_size` tokens each (number or array)."""
        drafted = np.asarray(block_size)
        drafting = drafted * self.draft_seconds(rows) if np.any(drafted) else 0.0
        return self.target_seconds(rows * (drafted + 1)) + drafting


def _check(name: str, points: Points) -> None:
    sizes = [size for size, _ in points]
    seconds = [s for _, s in points]
    if not points or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise OptionError(f"{name}: sizes must be positive and ascending, got {sizes}")
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise OptionError(f"{name}: seconds must be positive and finite, got {seconds}")


def _on_lines(points: Points, size: Any) -> Any:
    sizes = np.array([s for s, _ in points], dtype=np.float64)
    seconds = np.array([t for _, t in points])
    inside = np.interp(size, sizes, seconds)
    if len(points) == 1:
        return inside
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    return inside + slope * np.maximum(0.0, size - sizes[-1])


NOMINAL = CostModel(
    target=((1, 1.0), (16, 1.0), (128, 4.5)),
    draft=((1, 0.25), (16, 0.25), (64, 0.75)),
)
"""For models that have no cost worth measuring (tables): the unit is a pass of the target."""


# -- measuring -----------------------------------------------------------------------------------


def measure(target: LanguageModel, draft: LanguageModel | None = None) -> CostModel:
    """Time a few steps of the engine, of different sizes; some seconds for a small model.

    The fastest of a few rounds counts, and a pass never costs more than one over more that was
    faster: whatever else the machine does only adds.
    """
    from guided_smc.models.base import WarmingModel

    for model in (target, draft):
        if isinstance(model, WarmingModel):
            model.warm_up()
    shapes = _SHAPES_WITHOUT_DRAFT if draft is None else _SHAPES
    target_s: dict[int, float] = {}
    draft_s: dict[int, float] = {}
    start = time.perf_counter()
    for done in range(_ROUNDS):
        if done > 1 and (time.perf_counter() - start) * (1 + 1 / done) > _BUDGET_S:
            break
        for n, k in shapes:
            verify, drafting = _time_step(target, draft, n, k, seed=done)
            tokens = n * (k + 1)
            target_s[tokens] = min(verify, target_s.get(tokens, math.inf))
            if drafting is not None:
                draft_s[n] = min(drafting, draft_s.get(n, math.inf))
    return CostModel(_points_of(target_s), _points_of(draft_s))


def _time_step(
    target: LanguageModel, draft: LanguageModel | None, n: int, k: int, *, seed: int
) -> tuple[float, float | None]:
    """Seconds of the target pass and of one draft pass, in one step of n particles and k tokens."""
    from guided_smc import engine
    from guided_smc.options import make_options
    from guided_smc.request import Request
    from guided_smc.results import ResultEvent

    # A cap that one step reaches: every row takes part in the passes.
    options = make_options(n_particles=n, block_size=k, max_tokens=k + 1, seed=seed)
    ordinary = np.flatnonzero(target.vocabulary.ordinary)
    request: Request[str] = Request(
        index=0,
        prompt="",
        prompt_ids=np.resize(ordinary, _PROMPT_TOKENS).tolist(),
        options=options,
        potentials=(),
        constraint=None,
        parse=str,
        value_key=str,
    )
    # On the host, since elsewhere phases tell only how long launching took.
    events = engine.run(target, [request], draft=draft, max_rows=n, step_on="host")
    (result,) = (e.result for e in events if isinstance(e, ResultEvent))
    seconds, passes = result.usage.seconds, result.usage.draft_passes
    return seconds["verify"], seconds["draft"] / passes if passes else None


def _points_of(seconds: dict[int, float]) -> Points:
    return tuple((s, min(t for m, t in seconds.items() if m >= s)) for s in sorted(seconds))


# -- keeping -------------------------------------------------------------------------------------


def load_or_measure(
    target: LanguageModel,
    draft: LanguageModel | None = None,
    *,
    again: bool = False,
    notify: Callable[[str], None] | None = None,
) -> CostModel:
    """The cost model of these models on this machine: from the cache, else measured and kept.

    It is measured once, so that what is chosen by it stays the same from run to run. Tables have
    no cost worth measuring: theirs is `NOMINAL`.

    Args:
        target: The target.
        draft: Its draft, if any.
        again: Measure even if the cache has it, and replace that.
        notify: Called with a sentence before it is measured, and if it cannot be kept.
    """
    from guided_smc.models.table import TableModel

    if isinstance(target, TableModel):
        return NOMINAL
    about = setup(target, draft)
    path = _path(about)
    kept = None if again else _read(path)
    if kept is not None:
        return kept
    if notify is not None:
        notify(f"Measuring what a pass of {target.name} costs, once (some seconds)...")
    costs = measure(target, draft)
    try:
        _write(path, about, costs)
    except OSError as error:
        if notify is not None:
            notify(
                f"What was measured cannot be kept in {path.parent} ({error.strerror}): another "
                "run will measure again, and may choose other block sizes"
            )
    return costs


def setup(target: LanguageModel, draft: LanguageModel | None) -> dict[str, Any]:
    """What a measurement holds for: models, device, threads, machine, version."""
    import torch

    from guided_smc import __version__

    return {
        "format": _FORMAT,
        "version": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "target": _describe(target),
        "draft": None if draft is None else _describe(draft),
    }


def _describe(model: LanguageModel) -> dict[str, Any]:
    import torch

    module = getattr(model, "model", None)
    device = getattr(model, "device", None)
    described = {
        "name": model.name,
        "kind": type(model).__name__,
        "vocabulary": len(model.vocabulary),
        "device": str(device),
        "dtype": str(getattr(model, "dtype", None)),
    }
    if isinstance(module, torch.nn.Module):
        described["architecture"] = type(module).__name__
        described["parameters"] = sum(p.numel() for p in module.parameters())
    if isinstance(device, torch.device) and device.type == "cuda":
        described["device"] = torch.cuda.get_device_name(device)
    return described


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _path(about: dict[str, Any]) -> Path:
    from guided_smc.models.gguf import cache_folder

    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8)
    return cache_folder() / "costs" / f"{digest.hexdigest()}.json"


def _read(path: Path) -> CostModel | None:
    """What was kept; None where there is nothing, or nothing that makes sense."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return CostModel(_points(data["target"]), _points(data["draft"]))
    except (OSError, ValueError, KeyError, TypeError, OptionError):
        return None


def _points(pairs: Sequence[Sequence[float]]) -> Points:
    return tuple((int(size), float(seconds)) for size, seconds in pairs)


def _write(path: Path, about: dict[str, Any], costs: CostModel) -> None:
    """Under another name first, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    data = {"target": costs.target, "draft": costs.draft, "setup": about}
    try:
        unfinished.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
