"""Make chapters/EQUATIONS.md: each formula of the book, its function, its notebook section and its tests.

    python tools/equations.py

The table comes from tests/book/formulas.toml, from the `Book:` lines of the docstrings, and from the tests marked
`@pytest.mark.formula("id")`.
"""

import ast
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
INVENTORY = ROOT / "tests" / "book" / "formulas.toml"
PAGE = ROOT / "chapters" / "EQUATIONS.md"
HEAD = """# Equations

From a formula of the book to the function, to the notebook section that explains it, to the tests that hold it.
§13.x are sections of C13 「PPO 详解」, A07 § those of article 07 「PPO 算法详解」. The book writes $r_t(\\theta)$ for
the ratio; here it is $\\rho_t$. Where a formula of the book is mistaken, [ERRATA.md](ERRATA.md) says so.
§13.8 and §13.9 print no formulas: they name quantities and methods, and the last rows say what these are.

Made by `python tools/equations.py`; do not edit.

| § | formula | function | notebook section | tests |
|---|---|---|---|---|
"""


def read_formulas() -> list[dict]:
    return tomllib.loads(INVENTORY.read_text(encoding="utf-8"))["formula"]


def read_tests() -> dict[str, list[tuple[str, str]]]:
    """For each formula id the tests marked with it, as (file name, test name)."""
    marked: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.formula":
                    for formula in map(ast.literal_eval, mark.args):
                        marked.setdefault(formula, []).append((path.relative_to(ROOT).as_posix(), node.name))
    return marked


def cited_sections(function: str) -> list[str]:
    """The sections in the `Book:` line of a function given as module:name."""
    docstring = inspect.getdoc(pkgutil.resolve_name(function)) or ""
    line = re.search(r"^Book: (.*)$", docstring, flags=re.M)
    return line.group(1).split("; ") if line else []


def notebook_link(formula: dict) -> str:
    target = f"{formula['notebook']}.ipynb#{quote(formula['heading'].replace(' ', '-'), safe='')}"
    return f"[{formula['notebook'][:2]} · {formula['heading']}]({target})"


def function_link(formula: dict) -> str:
    if "none" in formula:
        return formula["none"]
    module, name = formula["function"].split(":")
    path = module.replace(".", "/")
    file = f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"
    return f"[`{module}.{name}`](../{file})"


def row(formula: dict, tests: list[tuple[str, str]]) -> str:
    links = "<br>".join(f"[`{name}`](../{path})" for path, name in tests)
    place = formula.get("place", formula["section"])
    return f"| {place} | ${formula['latex']}$ | {function_link(formula)} | {notebook_link(formula)} | {links} |\n"


def render() -> str:
    tests = read_tests()
    return HEAD + "".join(row(formula, tests.get(formula["id"], [])) for formula in read_formulas())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
