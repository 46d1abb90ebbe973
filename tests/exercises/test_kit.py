"""How an answer is judged: what is said about results that are wrong in kind, and that wrong never passes for right."""

import ast
import functools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import tensor

from ppo_lab.exercises import EXERCISES, check, kit
from ppo_lab.exercises.kit import Case, Exercise, Mistake, judge, loss_and_gradient

DOUBLE = Exercise(
    "double",
    ("doubled",),
    (
        Case("two numbers", dict(x=tensor([1.0, 2.0]), flags=tensor([True, False])), tensor([2.0, 4.0])),
        Case("zero", dict(x=tensor([0.0]), flags=tensor([True])), tensor([0.0])),
        Case("a negative number", dict(x=tensor([-3.0]), flags=tensor([True])), tensor([-6.0])),
    ),
    (
        Mistake("the number is squared", "Twice, not times itself.", lambda x, flags: x * x),
        Mistake("one is added", "Twice x is x + x.", lambda x, flags: x + 1),
        Mistake("the absolute value is doubled", "The sign stays.", lambda x, flags: 2 * x.abs()),
    ),
)


def said(capsys, name, function):
    assert check(name, function) is None
    return capsys.readouterr().out


def test_right_answer_names_its_cases():
    assert judge(DOUBLE, lambda x, flags: x + x) == "✓ double: 3 cases\n  two numbers · zero · a negative number"


def test_long_lines_break_between_names_and_words():
    names = [f"case number {i} of a long list" for i in range(6)]
    cases = tuple(replace(DOUBLE.cases[0], name=name) for name in names)
    lines = judge(replace(DOUBLE, cases=cases), lambda x, flags: 2 * x).splitlines()[1:]
    assert max(map(len, lines)) <= 88
    assert " ".join(lines).split() == " · ".join(names).split()
    assert all(line.endswith(("list ·", "list")) for line in lines)
    mistake = Mistake("x is 1 " * 10, "Look again. " * 12, lambda x, flags: torch.ones_like(x))
    verdict = judge(replace(DOUBLE, mistakes=(mistake,)), lambda x, flags: torch.ones_like(x))
    assert max(map(len, verdict.splitlines())) <= 88


def test_first_wrong_case_is_shown_with_inputs_expected_and_got():
    assert judge(DOUBLE, lambda x, flags: 3 * x).splitlines() == [
        '✗ double: case 1 of 3, "two numbers"',
        "  x = [1, 2]",
        "  flags = [True, False]",
        "  expected doubled: [2, 4]",
        "  got      doubled: [3, 6]",
    ]


def test_known_mistake_is_named_with_its_hint():
    assert judge(DOUBLE, lambda x, flags: 2 * x.abs()).splitlines() == [
        '✗ double: case 3 of 3, "a negative number"',
        "  x = [-3]",
        "  flags = [True]",
        "  expected doubled: [-6]",
        "  got      doubled: [6]",
        "  This is what you get when the absolute value is doubled.",
        "  Hint: The sign stays.",
    ]


def test_of_two_mistakes_with_the_same_number_the_one_that_agrees_elsewhere_is_named():
    both = (Mistake("x is 1 always", "", lambda x, flags: torch.ones_like(x)), *DOUBLE.mistakes)
    exercise = replace(DOUBLE, cases=(Case("one", dict(x=tensor([1.0]), flags=tensor([True])), tensor([2.0])),) * 2)
    exercise = replace(exercise, cases=(exercise.cases[0], *DOUBLE.cases), mistakes=both)
    assert "the number is squared" in judge(exercise, lambda x, flags: x * x)
    assert "x is 1 always" in judge(exercise, lambda x, flags: torch.ones_like(x))


def test_stub_is_not_yet_done(capsys):
    def stub(x, flags):
        raise NotImplementedError

    assert judge(DOUBLE, stub) == "○ double: not yet"


def test_not_implemented_by_torch_shows_what_torch_says():
    def unsupported(x, flags):
        raise NotImplementedError("'exp' not implemented for 'Bool'")

    assert judge(DOUBLE, unsupported) == "○ double: not yet ('exp' not implemented for 'Bool')"


def test_error_inside_the_answer_is_shown_with_case_and_line():
    def crashes(x, flags):
        return x[1] * torch.ones(2)

    verdict = judge(DOUBLE, crashes).splitlines()
    assert verdict == ['✗ double: case 1 of 3, "two numbers"', *verdict[1:]]  # wrong numbers come first

    def crashes_later(x, flags):
        return torch.stack([2 * x[i] for i in range(len(x))]) if len(x) > 1 else x[1]

    first, second = judge(DOUBLE, crashes_later).splitlines()
    assert first.startswith('✗ double: IndexError in case 2 of 3, "zero": index 1 is out of bounds')
    assert second == "  in the line: return torch.stack([2 * x[i] for i in range(len(x))]) if len(x) > 1 else x[1]"


def test_long_error_messages_are_cut_to_their_first_line():
    def crashes(x, flags):
        raise RuntimeError("first\nsecond")

    verdict = judge(DOUBLE, crashes)
    assert "RuntimeError" in verdict
    assert "first\n  in the line: raise" in verdict
    assert "second\n" not in verdict


def test_error_without_source_is_still_shown():
    crashes = eval("lambda x, flags: 1 / 0")
    assert judge(DOUBLE, crashes) == '✗ double: ZeroDivisionError in case 1 of 3, "two numbers": division by zero'


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_stopping_the_kernel_is_not_swallowed(error):
    def stops(x, flags):
        raise error

    with pytest.raises(error):
        judge(DOUBLE, stops)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda x, flags: None, "doubled must be a torch tensor, got None (is there a return?)"),
        (lambda x, flags: (2 * x).numpy(), "doubled must be a torch tensor, got a NumPy ndarray"),
        (lambda x, flags: (2 * x).tolist(), "doubled must be a torch tensor, got a list of 2"),
        (lambda x, flags: (2 * x, x), "doubled must be a torch tensor, got a tuple of 2"),
        (lambda x, flags: "4", "doubled must be a torch tensor, got a str"),
        (lambda x, flags: 2.0, "doubled must be a torch tensor, got a float"),
        (lambda x, flags: 2 * x[:, None], "doubled must have shape (2,), got (2, 1)"),
        (lambda x, flags: 2 * x.sum(), "doubled must have shape (2,), got ()"),
        (lambda x, flags: x.mul_(2), "the function changed its input x; work on a copy, x.clone()"),
        (
            lambda x, flags: 2 * x * flags.fill_(True),
            "the function changed its input flags; work on a copy, flags.clone()",
        ),
        (lambda x, flags: x.resize_(1, 2)[0] * 2, "the function changed its input x; work on a copy, x.clone()"),
    ],
)
def test_result_of_the_wrong_kind_gets_one_line(function, complaint):
    assert judge(DOUBLE, function) == f'✗ double: case 1 of 3, "two numbers": {complaint}'


def test_nan_is_said():
    verdict = judge(DOUBLE, lambda x, flags: x * torch.nan)
    assert verdict.splitlines()[0] == '✗ double: case 1 of 3, "two numbers": doubled holds NaN'
    assert "got      doubled: [nan, nan]" in verdict


def test_infinite_is_wrong():
    assert judge(DOUBLE, lambda x, flags: x * torch.inf).startswith("✗")


@pytest.mark.parametrize("given", [tensor([2.0, 4.0]), None, 3, "gae"])
def test_a_result_in_place_of_the_function(given):
    assert judge(DOUBLE, given).startswith(
        '✗ double: give the function itself, as in check("double", my_function); got'
    )


@pytest.mark.parametrize("function", [lambda x: 2 * x, lambda x, flag: 2 * x, lambda x, flags, more: 2 * x])
def test_other_arguments_are_named_before_anything_runs(function):
    verdict = judge(DOUBLE, function)
    assert verdict.startswith("✗ double: the function must take (x, flags), and takes (x")
    assert "\n" not in verdict


def test_numbers_are_shown_with_six_digits():
    case = Case("fractions", dict(x=tensor([[1 / 3, -2.5]]), flags=tensor(True)), tensor([[2 / 3, -5.0]]))
    verdict = judge(replace(DOUBLE, cases=(case,)), lambda x, flags: 2.001 * x)
    assert "  x = [[0.333333, -2.5]]\n" in verdict
    assert "got      doubled: [[0.667, -5.0025]]" in verdict


def test_a_scalar_may_be_a_number():
    exercise = replace(DOUBLE, cases=(Case("one", dict(x=tensor(1.5), flags=tensor(True)), tensor(3.0)),))
    for three in (3, 3.0, np.float64(3), tensor(3), tensor(3.0, requires_grad=True)):
        assert judge(exercise, lambda x, flags, result=three: result).startswith("✓")
    assert "shape (), got (1,)" in judge(exercise, lambda x, flags: tensor([3.0]))


def test_missing_part_is_named():
    exercise = replace(DOUBLE, parts=("advantages", "returns"), mistakes=())
    exercise = replace(exercise, cases=(Case("one", dict(x=tensor([1.0])), (tensor([1.0]), tensor([2.0]))),))
    assert judge(exercise, lambda x: x).endswith("must return advantages and returns, got a Tensor")
    assert judge(exercise, lambda x: (x, x, x)).endswith("must return advantages and returns, got a tuple of 3")
    assert judge(exercise, lambda x: (x, 2 * x)).startswith("✓")
    wrong = judge(exercise, lambda x: (x, x))
    assert "expected returns: [2]" in wrong
    assert "advantages" not in wrong  # that part was right


def test_results_written_into_one_tensor_are_kept_apart():
    memory = torch.zeros(1, dtype=torch.float64)
    exercise = replace(DOUBLE, cases=DOUBLE.cases[1:])
    assert judge(exercise, lambda x, flags: memory.copy_(2 * x)).startswith("✓")
    assert judge(exercise, lambda x, flags: memory.copy_(x + 5)).startswith("✗")


def test_answer_that_is_right_only_at_first_is_rejected():
    results = iter([tensor([2.0, 4.0]), tensor([0.0]), tensor([1.0])])
    assert judge(DOUBLE, lambda x, flags: next(results)).startswith('✗ double: case 3 of 3, "a negative number"')


def test_inputs_are_fresh_in_every_run():
    def spoils(x, flags):
        x += 1
        return 2 * x

    before = DOUBLE.cases[0].inputs["x"].clone()
    assert judge(DOUBLE, spoils) == judge(DOUBLE, spoils)
    assert torch.equal(DOUBLE.cases[0].inputs["x"], before)


def test_callable_objects_and_partials_are_answers_too():
    assert judge(DOUBLE, functools.partial(lambda factor, x, flags: factor * x, 2)).startswith("✓")


def test_gradient_of_a_detached_loss_counts_as_zero():
    case = Case("square", dict(x=tensor([3.0])), (tensor(9.0), tensor([6.0])))
    exercise = Exercise("square", ("loss", "gradient"), (case,), (), measure=loss_and_gradient("x"))
    assert judge(exercise, lambda x: x.square().sum()).startswith("✓")
    detached = judge(exercise, lambda x: x.detach().square().sum())
    assert "expected gradient: [6]" in detached
    assert "got      gradient: [0]" in detached
    unconnected = judge(exercise, lambda x: torch.ones(1, requires_grad=True).sum() * 9)
    assert "got      gradient: [0]" in unconnected
    assert "shape ()" in judge(exercise, lambda x: x.square())
    assert "got a NumPy" in judge(exercise, lambda x: x.square().detach().numpy())


def test_code_with_the_bug_in_it_gets_no_hint():
    exercise = replace(DOUBLE, given=lambda x, flags: 2 * x.abs())
    verdict = judge(exercise, lambda x, flags: 2 * x.abs())
    assert verdict.splitlines()[0] == '○ double: the bug is still in it: case 3 of 3, "a negative number"'
    assert "expected doubled: [-6]" in verdict
    assert "Hint" not in verdict


def test_check_prints_and_returns_nothing(capsys):
    assert said(capsys, "whiten", lambda x: x).startswith("✗ whiten: case 1 of 6")


def test_unknown_exercise_lists_the_names():
    with pytest.raises(ValueError, match=r"name must be one of reward_to_go, .*, repair_rank_loss; got 'gea'"):
        check("gea", lambda: None)


def test_names_are_unique_and_in_the_order_of_the_chapters():
    assert len(EXERCISES) == 51
    assert next(iter(EXERCISES)) == "reward_to_go"


def test_the_kit_needs_torch_and_the_mathematics_only():
    imported = set()
    for path in Path(kit.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {*names, node.module} if isinstance(node, ast.ImportFrom) else set(names)
    own = {name for name in imported if name.startswith("ppo_lab.exercises")}
    assert {name.split(".")[0] for name in imported - own} - sys.stdlib_module_names == {"torch"}
