"""What fuses work on a step's critical path, for tensors on a device.

Every function here is written twice: in torch, which says what is meant and is what runs on a CPU,
and as a Triton kernel in the file beside it (`sampling.py`, `sampling_triton.py`), which runs on
CUDA. Tensors go in and come out, nothing waits for the device, and the sizes of all results follow
from those of the arguments: so whole steps can be captured as CUDA graphs. All are registered as
torch operators (`torch.ops.guided_smc`), so that torch.compile sees their results' shapes.

Names are imported when they are first used; Triton only when a kernel runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from guided_smc.lazy import lazily

if TYPE_CHECKING:
    from guided_smc.kernels.automata import DeviceAutomaton, automaton_masks, automaton_step
    from guided_smc.kernels.page_tables import resample_pages
    from guided_smc.kernels.sampling import sample_masked
    from guided_smc.kernels.verification import verify
    from guided_smc.kernels.weighing import weigh_resample
    from guided_smc.kernels.windows import move_rows

_HOME = {
    "DeviceAutomaton": "automata",
    "automaton_masks": "automata",
    "automaton_step": "automata",
    "move_rows": "windows",
    "resample_pages": "page_tables",
    "sample_masked": "sampling",
    "verify": "verification",
    "weigh_resample": "weighing",
}

__all__ = [
    "DeviceAutomaton",
    "automaton_masks",
    "automaton_step",
    "move_rows",
    "resample_pages",
    "sample_masked",
    "verify",
    "weigh_resample",
]

__getattr__, __dir__ = lazily(globals(), _HOME)
