"""The first finding of a run, said while the run goes on."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ppo_lab.diagnostics.history import read_csv
from ppo_lab.diagnostics.symptoms import Finding, diagnose
from ppo_lab.run_folder import METRICS

# What the rules compare with lies at the start, what they count at the end; the rows between only cost time.
FIRST_ROWS, LAST_ROWS = 20, 100


class Watch:
    """Diagnoses a run after every row and says its first finding as one line on stderr.

    Twice at most: once of the learning, once of the machine. folder: where the run is recorded. Of a run that goes on,
    the rows in its metrics.csv count too, and the symptoms that they show have been said before. Raises ValueError if
    they are damaged.

    Book: §13.8
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows: list[Mapping[str, Any]] = []
        path = folder / METRICS
        if path.exists():
            self.rows, _ = read_csv(path)
        self.known = {finding.symptom for finding in diagnose(path)} if self.rows else set()
        # Of the machine: True; of the learning: False.
        self.said: set[bool] = set()

    def see(self, row: Mapping[str, Any]) -> None:
        """Take in the row of one more iteration."""
        if len(self.said) == 2:
            return
        self.rows.append(row)
        del self.rows[FIRST_ROWS:-LAST_ROWS]
        for finding in diagnose(self.rows):
            if finding.machine not in self.said and finding.symptom not in self.known:
                self.said.add(finding.machine)
                self.say(finding)

    def say(self, finding: Finding) -> None:
        """One line on stderr."""
        text = f"iteration {finding.iteration}: {finding.symptom}: {finding.evidence}. First try: {finding.first_try}"
        # Written past tqdm, it would tear the bar apart. A run must not end because nobody can be told.
        with suppress(OSError):
            tqdm.write(f"{text} (python -m ppo_lab.diagnostics {self.folder} tells more)", file=sys.stderr)
