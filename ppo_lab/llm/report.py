"""What a finished run looks like on one page: report.md and a picture beside it."""

import csv
import io
import math
from pathlib import Path
from typing import Any

from ppo_lab.files import replace_file
from ppo_lab.run_folder import METRICS

REPORT, PICTURE = "report.md", "report.png"
# In the order to look at them: KL first, then the critic, then the reward (§13.8).
PANELS = (
    ("kl_per_response", "KL to the reference, nats per response"),
    ("value_loss", "value loss"),
    ("score", "score"),
    ("entropy", "entropy, nats per token"),
    ("response_length", "response length, tokens"),
    ("ratio_max", "largest ratio of an update"),
)


def write_report(folder: Path, settings: dict[str, Any], memory_table: str) -> None:
    """Write report.md and report.png into a run folder, from its metrics.csv.

    Book: §13.8
    """
    with open(folder / METRICS, newline="", encoding="utf-8") as file:
        rows = [{name: float(text) for name, text in row.items()} for row in csv.DictReader(file)]
    replace_file(folder / PICTURE, picture(rows))
    text = page(rows, settings, memory_table)
    for name, title in (("evaluation.csv", "Held-out prompts"), ("samples.csv", "Answers, the last table")):
        text += table(folder / name, title)
    replace_file(folder / REPORT, text.encode())


def page(rows: list[dict[str, float]], settings: dict[str, Any], memory_table: str) -> str:
    """The report as Markdown: first, best and last of each number, where the time went, memory, all settings."""
    lines = [f"# {len(rows)} iterations of {settings['actor']}", "", f"![curves]({PICTURE})", ""]
    lines += ["| | first | lowest | highest | last |", "|---|---|---|---|---|"]
    for name in rows[0]:
        if name != "iteration" and not name.startswith("seconds_"):
            column = [row[name] for row in rows]
            # An iteration that took no step has no losses.
            known = [x for x in column if not math.isnan(x)] or column
            numbers = (column[0], min(known), max(known), column[-1])
            lines.append(f"| {name} | " + " | ".join(f"{x:.4g}" for x in numbers) + " |")
    lines += ["", "## Time", "", "| phase | seconds | share |", "|---|---|---|"]
    phases = {name: sum(row[name] for row in rows) for name in rows[0] if name.startswith("seconds_")}
    for name, seconds in phases.items():
        share = seconds / max(sum(phases.values()), 1e-9)
        lines.append(f"| {name.removeprefix('seconds_')} | {seconds:.1f} | {share:.0%} |")
    lines += ["", "## Memory, as estimated before the start", "", "```", memory_table, "```", "", "## Settings", ""]
    lines += ["| setting | value |", "|---|---|"] + [f"| {name} | {value} |" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def table(path: Path, title: str, n_rows: int = 8) -> str:
    """The last rows of a CSV file as Markdown; nothing if there is no such file."""
    if not path.exists():
        return ""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[-n_rows:]
    lines = ["", f"## {title}", "", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row.values()] for row in rows]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells]) + "\n"


def picture(rows: list[dict[str, float]]) -> bytes:
    """The curves of PANELS as a PNG."""
    # Loading matplotlib takes a second, and only the end of a run needs it.
    import matplotlib.pyplot as plt

    from ppo_lab.plots import use_style

    with plt.rc_context():
        use_style()
        fig, axes = plt.subplots(2, 3, figsize=(10, 5.2))
        for ax, (name, title) in zip(axes.flat, PANELS, strict=True):
            ax.plot([row["iteration"] for row in rows], [row[name] for row in rows])
            ax.set(title=title, xlabel="iteration")
        file = io.BytesIO()
        fig.savefig(file, format="png")
        plt.close(fig)
    return file.getvalue()
