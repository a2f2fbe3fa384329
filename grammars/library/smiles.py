"""SMILES: molecules as texts."""

from __future__ import annotations

from guided_smc.grammars.library.base import Ready, listed, source
from guided_smc.grammars.matching import Limits


@listed(
    accepted=(
        "CCO",
        "c1ccccc1",
        "CC(=O)Oc1ccccc1C(=O)O",
        "N[C@@H](C)C(=O)O",
        "[Na+].[Cl-]",
        "C/C=C\\C",
        "[13CH4]",
        "C1CC2CCC1CC2",
        "CN1C=NC2=C1C(=O)N(C(=O)N2C)C",
    ),
    refused=(
        "",
        "C(",
        "C1CC",
        "C)",
        "()",
        "C=",
        "CX",
        "[C",
        "[Xx]",
        "C11",
        "C=1CCC#1",
        "C..C",
        "1CC1",
    ),
)
def smiles(*, limits: Limits | None = None) -> Ready:
    r"""Molecules whose brackets, branches and ring bonds are well formed.

    Dialect: OpenSMILES 1.0: the organic subset and its aromatic forms; bracket atoms with isotope,
    `@` or `@@`, hydrogens, charge and class; bonds `- = # $ : / \`; branches, up to 63 in one
    another; several parts divided by a dot; ring bonds with the digits 0 to 9, each closed before
    it opens again, on another atom, and with the same bond symbol where both ends have one.

    Left out: `%` with two digits, chirality classes such as `@TH1`, a dot within a branch. Not
    checked, since it is no matter of grammar: valences, whether aromatic rings can be kekulised,
    that a ring bond joins no neighbours (`C1C1`), and that `/` and `\` mean something.

    Args:
        limits: What the grammar may cost; by default enough for rings of hundreds of atoms.

    Returns:
        A constraint whose values are the texts.
    """
    symbols = ("single", "double", "triple", "quadruple", "aromatic", "directed")
    rules = [f"ring::_: {_rings(0)}\n"]
    rules += [f"{name}::_: {_rings(code)}\n" for code, name in enumerate(symbols, start=1)]
    return Ready("".join([source("smiles"), *rules]), "smiles", limits=limits or _LIMITS)


_LIMITS = Limits(max_mask_items=500_000)
"""Where a ring closes, the parser's work grows with its length."""


def _rings(symbol: int) -> str:
    """The alternatives of ring bonds that are opened, or closed with the same symbol or none."""
    alternatives = []
    for digit in range(10):
        opened = 1 << digit | 1 << (10 + digit) | symbol << (20 + 3 * digit)
        closed = 0xFFFF_FFFF_FFFF_FFFF ^ (1 << digit | 7 << (20 + 3 * digit))
        kept = f"[{20 + 3 * digit}:{23 + 3 * digit}]"
        fits = f"or(eq({kept}, 0), eq({kept}, {symbol}))" if symbol else "true"
        alternatives += [
            f'"{digit}" after_atom::bit_or({opened:#x}) %if bit_clear({digit})',
            f'"{digit}" after_atom::bit_and({closed:#x}) '
            f"%if and(and(bit_set({digit}), bit_clear({10 + digit})), {fits})",
        ]
    return " | ".join(alternatives)
