"""Every exercise accepts the literal solution, and names each wrong answer on its list.

The solutions are those of solutions.py: one number at a time, none of the package's code. Stored results that they
reproduce are therefore right, or wrong twice in the same way.
"""

import ast
import inspect
import textwrap
from dataclasses import replace
from importlib import import_module

import pytest
import solutions
import torch

import ppo_lab
from ppo_lab.exercises import EXERCISES
from ppo_lab.exercises.kit import judge
from ppo_lab.files import read_table
from ppo_lab.group_advantages import grpo_advantages, reinforce_pp_advantages, rloo_advantages
from ppo_lab.kl import best_of_n_kl
from ppo_lab.llm.exact import best_of_n_policy, exact_kl, optimal_policy
from ppo_lab.llm.memory import memory_budget
from ppo_lab.llm.ranks import Ranks
from ppo_lab.llm.tokens import response_mask, token_logp, token_rewards
from ppo_lab.preference import dpo_loss

ALL = list(EXERCISES.values())
MISTAKES = [(exercise, mistake) for exercise in ALL for mistake in exercise.mistakes]
BUGS = [exercise for exercise in ALL if exercise.name.startswith("repair_")]
# No arithmetic, or the work handed on to gae.
WITHOUT_PLACES = {"repair_collect", "repair_gae", "repair_time_limit", "repair_response_mask"}
FACTS = {"minibatches", "repair_response_mask"}  # compared as yes and no, and the root of 1 is 1
CHAPTERS = {
    "ch01": 5,
    "ch02": 6,
    "ch03": 6,
    "ch04": 5,
    "ch05": 5,
    "ch06": 5,
    "ch07": 5,
    "ch08": 5,
    "ch09": 5,
    "ch10": 4,
}


def named(exercise):
    return exercise.name


def mistake_id(pair):
    exercise, mistake = pair
    return f"{exercise.name}: {mistake.when}"


def solution(exercise):
    return getattr(solutions, exercise.name)


def orders(exercise):
    """The exercise with its cases rotated, so that each comes first once, and turned round."""
    cases = exercise.cases
    for i in range(len(cases)):
        yield replace(exercise, cases=cases[i:] + cases[:i])
    yield replace(exercise, cases=cases[::-1])


def test_three_to_six_exercises_a_chapter_with_a_bug_to_find_in_each():
    for name, count in CHAPTERS.items():
        chapter = import_module(f"ppo_lab.exercises.{name}").EXERCISES
        assert len(chapter) == count
        assert any(exercise.given for exercise in chapter)
    assert sum(CHAPTERS.values()) == len(ALL)


@pytest.mark.parametrize("exercise", ALL, ids=named)
def test_solution_is_accepted(exercise):
    verdict = judge(exercise, solution(exercise))
    assert verdict.startswith(f"✓ {exercise.name}: {len(exercise.cases)} cases")
    shown = " ".join(verdict.split())
    assert all(case.name in shown for case in exercise.cases)


@pytest.mark.parametrize("exercise", ALL, ids=named)
def test_at_least_three_wrong_answers_are_known_and_four_cases_asked(exercise):
    assert len(exercise.mistakes) >= 3
    assert len(exercise.cases) >= 4
    assert len({mistake.when for mistake in exercise.mistakes}) == len(exercise.mistakes)
    assert all(mistake.hint.endswith((".", "?")) for mistake in exercise.mistakes)
    assert not any(mistake.when.endswith(".") for mistake in exercise.mistakes)


@pytest.mark.parametrize("pair", MISTAKES, ids=mistake_id)
def test_wrong_answer_is_rejected_by_name_with_its_hint(pair):
    exercise, mistake = pair
    verdict = judge(exercise, mistake.function)
    assert verdict.startswith(f"✗ {exercise.name}: case ")
    shown = " ".join(verdict.split())
    assert f"This is what you get when {mistake.when}. Hint: {mistake.hint}" in shown
    assert shown.count("Hint:") == 1


@pytest.mark.parametrize("pair", MISTAKES, ids=mistake_id)
def test_wrong_answer_is_rejected_in_any_order_of_cases_and_mistakes(pair):
    exercise, mistake = pair
    for turned in orders(replace(exercise, mistakes=())):
        assert judge(turned, mistake.function).startswith("✗")
    turned = replace(exercise, mistakes=exercise.mistakes[::-1])
    assert mistake.when in " ".join(judge(turned, mistake.function).split())


@pytest.mark.parametrize("exercise", BUGS, ids=named)
def test_code_with_the_bug_is_never_accepted_and_not_explained(exercise):
    for turned in orders(exercise):
        verdict = judge(turned, exercise.given)
        assert verdict.startswith(f"○ {exercise.name}: the bug is still in it: case ")
        assert "expected " in verdict
        assert "Hint" not in verdict


@pytest.mark.parametrize(
    "name",
    [
        "repair_surrogate",
        "repair_policy_loss",
        "repair_gae",
        "repair_time_limit",
        "repair_response_mask",
        "repair_kl_controller",
        "repair_first_ratio",
        "repair_reinforce_pp",
        "repair_rank_loss",
    ],
)
def test_bug_stays_hidden_in_some_case(name):
    exercise = EXERCISES[name]
    assert any(judge(replace(exercise, cases=(case,)), exercise.given).startswith("✓") for case in exercise.cases)


@pytest.mark.parametrize("exercise", ALL, ids=named)
def test_stub_is_not_yet_done(exercise):
    def stub(**inputs):
        raise NotImplementedError

    assert judge(exercise, stub) == f"○ {exercise.name}: not yet"


@pytest.mark.parametrize("exercise", [e for e in ALL if e.name not in FACTS], ids=named)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: -x,
        lambda x: 1.01 * x + 1e-3,
        lambda x: x * 0 + 1,
        lambda x: x.flip(-1) if x.ndim else x + 1,
        lambda x: x.sqrt(),
    ],
    ids=["sign", "one percent", "ones", "reversed", "root"],
)
def test_spoilt_solution_is_rejected(exercise, spoil):
    def spoilt(**inputs):
        result = solution(exercise)(**inputs)
        parts = result if isinstance(result, tuple) else (result,)
        parts = tuple(spoil(torch.as_tensor(part, dtype=torch.float32)) for part in parts)
        return parts if isinstance(result, tuple) else parts[0]

    for turned in orders(replace(exercise, mistakes=())):
        assert judge(turned, spoilt).startswith("✗")


@pytest.mark.parametrize("exercise", ALL, ids=named)
def test_solution_that_changes_its_inputs_is_rejected(exercise):
    tensors = [name for name, x in exercise.cases[0].inputs.items() if isinstance(x, torch.Tensor)]

    def spoils(name, **inputs):
        result = solution(exercise)(**{k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in inputs.items()})
        x = inputs[name].detach()
        x.copy_(~x if x.dtype == torch.bool else x + 7)
        return result

    for name in tensors:
        verdict = judge(exercise, lambda name=name, **inputs: spoils(name, **inputs))
        assert verdict.endswith(f"the function changed its input {name}; work on a copy, {name}.clone()")


# --- mutants: one sign, one number or one comparison of a solution is changed


SWAPS = {ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Div(), ast.Div: ast.Mult()}
TURNS = {ast.Lt: ast.Gt(), ast.Gt: ast.Lt()}


class Mutation(ast.NodeTransformer):
    """Changes the i-th place that can be changed; counts all such places."""

    def __init__(self, place):
        self.place, self.seen = place, 0

    def _here(self):
        self.seen += 1
        return self.seen - 1 == self.place

    def visit_BinOp(self, node):
        self.generic_visit(node)
        if type(node.op) in SWAPS and self._here():
            node.op = SWAPS[type(node.op)]
        return node

    visit_AugAssign = visit_BinOp

    def visit_Compare(self, node):
        self.generic_visit(node)
        if type(node.ops[0]) in TURNS and self._here():
            node.ops[0] = TURNS[type(node.ops[0])]
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, int | float) and not isinstance(node.value, bool) and self._here():
            return ast.Constant(node.value + 1)
        return node


def mutant(function, place):
    """The function with one change and that line's text, or None when it has fewer places."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    mutation = Mutation(place)
    tree = ast.fix_missing_locations(mutation.visit(tree))
    if mutation.seen <= place:
        return None
    namespace = dict(vars(solutions))
    exec(compile(tree, "<mutant>", "exec"), namespace)
    return namespace[function.__name__], ast.unparse(tree)


@pytest.mark.parametrize("exercise", ALL, ids=named)
def test_no_mutant_of_the_solution_is_accepted(exercise):
    place = 0
    unnamed = replace(exercise, mistakes=())
    while changed := mutant(solution(exercise), place):
        function, code = changed
        assert not judge(unnamed, function).startswith("✓"), code
        place += 1
    assert place > 0 or exercise.name in WITHOUT_PLACES


# --- on other runs


@pytest.mark.parametrize("scenario", ["kl_spike", "stuck_critic", "reward_hacking"])
def test_the_rule_for_the_anonymous_runs_holds_for_the_stored_zoo(scenario):
    """Longer runs with all their rows, three seeds: the failure is named, and the cured run is healthy."""
    runs = {}
    for row in read_table("llm/failures.csv"):
        if row["scenario"] == scenario and row["variant"] in ("failure", "cure"):
            runs.setdefault((row["variant"], row["seed"]), []).append(row)
    names = EXERCISES["which_failure"].cases[0].inputs
    found = {
        key: solutions.which_failure(**{name: torch.tensor([row[name] for row in rows]) for name in names})
        for key, rows in runs.items()
    }
    failure = {"kl_spike": 1, "stuck_critic": 2, "reward_hacking": 3}[scenario]
    assert found == {(variant, seed): failure * (variant == "failure") for variant, seed in runs}
    assert len(runs) == 6


# --- the package's own functions are right answers


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("reward_to_go", ppo_lab.reward_to_go),
        ("importance_ratio", ppo_lab.importance_ratio),
        ("effective_sample_size", ppo_lab.effective_sample_size),
        ("clipped_surrogate", ppo_lab.clipped_surrogate),
        ("clipped_value_loss", ppo_lab.clipped_value_loss),
        ("categorical_kl", ppo_lab.categorical_kl),
        ("td_residual", ppo_lab.td_residual),
        ("n_step_advantage", ppo_lab.n_step_advantage),
        ("gae", ppo_lab.gae),
        ("whiten", ppo_lab.whiten),
        ("explained_variance", ppo_lab.explained_variance),
        ("token_rewards", token_rewards),
        ("optimal_policy", optimal_policy),
        ("group_advantages", grpo_advantages),
        ("leave_one_out", rloo_advantages),
        ("repair_reinforce_pp", reinforce_pp_advantages),
    ],
)
def test_the_packages_function_is_a_right_answer(name, function):
    assert judge(EXERCISES[name], function).startswith("✓")


def test_the_packages_functions_under_other_names_are_right_answers():
    def by_position(response_ids, eos_token_id, pad_token_id):
        return response_mask(response_ids, eos_token_id)

    def whitened(rewards, mask):
        return ppo_lab.whiten(rewards, mask, shift_mean=False)

    def controlled(kl_coef, current_kl, target_kl, n_steps, horizon):
        controller = ppo_lab.AdaptiveKLController(kl_coef, target_kl, horizon)
        controller.update(current_kl, n_steps)
        return controller.kl_coef

    def of_each_minibatch(logp, old_logp, mask, eps_clip):
        ratio = ppo_lab.importance_ratio(logp, old_logp, mask)
        rows = [
            ppo_lab.ratio_statistics(rho, torch.ones_like(rho), eps_clip, counts)
            for rho, counts in zip(ratio, mask, strict=True)
        ]
        names = ("approx_kl", "clip_fraction_outside", "ratio_max")
        return tuple(torch.stack([getattr(row, name) for row in rows]) for name in names)

    def first_ratio(logits, response_ids, old_logp, temperature):
        return ppo_lab.importance_ratio(token_logp(logits, response_ids, temperature=temperature), old_logp)

    def of_whole_answers(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, kl_coef):
        sums = [x.sum(-1) for x in (chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)]
        return dpo_loss(*sums, kl_coef=kl_coef).total

    def distance_of_the_best(probs, scores, n):
        logp = probs.log()
        return exact_kl(best_of_n_policy(logp, scores, n), logp), best_of_n_kl(n)

    def on_this_rank(rows, rank, world_size):
        return Ranks(rank, world_size).share(rows)

    def held(n_params, stage, n_gpus):
        row = memory_budget(n_params, zero_stage=stage, n_gpus=n_gpus).rows[0]
        return row.parameters, row.gradients, row.optimizer

    def weights(old_logp, sampler_logp, mask, cap):
        return ppo_lab.importance_ratio(old_logp, sampler_logp, mask).clamp(max=cap)

    def loss_for_deepspeed(losses, mask, count, world_size):
        return world_size * ppo_lab.masked_mean(losses, mask, count=count)

    assert judge(EXERCISES["ratio_report"], of_each_minibatch).startswith("✓")
    assert judge(EXERCISES["repair_first_ratio"], first_ratio).startswith("✓")
    assert judge(EXERCISES["dpo_loss"], of_whole_answers).startswith("✓")
    assert judge(EXERCISES["best_of_n_kl"], distance_of_the_best).startswith("✓")
    assert judge(EXERCISES["rank_share"], on_this_rank).startswith("✓")
    assert judge(EXERCISES["zero_bytes"], held).startswith("✓")
    assert judge(EXERCISES["sampler_weights"], weights).startswith("✓")
    assert judge(EXERCISES["repair_rank_loss"], loss_for_deepspeed).startswith("✓")
    assert judge(EXERCISES["repair_response_mask"], by_position).startswith("✓")
    assert judge(EXERCISES["whiten_keep_mean"], whitened).startswith("✓")
    assert judge(EXERCISES["repair_kl_controller"], controlled).startswith("✓")
