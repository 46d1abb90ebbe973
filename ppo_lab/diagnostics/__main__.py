"""Print what is wrong with a run, by its record: python -m ppo_lab.diagnostics RUN"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ppo_lab.command import Parser, run_command
from ppo_lab.diagnostics.history import read_history
from ppo_lab.diagnostics.rules import known
from ppo_lab.diagnostics.symptoms import Finding, diagnose


def make_parser() -> Parser:
    """The command takes one argument: the run."""
    parser = Parser(
        prog="python -m ppo_lab.diagnostics",
        description="Print what is wrong with a run, by its metrics.csv: each symptom with its evidence, its likely\n"
        "causes and the first thing to try, the earliest symptom first.",
        epilog="examples:\n  python -m ppo_lab.diagnostics runs/tiny\n  python -m ppo_lab.diagnostics data/lander",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or a CSV file of one run's metrics")
    return parser


# Said of language models; a reader with longer answers must know.
MEASURED = "(the thresholds were measured with answers of about 10 words, 128 in a batch)"


def page(findings: list[Finding], n_iterations: int) -> str:
    """All findings as text for a terminal."""
    if not findings:
        return f"nothing found in {n_iterations} iterations"
    return "\n\n".join(paragraph(finding) for finding in findings)


def paragraph(finding: Finding) -> str:
    lines = [f"{finding.symptom}, since iteration {finding.iteration}", f"  {finding.evidence}"]
    lines += ["  likely causes:", *(f"    {number}. {cause}" for number, cause in enumerate(finding.causes, start=1))]
    lines += [f"  first try: {finding.first_try}", f"  see {finding.section}"]
    wrapped = [textwrap.fill(line, 100, subsequent_indent=" " * 6) for line in lines]
    return "\n".join(wrapped)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 whether it finds something or not, 2 for a record it cannot read."""

    def command() -> None:
        history = read_history(make_parser().parse_args(arguments).run)
        print(page(diagnose(history), len(history)))
        if known(history["kl_per_response"]):
            print(f"\n{MEASURED}")

    return run_command("diagnostics", command)


if __name__ == "__main__":
    sys.exit(main())
