"""Chess moves."""

from __future__ import annotations

from guided_smc.grammars.library.base import Ready, ReadyPattern, check_count, either, listed
from guided_smc.grammars.matching import Limits

_FILES = "abcdefgh"


def _move() -> str:
    """One move in SAN, as a regular expression."""
    square, take = "[a-h][1-8]", "x?"
    captures = "|".join(
        f"{a}x[{''.join(_FILES[j] for j in (i - 1, i + 1) if 0 <= j < 8)}]"
        for i, a in enumerate(_FILES)
    )
    pawn = f"([a-h]|{captures})([2-7]|[18]=[QRBN])"
    piece = f"[QRBN]([a-h]?[1-8]?){take}{square}"
    return f"({pawn}|{piece}|K{take}{square}|O-O(-O)?)[+#]?"


@listed(
    accepted=("e4", "Nf3", "exd5", "O-O", "O-O-O+", "Rad1", "R1e2", "Qh4xe1#", "gxh8=Q+", "Kxd2"),
    refused=(
        "",
        "e9",
        "i4",
        "exe5",
        "axc5",
        "e8",
        "e4=Q",
        "Pe4",
        "0-0",
        "Kab1",
        "nf3",
        "e2e4",
        "e4!",
    ),
)
def chess_san() -> ReadyPattern:
    """One move in standard algebraic notation.

    Dialect: the export format of the PGN standard (section 8.2.3): pieces `K Q R B N`, where need
    be with the file, the rank or the square of departure, `x` for captures, promotions with `=`,
    castling with the letter O, `+` or `#` for check. Pawns capture on a neighbouring file, and
    promote exactly on the first and last rank. Left out: annotations (`!`), zeros for castling,
    and promotion without `=`.

    Not checked: whether the move is legal on a board, which no grammar knows. For that multiply by
    a `predicate` that asks python-chess.

    Returns:
        A constraint whose values are the texts.
    """
    return ReadyPattern(_move(), "chess_san")


@listed(
    accepted=("1. e4 e5 2. Nf3 Nc6", "1. d4", "1. f3 e5 2. g4 Qh4# 0-1", "1. e4 *"),
    refused=(
        "",
        "1. e4 2. e5",
        "2. e4",
        "1.e4",
        "1. e4 e5 3. d4",
        "1. e4 e5 ",
        "e4 e5",
        "1. e4 1/2",
    ),
)
def chess_moves(*, max_moves: int = 40, limits: Limits | None = None) -> Ready:
    """The moves of a game from its start, numbered one by one.

    Dialect: movetext of the PGN standard, as its export format writes it on one line (`1. e4 e5
    2. Nf3`), with moves as in `chess_san`, and perhaps a result (`1-0`, `0-1`, `1/2-1/2`, `*`).
    Left out: comments, variations, annotations. Not checked: whether the moves are legal.

    Args:
        max_moves: Most full moves; the grammar grows with them.
        limits: What the grammar may cost.

    Returns:
        A constraint whose values are the texts.

    Raises:
        ConstraintError: `max_moves` is out of bounds.
    """
    check_count(max_moves, "max_moves", 1, 300)
    rules = [f"start: move_1\nSAN: /{_move()}/\n"]
    rules.append(f"RESULT: {either(['1-0', '0-1', '1/2-1/2', '*'])}\n")
    for n in range(1, max_moves + 1):
        more = f"move_{n + 1} | RESULT" if n < max_moves else "RESULT"
        rules.append(f'move_{n}: "{n}. " SAN [" " (SAN [" " ({more})] | RESULT)]\n')
    return Ready("".join(rules), "chess_moves", limits=limits)
