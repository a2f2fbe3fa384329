"""What the tests of the viewer share: records of runs, and where things stand in the picture."""

from __future__ import annotations

from guided_smc import Vocabulary
from guided_smc.models.table import TableModel
from guided_smc.records import details

ASCII = Vocabulary([*(bytes([c]) for c in (10, *range(32, 127))), b""], eos_ids=[96])
LETTERS = TableModel.random(ASCII, seed=3, eos_probability=0.02)


def record_of(result, index=0, prompt="a", **changes):
    record = {"index": index, "text": result.text, "finish_reason": result.finish_reason}
    record |= {"log_evidence": result.log_evidence, "seed": result.seed, "restarts": 0}
    return record | details(result, prompt=prompt, options=None) | changes


def node(page, step, slot):
    """Where a particle stands in the picture, in pixels of the page."""
    frame = page.get_by_role("application")
    frame.scroll_into_view_if_needed()
    return page.evaluate(
        """([step, slot]) => {
            const svg = document.querySelector('.frame svg');
            const box = svg.getBoundingClientRect();
            const labels = [...svg.querySelectorAll('g.axis text')];
            const y = labels.find((t) => t.textContent === String(slot)
                && t.getAttribute('text-anchor') === 'end').getBoundingClientRect();
            const x = labels.find((t) => t.textContent === (step ? String(step) : 'step 0')
                && t.getAttribute('text-anchor') === 'middle').getBoundingClientRect();
            return [x.x + x.width / 2, y.y + y.height / 2];
        }""",
        [step, slot],
    )
