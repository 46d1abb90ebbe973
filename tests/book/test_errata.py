"""Each erratum names the notebook section that calls it out and a test that shows it."""

import ast
import json
import re
from urllib.parse import unquote

import pytest
import torch
from notebook_rules import ROOT, anchors, cells

from ppo_lab.clip import clipped_surrogate

PAGE = (ROOT / "chapters" / "ERRATA.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[`?([^\]`]+)`?\]\(([^)]+)\)")


def entries():
    """Id and fields of each entry of the page."""
    for block in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        yield block.split(" ", 1)[0], dict(re.findall(r"^- (\w[\w ]*): (.*)$", block, flags=re.M))


ENTRIES = list(entries())
WRITTEN = [(name, fields) for name, fields in ENTRIES if "not yet" not in fields["Notebook"]]
PARAMETERS = pytest.mark.parametrize(("name", "fields"), ENTRIES, ids=[name for name, _ in ENTRIES])


def functions(path):
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_entry_has_a_name_of_its_own():
    assert len(ENTRIES) > 40
    assert len(dict(ENTRIES)) == len(ENTRIES)


@PARAMETERS
def test_an_entry_says_where_what_and_by_whom(name, fields):
    assert {"Where", "Right", "Source", "Notebook", "Test"} <= set(fields)


def test_only_chapters_that_are_not_written_leave_gaps():
    """Chapters 01 to 05 are complete."""
    gaps = {
        gap for _, fields in ENTRIES for gap in re.findall(r"not yet: (.*?)\*", fields["Notebook"] + fields["Test"])
    }
    assert gaps <= {f"chapter {n}" for n in ("06", "07", "08", "09", "10")}


@pytest.mark.parametrize(("name", "fields"), WRITTEN, ids=[name for name, _ in WRITTEN])
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
    """An entry may have none only if it is about other work, or belongs to a chapter not written yet."""
    links = LINK.findall(fields["Test"])
    assert links or fields["Test"].startswith(("*none: a statement about other work", "*not yet: chapter"))
    for test, target in links:
        assert test in functions((ROOT / "chapters" / target).resolve())


def test_every_call_out_of_a_notebook_is_on_the_page():
    called = set()
    for path in (ROOT / "chapters").rglob("[!.]*.ipynb"):
        nb = json.loads(path.read_text(encoding="utf-8"))
        called |= {
            hit for _, _, source in cells(nb, "markdown") for hit in re.findall(r"Erratum ([A-C]\d+a?)\b", source)
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
