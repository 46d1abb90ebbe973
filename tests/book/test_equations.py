"""Each formula of the book has a function that cites its section, a notebook section and a test; the page is fresh."""

import importlib.util
import json
import re
from collections import Counter

import pytest
from notebook_rules import ROOT, cells

spec = importlib.util.spec_from_file_location("equations", ROOT / "tools" / "equations.py")
equations = importlib.util.module_from_spec(spec)
spec.loader.exec_module(equations)

FORMULAS = equations.read_formulas()
TESTS = equations.read_tests()


def headings(notebook):
    nb = json.loads((ROOT / "chapters" / f"{notebook}.ipynb").read_text(encoding="utf-8"))
    prose = "\n".join(source for _, _, source in cells(nb, "markdown"))
    return re.findall(r"^#+ (.*)$", prose, flags=re.M)


def test_the_inventory_holds_every_displayed_formula_once():
    """Counted in the two chapters: how many formulas each section sets on lines of their own."""
    displayed = [f for f in FORMULAS if not (f.get("inline") or f.get("named"))]
    counted = Counter(f.get("place", f["section"]) for f in displayed)
    assert counted == {
        "§13.1.1": 3, "§13.1.2": 6, "§13.1.3": 2, "§13.1.4": 4, "§13.2.2": 5, "§13.3.1": 1, "§13.3.2": 1, "§13.3.3": 1,
        "§13.3.4": 1, "§13.4.1": 3, "§13.4.2": 5, "§13.4.3": 1, "§13.5.3": 1, "§13.6.1": 2, "§13.6.2": 1, "§13.6.3": 2,
        "思考题 2": 1, "A07 §1.1": 1, "A07 §2.1": 1, "A07 §2.2": 1, "A07 §3": 1, "A07 §4.1": 3,
    }  # fmt: skip
    assert max(Counter(f["id"] for f in FORMULAS).values()) == 1


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f["id"])
def test_its_function_cites_its_section(formula):
    assert ("function" in formula) != ("none" in formula)
    if "function" in formula:
        assert formula["section"] in equations.cited_sections(formula["function"])


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f["id"])
def test_its_notebook_section_exists(formula):
    assert headings(formula["notebook"]).count(formula["heading"]) == 1


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f["id"])
def test_a_test_holds_it(formula):
    assert TESTS.get(formula["id"])


def test_every_mark_names_a_formula():
    assert set(TESTS) <= {formula["id"] for formula in FORMULAS}


def test_no_bar_breaks_the_table():
    assert [formula["id"] for formula in FORMULAS if "|" in formula["latex"]] == []


def test_the_page_is_fresh():
    """If not: python tools/equations.py."""
    assert equations.PAGE.read_text(encoding="utf-8") == equations.render()
