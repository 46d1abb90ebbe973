"""Each erratum names the notebook section that calls it out and a test that shows it."""

import ast
import inspect
import json
import math
import re
from dataclasses import fields as fields_of
from urllib.parse import unquote

import pytest
import torch
from notebook_rules import ROOT, anchors, cells

from ppo_lab.clip import clipped_surrogate, clipped_value_loss
from ppo_lab.files import read_table
from ppo_lab.llm.exact import exact_kl, optimal_policy
from ppo_lab.llm.experience import Experience
from ppo_lab.llm.tokens import token_statistics
from ppo_lab.preference import dpo_loss, simpo_loss

PAGE = (ROOT / "chapters" / "ERRATA.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[`?([^\]`]+)`?\]\(([^)]+)\)")


def entries():
    """Id and fields of each entry of the page."""
    for block in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        yield block.split(" ", 1)[0], dict(re.findall(r"^- (\w[\w ]*): (.*)$", block, flags=re.M))


ENTRIES = list(entries())
PARAMETERS = pytest.mark.parametrize(("name", "fields"), ENTRIES, ids=[name for name, _ in ENTRIES])


def functions(path):
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_entry_has_a_name_of_its_own():
    assert len(ENTRIES) > 40
    assert len(dict(ENTRIES)) == len(ENTRIES)


@PARAMETERS
def test_an_entry_says_where_what_and_by_whom(name, fields):
    assert {"Where", "Right", "Source", "Notebook", "Test"} <= set(fields)


@PARAMETERS
def test_the_notebook_calls_it_out(name, fields):
    _, target = LINK.fullmatch(fields["Notebook"]).groups()
    file, anchor = target.split("#")
    path = ROOT / "chapters" / file
    nb = json.loads(path.read_text(encoding="utf-8"))
    prose = " ".join(source for _, _, source in cells(nb, "markdown"))
    assert unquote(anchor) in anchors(path)
    assert re.search(rf"Erratum\s(> )?{name}\b", prose)


@PARAMETERS
def test_its_tests_exist(name, fields):
    """An entry may have none only if it is about other work."""
    links = LINK.findall(fields["Test"])
    assert links or fields["Test"].startswith("*none: a statement about other work")
    for test, target in links:
        assert test in functions((ROOT / "chapters" / target).resolve())


def test_every_call_out_of_a_notebook_is_on_the_page():
    called = set()
    for path in (ROOT / "chapters").rglob("[!.]*.ipynb"):
        nb = json.loads(path.read_text(encoding="utf-8"))
        called |= {
            hit for _, _, source in cells(nb, "markdown") for hit in re.findall(r"Erratum ([A-CQ]\d+a?)\b", source)
        }
    assert called <= set(dict(ENTRIES))


def test_A9_the_clip_does_not_bound_the_ratio():
    """Three actions, each seen once; ε = 0.2, yet after 30 steps the good action is 1.89 times as probable."""
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(30):
        ratio = logits.softmax(-1) * 3
        optimizer.zero_grad()
        (-clipped_surrogate(ratio, torch.tensor([1.0, -0.5, -0.5], dtype=torch.float64), 0.2).mean()).backward()
        optimizer.step()
    assert logits.softmax(-1)[0].item() * 3 == pytest.approx(1.89, abs=0.005)


def test_B1_the_printed_entropy_is_no_entropy():
    """Every token equally likely: the entropy is log V, the printed term of whichever token was drawn is log V / V."""
    n_tokens = 50_000
    logp, entropy = token_statistics(torch.zeros(1, n_tokens), torch.tensor([7]))
    assert entropy.item() == pytest.approx(math.log(n_tokens), rel=1e-5)
    assert -(logp * logp.exp()).item() == pytest.approx(2.16e-4, rel=1e-2)


@pytest.mark.parametrize(("p", "slope"), [(0.9, -0.805), (0.1, 0.130)])
def test_B1_the_printed_term_pulls_likely_tokens_down_and_pushes_unlikely_ones_up(p, slope):
    logits = torch.tensor([[p, 1 - p]]).log()
    logp = token_statistics(logits, torch.tensor([0]))[0].requires_grad_()
    (-(logp * logp.exp()).sum()).backward()
    assert logp.grad.item() == pytest.approx(slope, abs=5e-4)


def test_B2_the_listing_reads_a_value_that_it_never_stored():
    """The keys of the listing, copied by hand. Ours has a field for each of them, and one for the value."""
    stored = {"x": "prompt_ids", "y": "response_ids", "logp_old": "old_logp", "Â": "advantages", "R̂": "returns"}
    read = {"x", "y", "logp_old", "Â", "v_old", "R̂"}
    assert read - set(stored) == {"v_old"}
    assert {*stored.values(), "values"} <= {field.name for field in fields_of(Experience)}


@pytest.mark.parametrize(("eps_clip_value", "course"), [(0.2, [0.08, 0.20, 0.41]), (None, [0.08, 0.20, 1.00])])
def test_C7_beyond_its_range_a_clipped_value_moves_by_momentum_alone(eps_clip_value, course):
    """A critic of one number, 0 at first, and a return of 100: after 4, 10 and 50 steps of Adam at 0.02."""
    value = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([value], lr=0.02)
    seen = []
    for _ in range(50):
        optimizer.zero_grad()
        clipped_value_loss(value, torch.zeros(1), torch.tensor([100.0]), eps_clip_value).backward()
        optimizer.step()
        seen.append(value.item())
    assert [seen[3], seen[9], seen[49]] == pytest.approx(course, abs=0.005)
    if eps_clip_value:
        assert value.grad.item() == 0


def test_C8_each_refresh_lets_the_best_policy_walk_further_from_the_first_reference():
    """Without a refresh the best policy has one distance. With one, the best of before is the next reference."""
    first = torch.tensor([0.7, 0.2, 0.1]).log()
    scores, policy, distances = torch.tensor([0.0, 1.0, 2.0]), first, []
    for _ in range(6):
        policy = optimal_policy(policy, scores, 2.0)
        distances.append(exact_kl(policy, first).item())
    assert distances == sorted(distances)
    assert distances[-1] > 5 * distances[0]
    assert policy.tolist() == pytest.approx(optimal_policy(first, scores, 2.0 / 6).tolist(), abs=1e-5)


def test_B12_two_lists_added_are_twice_as_many_items():
    """`queries + responses` as printed, and what a reward model that reads whole texts has to be given."""
    queries, responses = [[5, 6], [7]], [[1], [2, 3]]
    assert queries + responses == [[5, 6], [7], [1], [2, 3]]
    assert [query + response for query, response in zip(queries, responses, strict=True)] == [[5, 6, 1], [7, 2, 3]]


def test_C17_dpo_reads_the_reference_and_simpo_has_two_settings_instead():
    """A policy that has not moved is judged by how far it is from the reference, or, in SimPO, by itself alone."""
    asked = {loss: inspect.signature(loss).parameters for loss in (dpo_loss, simpo_loss)}
    required = {
        loss: [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        for loss, parameters in asked.items()
    }
    assert required == {dpo_loss: ["kl_coef"], simpo_loss: ["scale", "margin"]}
    assert [name for name in asked[simpo_loss] if name.startswith("ref")] == []
    policy, reference = (torch.tensor([-2.0]), torch.tensor([-3.0])), (torch.tensor([-4.0]), torch.tensor([-3.0]))
    assert dpo_loss(*policy, *policy, kl_coef=0.5).total.item() == pytest.approx(math.log(2))
    assert dpo_loss(*policy, *reference, kl_coef=0.5).total.item() == pytest.approx(math.log(1 + math.exp(-1)))


@pytest.mark.parametrize("trick", ["whiten_advantages", "eps_clip_value", "max_grad_norm"])
def test_C22_a_single_trick_of_the_book_left_out_costs_no_gold_score_on_our_task(trick):
    """Means over three seeds of finished runs, stored by the studies. The tuned run has a fixed β and no refresh."""
    gold = {"tuned": [], trick: []}
    for row in read_table("llm/tricks_final.csv"):
        if row["trick"] in gold:
            gold[row["trick"]].append(row["gold"])
    assert {len(values) for values in gold.values()} == {3}
    tuned, without = (sum(values) / 3 for values in gold.values())
    assert without > tuned - 0.05
    assert tuned > 0.5


@pytest.mark.parametrize(
    ("scenario", "off_before_the_first_step", "large_within_an_update"),
    [
        ("lagging_sampler", True, False),
        ("kl_spike", False, True),
        ("negative_kl_coef", False, False),
        ("endless_answers", False, False),
    ],
)
def test_Q3_the_ratio_before_the_first_step_and_within_an_update_tell_two_causes_from_the_others(
    scenario, off_before_the_first_step, large_within_an_update
):
    """The largest numbers of stored runs that fail, three seeds: |log ρ| of the first minibatch, and approx-KL."""
    largest = {}
    for row in read_table("llm/failures.csv"):
        if row["scenario"] == scenario and row["variant"] == "failure":
            deviation, kl = largest.get(row["seed"], (0.0, 0.0))
            largest[row["seed"]] = max(deviation, row["ratio_deviation"]), max(kl, row["approx_kl"])
    assert len(largest) == 3
    for deviation, kl in largest.values():
        assert (deviation > 1) if off_before_the_first_step else (deviation < 1e-4)
        assert (kl > 1) if large_within_an_update else (kl < 0.05)
