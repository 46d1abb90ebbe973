"""The page about a finished run: its numbers are those of metrics.csv."""

import matplotlib.pyplot as plt
import pytest

from ppo_lab.llm.report import PANELS, page, write_report

ROW = {
    "iteration": 0.0, "score": 1.0, "value_loss": 0.5, "kl_per_response": 0.0, "entropy": 2.0, "response_length": 10.0,
    "ratio_max": 1.25, "seconds_generate": 3.0, "seconds_score": 1.0, "memory_gb": 0.5,
}  # fmt: skip
ROWS = [
    ROW,
    {**ROW, "iteration": 1.0, "score": -2.5, "kl_per_response": 0.75, "seconds_generate": 4.0, "seconds_score": 2.0},
    {**ROW, "iteration": 2.0, "score": 0.123456, "kl_per_response": 0.5, "seconds_generate": 2.0, "seconds_score": 0.0},
]
SETTINGS = {"actor": "models/sft", "lr": 0.0005, "stop_token": None}


def lines_of(rows=ROWS):
    return page(rows, SETTINGS, "a table\nof memory").splitlines()


def test_the_page_names_the_run_and_shows_its_picture():
    lines = lines_of()
    assert lines[0] == "# 3 iterations of models/sft"
    assert "![curves](report.png)" in lines


def test_every_number_has_its_first_lowest_highest_and_last_value():
    lines = lines_of()
    assert lines[lines.index("| | first | lowest | highest | last |") + 1] == "|---|---|---|---|---|"
    assert "| score | 1 | -2.5 | 1 | 0.1235 |" in lines
    assert "| kl_per_response | 0 | 0 | 0.75 | 0.5 |" in lines
    assert not [line for line in lines if line.startswith(("| iteration", "| seconds_"))]


def test_the_time_of_each_phase_and_its_share():
    # Nine seconds and three of twelve.
    lines = lines_of()
    assert "| generate | 9.0 | 75% |" in lines and "| score | 3.0 | 25% |" in lines


def test_memory_and_all_settings_are_there():
    text = page(ROWS, SETTINGS, "a table\nof memory")
    assert "```\na table\nof memory\n```" in text
    for line in ("| actor | models/sft |", "| lr | 0.0005 |", "| stop_token | None |"):
        assert line in text.splitlines()
    assert text.endswith("|\n")


def test_a_number_that_is_not_there_at_first_hides_no_other():
    # No step was taken in the first iteration, so its losses are nan; the others are what they are.
    nan = float("nan")
    lines = lines_of([{**ROWS[0], "value_loss": nan}, {**ROWS[1], "value_loss": 0.25}, {**ROWS[2], "value_loss": 4.0}])
    assert "| value_loss | nan | 0.25 | 4 | 4 |" in lines
    assert "| ratio_max | nan | nan | nan | nan |" in lines_of([{**row, "ratio_max": nan} for row in ROWS])


def test_a_run_of_no_time_has_no_shares_to_divide():
    assert "| generate | 0.0 | 0% |" in lines_of([{**ROW, "seconds_generate": 0.0, "seconds_score": 0.0}])


@pytest.fixture
def folder(tmp_path):
    lines = [",".join(ROW), *(",".join(map(str, row.values())) for row in ROWS)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_folder_gets_the_page_and_the_picture(folder):
    write_report(folder, SETTINGS, "a table\nof memory")
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.csv", "report.md", "report.png"]
    assert (folder / "report.md").read_text(encoding="utf-8") == page(ROWS, SETTINGS, "a table\nof memory")
    pixels = plt.imread(folder / "report.png")
    assert pixels.shape[0] > 300 and pixels.shape[1] > 600 and float(pixels[..., :3].std()) > 0.01


def test_the_picture_shows_the_kl_first_and_changes_no_style(folder, monkeypatch):
    figures, before = [], dict(plt.rcParams)
    monkeypatch.setattr(plt, "close", figures.append)
    write_report(folder, SETTINGS, "")
    monkeypatch.undo()
    [fig] = figures
    assert [ax.get_title() for ax in fig.axes] == [title for _, title in PANELS]
    assert fig.axes[0].get_title().startswith("KL to the reference")
    assert all(ax.get_xlabel() == "iteration" for ax in fig.axes)
    [line] = fig.axes[0].lines
    assert line.get_xdata().tolist() == [0, 1, 2] and line.get_ydata().tolist() == [0, 0.75, 0.5]
    plt.close(fig)
    assert dict(plt.rcParams) == before


def test_a_report_that_cannot_be_written_leaves_the_metrics(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = (folder / "metrics.csv").read_bytes()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(folder, SETTINGS, "")
    assert (folder / "metrics.csv").read_bytes() == before
    assert not (folder / "report.md").exists()


def test_the_last_answers_and_the_evaluations_are_on_the_page(folder):
    (folder / "samples.csv").write_text("iteration,prompt,response\n0,old,answer\n" + "2,a | b,one\n" * 8, "utf-8")
    write_report(folder, SETTINGS, "")
    text = (folder / "report.md").read_text("utf-8")
    assert "## Answers, the last table" in text and "Held-out" not in text
    assert text.count("| 2 | a \\| b | one |") == 8 and "old" not in text
