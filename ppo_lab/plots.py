"""Every figure of the book in one style. The only module that imports matplotlib.

Lines differ in colour and in dash, bars carry their name below them, so all of it can be read in grey.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

# Okabe and Ito's colours, told apart by colour-blind readers too; dark and light ones alternate for grey prints.
PALETTE = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#CC79A7", "#009E73")
DASHES = ("-", "--", "-.", (0, (7, 1.5)), ":", (0, (3, 1, 1, 1, 1, 1)))


def use_style() -> None:
    """Set the book's style for all figures that follow: 110 dpi, 9 pt or larger, dashes and colours together."""
    plt.rcParams.update(
        {
            "figure.figsize": (6.4, 3.4),
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.labelsize": 10,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
            "lines.linewidth": 1.8,
            "image.cmap": "viridis",
            "axes.prop_cycle": cycler(color=PALETTE) + cycler(linestyle=DASHES),
        }
    )


def mean_interval(values: ArrayLike, *, n_resamples: int = 2000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over seeds and the 95 % bootstrap interval of that mean.

    The seeds are drawn again, with replacement, n_resamples times; the interval holds the middle 95 % of the means.
    With fewer than about five seeds it is too narrow: read it as a hint, not as a test.

    values [S, ...], one row per seed. Returns mean, low, high, each [...]. The draw is fixed, so a plot repeats.
    Raises ValueError without a seed axis or for no seeds.

    Source: Efron 1979
    """
    values = np.asarray(values, dtype=float)
    if values.ndim == 0 or len(values) == 0:
        raise ValueError(f"values needs at least one seed on its first axis, got shape {values.shape}")
    draws = np.random.default_rng(0).integers(len(values), size=(n_resamples, len(values)))
    # How often each seed was drawn: one matrix product instead of n_resamples copies of the curves.
    weights = np.stack([np.bincount(row, minlength=len(values)) for row in draws]) / len(values)
    low, high = np.percentile(np.tensordot(weights, values, axes=1), (2.5, 97.5), axis=0)
    return values.mean(axis=0), low, high


def learning_curves(ax: Axes, curves: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> None:
    """One line per name, the mean over seeds, with its 95 % bootstrap interval as a band (see mean_interval).

    curves: name -> (steps [P], values [S, P]), one row per seed; a single seed gets no band.
    The axes' labels are the caller's. Raises ValueError for values that do not fit steps.
    """
    for name, (steps, values) in curves.items():
        steps, values = np.asarray(steps), np.asarray(values, dtype=float)
        if steps.ndim != 1 or values.ndim != 2 or values.shape[1] != len(steps):
            raise ValueError(f"{name!r} needs steps [P] and values [S, P], got {steps.shape} and {values.shape}")
        mean, low, high = mean_interval(values)
        (line,) = ax.plot(steps, mean, label=name)
        if len(values) > 1:
            ax.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    ax.legend()


def healthy_band(ax: Axes, low: float, high: float, label: str = "healthy") -> None:
    """Shade the values between low and high, where a logged quantity should stay, and name the band on its upper edge.

    Raises ValueError unless low < high.
    """
    if not low < high:
        raise ValueError(f"low must be below high, got low={low} and high={high}")
    ax.axhspan(low, high, color="0.5", alpha=0.18, linewidth=0)
    ax.text(0.99, high, label, transform=ax.get_yaxis_transform(), ha="right", va="top", clip_on=True, color="0.3")


def bars_with_intervals(ax: Axes, groups: Mapping[str, ArrayLike]) -> None:
    """One bar per name, the mean over seeds, with its 95 % bootstrap interval and every seed as a dot.

    groups: name -> values [S]. The y label is the caller's. Raises ValueError for values that are not [S].
    """
    for place, (name, values) in enumerate(groups.items()):
        values = np.asarray(values, dtype=float)
        if values.ndim != 1:
            raise ValueError(f"{name!r} needs values [S], got shape {values.shape}")
        mean, low, high = mean_interval(values)
        ax.bar(place, mean, width=0.6, color=PALETTE[0], alpha=0.35)
        ax.vlines(place, low, high, color="black")
        ax.plot(np.full(len(values), place), values, "o", markersize=3, color="black", alpha=0.5)
    ax.set_xticks(range(len(groups)), groups.keys())
    ax.grid(axis="x", visible=False)


def filmstrip(frames: Sequence[ArrayLike], n: int = 6) -> None:
    """Draw n pictures of an episode side by side, evenly spaced from the first frame to the last, each under its step.

    frames [F, H, W, 3], uint8. Makes a figure of its own. Raises ValueError for n below 1 or above the frame count.
    """
    if not 1 <= n <= len(frames):
        raise ValueError(f"n must be between 1 and the number of frames, {len(frames)}, got {n}")
    _, axes = plt.subplots(1, n, figsize=(1.5 * n, 1.4), squeeze=False)
    for ax, step in zip(axes[0], np.linspace(0, len(frames) - 1, n).round().astype(int), strict=True):
        ax.imshow(frames[step])
        ax.set_title(f"t = {step}", fontsize=9)
        ax.set_axis_off()
