"""The kernels as operators of torch, and as code for cards that are not there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from elsewhere import kernels_compiled
from kernel_cases import (
    automaton_case,
    moving_case,
    pages_case,
    sampling_case,
    verifying_case,
    weighing_case,
)

from guided_smc import kernels

CASES = {
    "automaton_masks": automaton_case(0, 3, 40)[0],
    "automaton_step": automaton_case(0, 3, 40)[1],
    "move_rows": moving_case(0, 3, 2, 5, 4),
    "resample_pages": pages_case(3, 2, 9),
    "sample_masked": sampling_case(0, 3, 40),
    "verify": verifying_case(0, 3, 2, 40),
    "weigh_resample": weighing_case(0, 2, 5, True, "systematic"),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_operator_keeps_what_its_registration_promises(name):
    getattr(kernels, name)  # registered when it is imported
    torch.library.opcheck(
        getattr(torch.ops.guided_smc, name).default,
        CASES[name],
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_of_operators_compiles_to_one_graph(backend):
    logits, tokens, count, bitmask, temperature, power, seed, counter, active = CASES["verify"]
    threshold = torch.tensor([0.9], dtype=torch.float64)

    def step(logits, counter, uniform):
        drawn, log_q, _ = kernels.sample_masked(
            logits[:, 0], bitmask, temperature, seed, counter, active
        )
        log_p, _, _, _, log_z = kernels.verify(
            logits, tokens, count, bitmask, temperature, power, seed, counter + 1, active
        )
        gained = (log_p.sum(-1) - log_q + log_z).nan_to_num(neginf=-3.0).unsqueeze(0)
        return drawn, *kernels.weigh_resample(
            torch.zeros_like(gained), gained, None, threshold, uniform, "systematic"
        )

    uniform = torch.full((1, 3), 0.4, dtype=torch.float64)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for a, b in zip(
        compiled(logits, counter, uniform), step(logits, counter, uniform), strict=True
    ):
        assert torch.equal(a, b)


def test_kernels_are_imported_and_run_without_triton_and_without_torch_s_compiler():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from guided_smc import kernels\n"
        "i = torch.zeros(1, dtype=torch.int64)\n"
        "assert kernels.sample_masked(torch.zeros(1, 3), None, torch.ones(1), i, i)[0] >= 0\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def compile_all(compiled, capability: int, dtype: torch.dtype, masked: bool, n: int) -> None:
    from guided_smc.kernels import (
        automata_triton,
        page_tables_triton,
        sampling_triton,
        weighing_triton,
        windows_triton,
    )

    def launched(launch, *args):
        return compiled(kernels_compiled, capability, launch, *args)

    scores, bitmask, temperature, seed, counter, active = sampling_case(0, 2, 5_001, dtype, masked)
    sampling = (scores.unsqueeze(1), None, None, bitmask, temperature, None, seed, counter, active)
    two = ["_race_blocks", "_combine_blocks"]
    assert launched(sampling_triton.launch, *sampling) == two
    assert launched(sampling_triton.launch, *verifying_case(0, 2, 2, 4_096, dtype, masked)) == two
    weighing = weighing_case(0, 2, n, masked, "systematic" if masked else "stratified")
    assert launched(weighing_triton.launch, *weighing) == ["_weigh_resample"]
    mask, step = automaton_case(0, n, 5_001)
    assert launched(automata_triton.launch_masks, *mask) == ["masks"]
    assert launched(automata_triton.launch_step, *step) == ["step"]
    pages = ["follow", "plan", "assign"]
    assert launched(page_tables_triton.launch, *pages_case(n, 5, 6 * n)) == pages
    assert launched(windows_triton.launch, *moving_case(0, n, 2, 40, 64, dtype)) == ["move"]


def test_the_kernels_compile_for_the_oldest_card(compiled):
    compile_all(compiled, 80, torch.bfloat16, True, 8)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("dtype", "masked", "n"), [(torch.float32, False, 64), (torch.float16, True, 128)]
)
def test_the_kernels_compile_for_newer_cards_and_other_types(
    compiled, capability, dtype, masked, n
):
    compile_all(compiled, capability, dtype, masked, n)
