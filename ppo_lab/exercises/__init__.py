"""The exercises of the book. `check("gae", my_gae)` says whether an answer is right, or what is wrong with it."""

from collections.abc import Callable

from ppo_lab.exercises import ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09, ch10
from ppo_lab.exercises.kit import Exercise, judge

EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for chapter in (ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09, ch10)
    for exercise in chapter.EXERCISES
}


def check(name: str, function: Callable) -> None:
    """Run an answer on the cases of its exercise and print the verdict.

    ✓ and the names of the cases when all are right. ✗ and the first case that is not: its inputs, what was expected,
    what came out and, for a wrong answer that is known, what it looks like and a hint. ○ when the function is still a
    stub that raises NotImplementedError, or still holds the bug that is to be found. An error inside the function is
    shown, not raised.

    name: the exercise, as in the notebook; function: the answer itself, not its result. It is called with keyword
    arguments. Returns nothing. Raises ValueError for a name that is not an exercise.
    """
    if name not in EXERCISES:
        raise ValueError(f"name must be one of {', '.join(EXERCISES)}; got {name!r}")
    print(judge(EXERCISES[name], function))
