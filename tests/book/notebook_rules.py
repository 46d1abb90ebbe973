"""What every notebook of the book must keep to. One function per rule.

A rule takes the notebook as JSON and its path, and returns its complaints, one sentence each; none means all is well.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
IGNORE_OUTPUT = "nbval-ignore-output"
MAX_BYTES, MAX_COLUMNS, MAX_LINES, CELLS = 1_500_000, 88, 25, range(40, 91)
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

# Paths that only one machine has: homes, temporary folders, drives, this checkout.
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(home|Users|root|tmp|private|var/folders|mnt|content)/\w"
    r"|\b[A-Z]:\\Users|" + "|".join(re.escape(f"{folder}/") for folder in (ROOT, Path.home()) if len(folder.parts) > 1)
)
PATH_TRICK = re.compile(r"sys\.path|os\.chdir|PYTHONPATH|\.\./")
NETWORK = re.compile(
    r"\b(pip|conda|mamba|apt|apt-get|npm) install\b|https?://"
    r"|\b(import|from) (requests|urllib|httpx|http|socket)\b"
    r"|\b(hf_hub_download|snapshot_download|load_dataset|urlopen|urlretrieve|wget|curl)\b"
)
REMOTE_IMAGE = re.compile(
    r"!\[[^\]]*\]\(\s*(https?:)?//|<(img|iframe|script|video)\b[^>]*\bsrc=[\"']?(https?:)?//", re.I
)
IMAGE_WITHOUT_TEXT = re.compile(r"!\[\s*\]\([^)]*\)")
OBJECT_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}", re.I)
LONG_FLOAT = re.compile(r"\d\.\d{8,}")
PROGRESS_BAR = re.compile(r"[\d?](it/s|s/it)\b")
WIDGET = re.compile(r"^\w+\(children=\(|^(FloatSlider|IntSlider|HBox|VBox|Output)\(")
TALKING_DOWN = re.compile(r"\b(clearly|obviously|trivially|it is easy to see|needless to say)\b", re.I)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|<a\s[^>]*href=[\"']([^\"']+)", re.I)


def text(value: str | list[str]) -> str:
    """Notebook text is stored as one string or as a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def cells(nb: dict, kind: str) -> Iterator[tuple[int, dict, str]]:
    """Place, cell and source of every code or Markdown cell that holds something."""
    for place, cell in enumerate(nb["cells"], start=1):
        if cell["cell_type"] == kind and text(cell["source"]).strip():
            yield place, cell, text(cell["source"])


def output_texts(cell: dict) -> Iterator[str]:
    """Everything readable that a cell has stored; pictures are left out."""
    for output in cell.get("outputs", []):
        yield text(output.get("text", ""))
        yield from (text(body) for kind, body in output.get("data", {}).items() if kind.startswith("text/"))


def tags(cell: dict) -> list[str]:
    return cell["metadata"].get("tags", [])


def search(pattern: re.Pattern, nb: dict, *, sources: str = "", outputs: bool = False) -> list[str]:
    """Complaints about each place where the pattern is found; sources: "code", "markdown" or both with a space."""
    found = []
    for kind in ("code", "markdown"):
        for place, cell, source in cells(nb, kind):
            where = ([source] if kind in sources else []) + (list(output_texts(cell)) if outputs else [])
            hits = [match.group(0) for body in where for match in pattern.finditer(body)]
            found += [f"cell {place} holds {hit!r}" for hit in hits]
    return found


# Size and form


def is_small(nb: dict, path: Path) -> list[str]:
    size = path.stat().st_size
    return [f"{size} bytes, at most {MAX_BYTES}"] if size > MAX_BYTES else []


def has_short_code(nb: dict, path: Path) -> list[str]:
    found = []
    for place, _, source in cells(nb, "code"):
        lines = source.splitlines()
        widest = max(map(len, lines))
        if widest > MAX_COLUMNS:
            found.append(f"cell {place} is {widest} columns wide, at most {MAX_COLUMNS}")
        if len(lines) > MAX_LINES:
            found.append(f"cell {place} has {len(lines)} lines, at most {MAX_LINES}")
    return found


def has_the_length_of_a_chapter(nb: dict, path: Path) -> list[str]:
    if not re.match(r"(0[1-9]|1\d)_", path.name) or path.parent.name == "solutions":
        return []
    n = len(nb["cells"])
    return [] if n in CELLS else [f"{n} cells, between {CELLS.start} and {CELLS.stop - 1}"]


def begins_with_a_title(nb: dict, path: Path) -> list[str]:
    first = nb["cells"][0]
    return [] if first["cell_type"] == "markdown" and text(first["source"]).startswith("# ") else ["no title"]


def has_normal_metadata(nb: dict, path: Path) -> list[str]:
    found = [] if nb["metadata"] == METADATA else [f"metadata {nb['metadata']}"]
    found += [] if (nb["nbformat"], nb["nbformat_minor"]) == (4, 5) else ["not nbformat 4.5"]
    found += [f"cell metadata {sorted(cell['metadata'])}" for cell in nb["cells"] if set(cell["metadata"]) - {"tags"}]
    ids = [cell.get("id") for cell in nb["cells"]]
    found += [] if len(set(ids)) == len(ids) and all(ids) else ["cell ids missing or used twice"]
    return [f"{complaint}: run tools/book.py" for complaint in found]


# Code


def syntax_tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def is_plain_python(nb: dict, path: Path) -> list[str]:
    """Magics and shell lines hide installs, paths and times."""
    code = list(cells(nb, "code"))
    return [f"cell {place} is not plain Python" for place, _, source in code if syntax_tree(source) is None]


def swallows_no_error(nb: dict, path: Path) -> list[str]:
    found = []
    for place, _, source in cells(nb, "code"):
        nodes = ast.walk(syntax_tree(source) or ast.Module([], []))
        caught = [ast.unparse(n.type) if n.type else "" for n in nodes if isinstance(n, ast.ExceptHandler)]
        too_wide = set(caught) & {"", "Exception", "BaseException"}
        found += [f"cell {place}: `except {name}` takes every error, name the one that is meant" for name in too_wide]
    return found


def uses_no_path_tricks(nb: dict, path: Path) -> list[str]:
    return search(PATH_TRICK, nb, sources="code")


def installs_and_fetches_nothing(nb: dict, path: Path) -> list[str]:
    return search(NETWORK, nb, sources="code") + search(REMOTE_IMAGE, nb, sources="markdown", outputs=True)


def names_no_machine(nb: dict, path: Path) -> list[str]:
    return search(MACHINE_PATH, nb, sources="code markdown", outputs=True)


def names_the_living_lander(nb: dict, path: Path) -> list[str]:
    """B44: version 2 of the environment is gone."""
    return search(re.compile("LunarLander-v2"), nb, sources="code markdown", outputs=True)


def shows_every_last_value(nb: dict, path: Path) -> list[str]:
    """nbval runs cells without a history, where a trailing semicolon hides nothing and the outputs differ."""
    code = list(cells(nb, "code"))
    return [f"cell {place} ends with a semicolon" for place, _, source in code if source.rstrip().endswith(";")]


# Stored outputs


def was_executed_in_order(nb: dict, path: Path) -> list[str]:
    counts = [cell["execution_count"] for _, cell, _ in cells(nb, "code")]
    return [] if counts == list(range(1, len(counts) + 1)) else ["not executed from top to bottom: run tools/book.py"]


def stores_no_error_and_no_warning(nb: dict, path: Path) -> list[str]:
    """B48: warnings and progress bars differ between machines, and an error is never part of the book."""
    found = []
    for place, cell, _ in cells(nb, "code"):
        outputs = cell["outputs"]
        found += [f"cell {place} stores an error" for output in outputs if output["output_type"] == "error"]
        found += [f"cell {place} stores stderr" for output in outputs if output.get("name") == "stderr"]
        found += [f"cell {place} stores a progress bar" for body in output_texts(cell) if PROGRESS_BAR.search(body)]
    return found


def stores_only_what_repeats(nb: dict, path: Path) -> list[str]:
    """B48, B50: no object addresses; in compared cells no float with more digits than machines agree on."""
    found = search(OBJECT_ADDRESS, nb, outputs=True)
    for place, cell, _ in cells(nb, "code"):
        body = "\n".join(output_texts(cell))
        if IGNORE_OUTPUT not in tags(cell) and LONG_FLOAT.search(body):
            found.append(f"cell {place} prints {LONG_FLOAT.search(body).group(0)}: round it")
        if IGNORE_OUTPUT not in tags(cell) and any(map(WIDGET.search, output_texts(cell))):
            found.append(f"cell {place} shows a widget and needs the tag {IGNORE_OUTPUT}")
        if any("widget-view" in kind for output in cell["outputs"] for kind in output.get("data", {})):
            found.append(f"cell {place} stores a widget's number: run tools/book.py")
    return found


def tests_what_it_does_not_compare(nb: dict, path: Path) -> list[str]:
    """A cell whose output is not compared asserts its result, itself or in the code cell that follows."""
    found = []
    code = list(cells(nb, "code"))
    for (place, cell, source), (_, _, following) in zip(code, [*code[1:], (0, {}, "")], strict=True):
        found += [f"cell {place} has the unknown tag {tag!r}" for tag in set(tags(cell)) - {IGNORE_OUTPUT}]
        if "NBVAL" in source:
            found.append(f"cell {place} steers nbval by a comment: use the tag {IGNORE_OUTPUT}")
        is_widget = any(map(WIDGET.search, output_texts(cell)))
        if IGNORE_OUTPUT in tags(cell) and not is_widget and not re.search(r"\bassert\b", source + "\n" + following):
            found.append(f"cell {place} is neither compared nor followed by an assert")
    return found


def describes_its_figures(nb: dict, path: Path) -> list[str]:
    """The Markdown cell below a picture begins with `*Figure: …*`: what a reader who cannot see it needs."""
    found = search(IMAGE_WITHOUT_TEXT, nb, sources="markdown")
    for place, cell, _ in cells(nb, "code"):
        kinds = [kind for output in cell["outputs"] for kind in output.get("data", {})]
        below = nb["cells"][place] if place < len(nb["cells"]) else {"cell_type": "", "source": ""}
        described = below["cell_type"] == "markdown" and re.match(r"\*Figure: .+\*", text(below["source"]), re.S)
        if any(kind.startswith("image/") for kind in kinds) and not described:
            found.append(f"the cell below the picture of cell {place} does not begin with *Figure: …*")
    return found


# Prose


def does_not_talk_down(nb: dict, path: Path) -> list[str]:
    return search(TALKING_DOWN, nb, sources="markdown")


def has_links_that_lead_somewhere(nb: dict, path: Path) -> list[str]:
    return [c for place, _, source in cells(nb, "markdown") for c in broken_links(source, path, f"cell {place}: ")]


def broken_links(markdown: str, path: Path, where: str = "") -> list[str]:
    """Relative links of a Markdown text that lies at `path` whose file or heading does not exist."""
    prose = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$", "", markdown, flags=re.S)
    found = []
    for match in LINK.finditer(prose):
        target = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            found.append(f"{where}{target}: no such file")
        elif anchor and anchor not in anchors(file):
            found.append(f"{where}{target}: no such heading")
    return found


def anchors(file: Path) -> set[str]:
    """Names a link may point to: headings as JupyterLab or as a code host writes them, and explicit ids."""
    body = file.read_text(encoding="utf-8")
    is_notebook = file.suffix == ".ipynb"
    if is_notebook:
        body = "\n\n".join(source for _, _, source in cells(json.loads(body), "markdown"))
    headings = [h.strip() for h in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", body, flags=re.S), flags=re.M)]
    as_host = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    as_lab = [heading.replace(" ", "-") for heading in headings]
    return set(as_lab if is_notebook else as_host) | set(re.findall(r"<\w+ (?:id|name)=[\"']([^\"']+)", body))


RULES: list[Callable[[dict, Path], list[str]]] = [
    is_small,
    has_short_code,
    has_the_length_of_a_chapter,
    begins_with_a_title,
    has_normal_metadata,
    is_plain_python,
    swallows_no_error,
    uses_no_path_tricks,
    installs_and_fetches_nothing,
    names_no_machine,
    names_the_living_lander,
    shows_every_last_value,
    was_executed_in_order,
    stores_no_error_and_no_warning,
    stores_only_what_repeats,
    tests_what_it_does_not_compare,
    describes_its_figures,
    does_not_talk_down,
    has_links_that_lead_somewhere,
]
