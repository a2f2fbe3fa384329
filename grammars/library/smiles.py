"""SMILES: molecules as texts."""

from __future__ import annotations

from guided_smc.grammars.library.base import Ready, listed, literal, source


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
def smiles() -> Ready:
    r"""Molecules whose brackets, branches and ring bonds are well formed.

    Dialect: OpenSMILES 1.0: the organic subset and its aromatic forms; bracket atoms with isotope,
    `@` or `@@`, hydrogens, charge and class; bonds `- = # $ : / \`; branches, up to 63 in one
    another; several parts divided by a dot; ring bonds with the digits 0 to 9, each closed before
    it opens again, on another atom, and with the same bond symbol where both ends have one.

    Left out: `%` with two digits, chirality classes such as `@TH1`, a dot within a branch. Not
    checked, since it is no matter of grammar: valences, whether aromatic rings can be kekulised,
    that a ring bond joins no neighbours (`C1C1`), and that `/` and `\` mean something.

    Returns:
        A constraint whose values are the texts.
    """
    rings = " | ".join(_rings(digit) for digit in range(10))
    return Ready(f"{source('smiles')}ring::_: {rings}\n", "smiles")


_BONDS = {"-": 1, "=": 2, "#": 3, "$": 4, ":": 5}


def _rings(digit: int) -> str:
    """The alternatives in which a ring bond is opened, or closed with the same symbol or none."""
    opened, fresh = 1 << digit, 1 << (10 + digit)
    symbol = f"[{20 + 3 * digit}:{23 + 3 * digit}]"
    rest = 0xFFFF_FFFF_FFFF_FFFF ^ (opened | 7 << (20 + 3 * digit))
    alternatives = []
    for written, code in {"": 0, **_BONDS, "/": 6, "\\": 6}.items():
        ring = literal(f"{written}{digit}")
        new = opened | fresh | code << (20 + 3 * digit)
        fits = f"or(eq({symbol}, 0), eq({symbol}, {code}))" if code else "true"
        alternatives += [
            f"{ring} after_atom::bit_or({new:#x}) %if bit_clear({digit})",
            f"{ring} after_atom::bit_and({rest:#x}) "
            f"%if and(bit_set({digit}), and(bit_clear({10 + digit}), {fits}))",
        ]
    return " | ".join(alternatives)
