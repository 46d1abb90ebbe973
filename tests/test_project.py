"""The files around the code agree with each other: one list of dependencies, no traces of the author's machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
DIRECT = [Requirement(line) for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]]

# Written as patterns, so that this file does not name what it looks for.
REGISTRY = re.compile(r"pypi[.]org|pythonhosted[.]org|anaconda[.]org|download[.]pytorch[.]org|npmjs[.](org|com)")
HOMES = re.compile(
    "|".join([r"(?<![\w.])/(home|Users)/\w", *(re.escape(f"{p}/") for p in {ROOT, Path.home()} - {Path("/")})])
)


@pytest.fixture(scope="module")
def environment():
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def conda_and_pip(environment):
    *conda, last = environment["dependencies"]
    return conda, last["pip"]


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_conda_and_pip_install_the_same(environment):
    _, pip = conda_and_pip(environment)
    assert [Requirement(line) for line in pip if not line.startswith("-")] == DIRECT


def test_conda_pins_the_same_versions_and_installs_ppo_lab_in_place(environment):
    _, pip = conda_and_pip(environment)
    assert [line for line in pip if line.startswith("-")] == ["-c constraints.txt", "-e .[dev]"]


def test_conda_brings_a_python_that_fits(environment):
    conda, _ = conda_and_pip(environment)
    assert conda == ["python=3.11", "pip"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert environment["channels"] == ["conda-forge", "nodefaults"]


def test_every_package_in_environment_yml_says_why_it_is_there():
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if re.match(r" +- [a-z][^=]*>=", line)]
    assert len(packages) == len(DIRECT)
    assert [line for line in packages if not re.search(r"  # .{8,}", line)] == []


def pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_every_direct_dependency_is_pinned_within_its_bounds():
    versions = {canonicalize_name(p.name): str(next(iter(p.specifier)).version) for p in pinned()}
    for needed in DIRECT:
        assert versions[canonicalize_name(needed.name)] in needed.specifier, needed


def test_pins_are_exact():
    assert [str(p) for p in pinned() if [s.operator for s in p.specifier] != ["=="]] == []
    assert "torch==2.13.0" in map(str, pinned())


def test_names_no_registry_and_no_folder_of_one_machine():
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {m.group(0)}" for p in (REGISTRY, HOMES) for m in p.finditer(text)]
    # test_notebook_rules.py holds the invented homes of bad notebooks.
    assert [line for line in found if not line.startswith("tests/book/test_notebook_rules.py")] == []


def test_every_make_target_that_is_listed_exists_and_is_documented():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.M).group(1).split()
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make ([\w-]+)", listed, flags=re.M) == phony
