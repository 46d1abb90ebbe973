"""What the figures show is what was handed in, and the style can be read in grey."""

from itertools import pairwise

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from ppo_lab import plots


@pytest.fixture
def ax():
    with matplotlib.rc_context():
        plots.use_style()
        yield plt.subplots()[1]
        plt.close("all")


def test_style_is_sharp_and_large_enough(ax):
    assert plt.rcParams["figure.dpi"] == 110
    assert plt.rcParams["figure.constrained_layout.use"]
    for size in (
        "font.size",
        "axes.titlesize",
        "axes.labelsize",
        "xtick.labelsize",
        "ytick.labelsize",
        "legend.fontsize",
    ):
        assert plt.rcParams[size] >= 9, size


def test_lines_differ_in_dash_and_in_brightness(ax):
    lines = [ax.plot([0, 1], [0, i])[0] for i in range(len(plots.PALETTE))]
    assert len({str(line._dash_pattern) for line in lines}) == len(plots.PALETTE)
    grey = [np.dot(to_rgb(line.get_color()), (0.299, 0.587, 0.114)) for line in lines]
    # Neighbours in the cycle, the pairs most often drawn together.
    assert all(abs(a - b) > 0.1 for a, b in pairwise(grey))


def test_mean_of_equal_seeds_has_no_width():
    mean, low, high = plots.mean_interval([[1.0, 5.0], [1.0, 5.0], [1.0, 5.0]])
    assert mean.tolist() == low.tolist() == high.tolist() == [1.0, 5.0]


def test_bootstrap_interval_of_a_large_sample_is_the_normal_one():
    values = np.random.default_rng(3).normal(10.0, 2.0, size=400)
    mean, low, high = plots.mean_interval(values)
    half_width = 1.96 * values.std() / 20  # sqrt(400) = 20
    assert mean == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(half_width, rel=0.06)


def test_interval_needs_seeds_and_repeats():
    with pytest.raises(ValueError, match="at least one seed"):
        plots.mean_interval([])
    with pytest.raises(ValueError, match="at least one seed"):
        plots.mean_interval(3.0)
    values = np.random.default_rng(1).normal(size=20)
    assert plots.mean_interval(values) == plots.mean_interval(values)


def test_learning_curve_is_the_mean_over_seeds(ax):
    plots.learning_curves(
        ax, {"ppo": ([0, 10, 20], torch.tensor([[0.0, 2.0, 4.0], [2.0, 4.0, 12.0]])), "a2c": ([0], [[7]])}
    )
    ppo, a2c = ax.get_lines()
    assert ppo.get_xdata().tolist() == [0, 10, 20]
    assert ppo.get_ydata().tolist() == [1, 3, 8]
    assert a2c.get_ydata().tolist() == [7]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ppo", "a2c"]


def test_band_spans_the_seeds_and_one_seed_has_none(ax):
    plots.learning_curves(ax, {"one": ([0, 1], [[1.0, 2.0]])})
    assert len(ax.collections) == 0
    # Of two seeds drawn twice, a quarter of the draws is all low and a quarter all high: the band is the seeds' range.
    plots.learning_curves(ax, {"two": ([0, 1], [[1.0, 2.0], [5.0, 8.0]])})
    (band,) = ax.collections
    box = band.get_paths()[0].get_extents()
    assert (box.y0, box.y1) == (1.0, 8.0)


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1.0, 2.0, 3.0]], [[[1.0], [2.0]]]])
def test_learning_curves_refuse_values_that_do_not_fit(ax, values):
    with pytest.raises(ValueError, match=r"'ppo' needs steps \[P\] and values \[S, P\]"):
        plots.learning_curves(ax, {"ppo": ([0, 1], values)})


def test_healthy_band_covers_its_values_and_says_so(ax):
    ax.plot([0, 1], [0, 1])
    plots.healthy_band(ax, 0.01, 0.02, "healthy KL")
    (band,) = ax.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.01, 0.02))
    assert [text.get_text() for text in ax.texts] == ["healthy KL"]
    with pytest.raises(ValueError, match=r"low must be below high, got low=2 and high=1"):
        plots.healthy_band(ax, 2, 1)


def test_bars_show_mean_interval_and_every_seed(ax):
    plots.bars_with_intervals(ax, {"gae": [1.0, 3.0], "td": [5.0]})
    assert [bar.get_height() for bar in ax.patches] == [2.0, 5.0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["gae", "td"]
    dots = [line.get_ydata().tolist() for line in ax.get_lines() if line.get_marker() == "o"]
    assert dots == [[1.0, 3.0], [5.0]]
    interval = ax.collections[0].get_segments()[0][:, 1]
    assert interval.tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match=r"'gae' needs values \[S\]"):
        plots.bars_with_intervals(ax, {"gae": [[1.0]]})


def test_filmstrip_goes_from_the_first_frame_to_the_last():
    frames = np.zeros((11, 4, 6, 3), dtype=np.uint8) + np.arange(11, dtype=np.uint8)[:, None, None, None]
    plots.filmstrip(frames, 3)
    axes = plt.gcf().axes
    assert [ax.get_title() for ax in axes] == ["t = 0", "t = 5", "t = 10"]
    assert [int(ax.get_images()[0].get_array()[0, 0, 0]) for ax in axes] == [0, 5, 10]
    plt.close("all")
    for n in (0, 12):
        with pytest.raises(ValueError, match="between 1 and the number of frames, 11"):
            plots.filmstrip(frames, n)
