"""A process reward with a checker: word problems whose equations have to be right.

The reward reads what is written so far, at the end of every line or sentence, and checks each
equation in it: a right one counts for the text if it works with numbers of the problem or with
results it has found, and a wrong one counts against it. Nobody needs to know the answer; where it
is known, a second reward asks for it at the end.
"""

import operator
import re

import guided_smc
from guided_smc import rewards

PROBLEMS = [
    ("Tom has 3 boxes with 4 apples each. He eats 2 apples. How many are left?", "10"),
    ("A bus has 12 seats. 5 people get on, then 4 more. How many seats are free?", "3"),
]
ASK = "\n\nSolve it step by step, and write each step as an equation."

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "x": operator.mul}
EQUATION = re.compile(r"(\d+)\s*([-+*x])\s*(\d+)\s*=\s*(\d+)(?!\d)")


def check(text: str, problem: str) -> tuple[int, int]:
    """How many different equations of a text are right and of use, and how many are wrong."""
    known = set(re.findall(r"\d+", problem))
    right = wrong = 0
    for a, sign, b, result in dict.fromkeys(EQUATION.findall(text)):
        if OPERATIONS[sign](int(a), int(b)) != int(result):
            wrong += 1
        elif a in known and b in known:
            right += 1
            known.add(result)
    return right, wrong


def steps(completions, problem):
    """Right equations less wrong ones, of each text: the problem is a column."""
    checked = [check(text, p) for text, p in zip(completions, problem, strict=True)]
    return [right - wrong for right, wrong in checked]


def answered(completions, answer):
    """Whether the last number of each text is the answer: a column of the problem."""
    last = [(re.findall(r"\d+", text) or [""])[-1] for text in completions]
    return [float(number == known) for number, known in zip(last, answer, strict=True)]


def main() -> None:
    lm = guided_smc.load("smollm2-135m")
    solution = rewards.reward(steps, on="sentence") + 2.0 * rewards.reward(answered, name="answer")
    for problem, answer in PROBLEMS:
        for beta in (0.0, 2.0):
            out = lm.generate(
                problem + ASK,
                reward=solution.with_(name="solution"),
                beta=beta,
                columns={"problem": problem, "answer": answer},
                n_particles=12,
                max_tokens=48,
                temperature=0.8,
                seed=5,
            )
            right, wrong = check(out.text, problem)
            mean = out.rewards["solution"].tilted.value
            print(
                f"beta {beta:.0f}: {right} right and {wrong} wrong steps; mean reward {mean:+.2f}"
            )
            print("    " + " ".join(out.text.split()))


if __name__ == "__main__":
    main()
