"""A process reward with a checker: word problems whose equations have to be right.

The reward reads what is written so far, at the end of every line or sentence, and checks each
equation in it: right ones count for the text, wrong ones against it. Nobody needs to know the
answer; where it is known, a second reward asks for it at the end.
"""

import operator
import re

import guided_smc
from guided_smc import rewards

PROBLEMS = [
    ("Tom has 3 boxes with 4 apples each. He eats 2 apples. How many are left?", "10"),
    ("A bus has 12 seats. 5 people get on, then 4 more. How many seats are free?", "3"),
]
ASK = "Solve step by step. Write each step as an equation such as 2 + 3 = 5.\n\n"

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "x": operator.mul}
EQUATION = re.compile(r"(\d+)\s*([-+*x])\s*(\d+)\s*=\s*(\d+)(?!\d)")


def equations(text: str) -> list[bool]:
    """Whether each equation of the text is right."""
    return [
        OPERATIONS[sign](int(a), int(b)) == int(result)
        for a, sign, b, result in EQUATION.findall(text)
    ]


def checked(text: str) -> float:
    """Right equations, up to two, less the wrong ones."""
    found = equations(text)
    return min(2.0, found.count(True)) - found.count(False)


def answered(completions, answer):
    """Whether the last number of each text is the answer: a column of the problem."""
    last = [(re.findall(r"\d+", text) or [""])[-1] for text in completions]
    return [float(number == known) for number, known in zip(last, answer, strict=True)]


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    steps = rewards.reward(checked, on="sentence", name="steps")
    both = steps + 2.0 * rewards.reward(answered, name="answer")
    for problem, answer in PROBLEMS:
        for beta in (0.0, 2.0):
            out = lm.generate(
                ASK + problem,
                reward=both.with_(name="solution"),
                beta=beta,
                columns={"answer": answer},
                n_particles=8,
                max_tokens=48,
                seed=5,
            )
            found = equations(out.text)
            print(
                f"beta {beta:.0f}: {found.count(True)} right and {found.count(False)} wrong "
                f"equations; mean reward {out.rewards['solution'].tilted.value:+.2f}"
            )
            print("    " + " ".join(out.text.split()))


if __name__ == "__main__":
    main()
