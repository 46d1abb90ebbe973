"""The first finding of a run, said while the run goes on."""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ppo_lab.diagnostics.symptoms import diagnose
from ppo_lab.run_folder import METRICS

# What the rules compare with lies at the start, what they count at the end; the rows between only cost time.
FIRST_ROWS, LAST_ROWS = 20, 100


class Watch:
    """Diagnoses a run after every row and says its first finding, once, as one line on stderr.

    folder: where the run is recorded. Of a run that goes on, the rows in its metrics.csv count too; what they show has
    been said before. Raises ValueError if they are damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows: list[Mapping[str, Any]] = []
        path = folder / METRICS
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
        self.silent = bool(self.rows and diagnose(path))

    def see(self, row: Mapping[str, Any]) -> None:
        """Take in the row of one more iteration."""
        if self.silent:
            return
        self.rows.append(row)
        del self.rows[FIRST_ROWS:-LAST_ROWS]
        for finding in diagnose(self.rows)[:1]:
            self.silent = True
            text = (
                f"iteration {finding.iteration}: {finding.symptom}: {finding.evidence}. First try: {finding.first_try}"
            )
            # Written past tqdm, it would tear the bar apart.
            tqdm.write(f"{text} (python -m ppo_lab.diagnostics {self.folder} tells more)", file=sys.stderr)
