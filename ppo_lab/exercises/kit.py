"""What an exercise is, and how an answer to it is judged.

An answer is a function. It is run on the cases of its exercise, each time on fresh copies of the inputs, and compared
with numbers that are stored in the case. Nothing an answer returns is ever compared with something that the answer,
or the code under study, has computed.
"""

import copy
import inspect
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Measured = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """One question with its answer: the inputs by name, and the stored result, a tensor or one tensor per part."""

    name: str
    inputs: Inputs
    expected: Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Mistake:
    """A wrong answer that people give. `when` completes "This is what you get when …"; `hint` says where to look."""

    when: str
    hint: str
    function: Callable


def call(function: Callable, inputs: Inputs) -> Any:
    """The ordinary measurement: what the function returns."""
    return function(**inputs)


@dataclass(frozen=True, eq=False)
class Exercise:
    """A function to be written, and how to tell whether it is right.

    parts: what the result is called, one name for each tensor. given: for a find-the-bug exercise, the code with the
    bug in it. measure(function, inputs): runs the function and returns what is compared, if that is more than its
    result.
    """

    name: str
    parts: tuple[str, ...]
    cases: tuple[Case, ...]
    mistakes: tuple[Mistake, ...]
    given: Callable | None = None
    measure: Callable[[Callable, Inputs], Any] = call


class Unfit(Exception):
    """A result that cannot be compared. The message says so in one line."""


def loss_and_gradient(of: str) -> Callable[[Callable, Inputs], Any]:
    """The measurement of a loss: its value, and its gradient with respect to the input of that name."""

    def measure(function: Callable, inputs: Inputs) -> Any:
        variable = inputs[of].requires_grad_()
        loss = function(**inputs)
        if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad):
            return loss, torch.zeros_like(variable)
        return loss, torch.autograd.grad(loss, variable, materialize_grads=True)[0]

    return measure


def judge(exercise: Exercise, function: Callable) -> str:
    """What to tell the author of an answer. Only an answer that is right in every case gets a text with a ✓."""
    fault = _unusable(exercise, function)
    if fault:
        return f"✗ {exercise.name}: {fault}"
    answers = [_attempt(exercise, function, case) for case in exercise.cases]
    for number, (case, answer) in enumerate(zip(exercise.cases, answers, strict=True), start=1):
        place = f'case {number} of {len(answers)}, "{case.name}"'
        if isinstance(answer, NotImplementedError):
            return f"○ {exercise.name}: not yet" + (f" ({_first_line(answer)})" if str(answer) else "")
        if isinstance(answer, Unfit):
            return f"✗ {exercise.name}: {place}: {answer}"
        if isinstance(answer, Exception):
            return f"✗ {exercise.name}: {type(answer).__name__} in {place}: {_crash(answer, function)}"
        if not _equal(answer, _as_parts(case.expected)):
            return _wrong(exercise, answers, number - 1, place)
    return f"✓ {exercise.name}: {len(answers)} cases\n{_names(exercise.cases)}"


def _unusable(exercise: Exercise, function: Callable) -> str:
    if not callable(function):
        kind = _kind(function)
        return f'give the function itself, as in check("{exercise.name}", my_function); got {kind}'
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none that can be read
        return ""
    inputs = exercise.cases[0].inputs
    try:
        signature.bind(**inputs)
    except TypeError:
        return f"the function must take ({', '.join(inputs)}), and takes {signature}"
    return ""


def _attempt(exercise: Exercise, function: Callable, case: Case) -> Measured | Exception:
    """The answer to one case, or what went wrong on the way to it."""
    inputs = copy.deepcopy(case.inputs)
    try:
        result = exercise.measure(function, inputs)
        answer = _comparable(result, exercise.parts, _as_parts(case.expected))
        _check_untouched(case.inputs, inputs)
    except Exception as error:  # whatever the author's code may raise is part of the verdict
        return error
    return answer


def _as_parts(result: Any) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def _comparable(result: Any, names: tuple[str, ...], expected: Measured) -> Measured:
    """The parts of a result in double precision, detached and copied. Raises Unfit unless type and shape are right."""
    if len(names) > 1 and not (isinstance(result, tuple | list) and len(result) == len(names)):
        raise Unfit(f"must return {' and '.join(names)}, got {_kind(result)}")
    parts = result if len(names) > 1 else (result,)
    return tuple(_one_part(*part) for part in zip(parts, names, expected, strict=True))


def _one_part(part: Any, name: str, expected: Tensor) -> Tensor:
    if expected.ndim == 0 and isinstance(part, int | float):
        part = torch.tensor(float(part))
    if not isinstance(part, Tensor):
        forgotten = " (is there a return?)" if part is None else ""
        raise Unfit(f"{name} must be a torch tensor, got {_kind(part)}{forgotten}")
    if part.shape != expected.shape:
        raise Unfit(f"{name} must have shape {tuple(expected.shape)}, got {tuple(part.shape)}")
    # A copy: an author may write all results into one tensor.
    return part.detach().to("cpu", torch.float64, copy=True)


def _check_untouched(before: Inputs, after: Inputs) -> None:
    for name, old in before.items():
        if isinstance(old, Tensor) and not (old.shape == after[name].shape and _identical(old, after[name].detach())):
            raise Unfit(f"the function changed its input {name}; work on a copy, {name}.clone()")


def _identical(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.double(), y.double(), rtol=0, atol=0, equal_nan=True)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if type(value).__module__ == "numpy":
        return f"a NumPy {type(value).__name__}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _crash(error: Exception, function: Callable) -> str:
    """The message of an error, and the line of the author's own code that led to it."""
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.line for frame in frames if code and frame.filename == code.co_filename and frame.line]
    return _first_line(error) + (f"\n  in the line: {own[-1]}" if own else "")


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _equal(answer: Measured | Exception, other: Measured | Exception) -> bool:
    if isinstance(answer, Exception) or isinstance(other, Exception):
        return False
    return all(_same(x, y) for x, y in zip(answer, other, strict=True))


def _wrong(exercise: Exercise, answers: list[Measured | Exception], index: int, place: str) -> str:
    """The report on the first case with a wrong number."""
    case, answer = exercise.cases[index], answers[index]
    lines = [f"  {name} = {_show(value)}" for name, value in case.inputs.items()]
    for name, got, expected in zip(exercise.parts, answer, _as_parts(case.expected), strict=True):
        if not _same(got, expected):
            lines += [f"  expected {name}: {_show(expected)}", f"  got      {name}: {_show(got)}"]
            if got.isnan().any() and not expected.isnan().any():
                place += f": {name} holds NaN"
    if exercise.given and _agreement(exercise, exercise.given, answers) == len(answers):
        return "\n".join([f"○ {exercise.name}: the bug is still in it: {place}", *lines])
    mistake = _recognise(exercise, answers, index)
    if mistake:
        lines += [_wrapped(f"This is what you get when {mistake.when}."), _wrapped(f"Hint: {mistake.hint}")]
    return "\n".join([f"✗ {exercise.name}: {place}", *lines])


def _agreement(exercise: Exercise, function: Callable, answers: list[Measured | Exception]) -> int:
    """In how many cases a known function gives the same answers."""
    return sum(_equal(_attempt(exercise, function, case), a) for case, a in zip(exercise.cases, answers, strict=True))


def _recognise(exercise: Exercise, answers: list[Measured | Exception], index: int) -> Mistake | None:
    """The known mistake that gives this number in this case; of several, the one that agrees in most cases."""
    case = exercise.cases[index]
    found = [m for m in exercise.mistakes if _equal(_attempt(exercise, m.function, case), answers[index])]
    return max(found, key=lambda m: _agreement(exercise, m.function, answers), default=None)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=88, initial_indent="  ", subsequent_indent="    ")


def _names(cases: tuple[Case, ...]) -> str:
    """The names of the cases in lines that break between names only."""
    unbroken = (case.name.replace(" ", "\u00a0") for case in cases)
    return textwrap.fill("\u00a0· ".join(unbroken), width=88, initial_indent="  ", subsequent_indent="  ").replace(
        "\u00a0", " "
    )


def _show(value: Any) -> str:
    """A value in few characters; floats with six digits."""
    if isinstance(value, Tensor):
        return _show(value.detach().tolist())
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
