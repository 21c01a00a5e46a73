"""One look for every figure: the same colour for the same method everywhere, and each figure's numbers as text.

Figures are made without pyplot, so nothing depends on a screen or a backend. matplotlib is imported where it is used.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, made to be told apart with any colour vision. Methods that differ by a detail share a colour
# and differ by the line.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILLION, _PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"

_METHODS = {  # name: (colour, line style, label)
    "sage": (_BLUE, "-", "SAGE"),
    "grpo": (_VERMILLION, "-", "GRPO"),
    "dr_grpo": (_ORANGE, "-", "Dr.GRPO"),
    "rloo": (_SKY, "-", "RLOO"),
    "reinforce": (_BLACK, "-", "REINFORCE"),
    "maxrl": (_GREEN, "-", "MaxRL"),
    "sign": (_PURPLE, "-", "Sign"),
    "focal_grpo": (_VERMILLION, ":", "F-GRPO"),
    "f_grpo": (_VERMILLION, ":", "F-GRPO"),
    "mdp": (_PURPLE, "--", "MDP"),
    "mdp_grpo": (_PURPLE, "--", "MDP-GRPO"),
    "dapo": (_VERMILLION, "--", "DAPO"),
    "cispo": (_VERMILLION, "-.", "CISPO"),
    "cross_entropy": (_GREY, "--", "cross-entropy"),
    "start": (_GREY, "-", "start"),
}
COLORS = {name: colour for name, (colour, _, _) in _METHODS.items()}
LINESTYLES = {name: line for name, (_, line, _) in _METHODS.items()}
LABELS = {name: label for name, (_, _, label) in _METHODS.items()}


def style(method: str, **changes: Any) -> dict[str, Any]:
    """Keyword arguments for `axes.plot` that draw a method as everywhere else: `axes.plot(x, y, **style("sage"))`.

    changes: what to set differently, such as label="SAGE, tau 0.3" or alpha=0.5. A method without a colour of its own
    (the reader's) is grey and dash-dotted, and labelled with its name.
    """
    base = {
        "color": COLORS.get(method, _GREY),
        "linestyle": LINESTYLES.get(method, "-."),
        "label": LABELS.get(method, method),
    }
    return {**base, "linewidth": 2, **changes}


def new_figure(
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = 6.4,
    height: float = 3.8,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    **options: Any,
) -> tuple[Figure, Any]:
    """A figure in the house style, and its axes: one `Axes`, or an array of them as from `Figure.subplots`.

    width, height: inches of each panel. title, xlabel, ylabel: given to every panel. options: `Figure.subplots`'s own.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for panel in np.ravel(axes):
        panel.set(title=title, xlabel=xlabel, ylabel=ylabel)
        panel.grid(True, color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def show(figure: Figure, *, points: int = 5, digits: int = 3) -> Shown:
    """What a notebook cell ends with: the picture, and `digest(figure)` as its text form."""
    return Shown(figure, points, digits)


class Shown:
    """A figure as notebook output: a PNG for readers, the digest wherever text is wanted (and compared by tests)."""

    def __init__(self, figure: Figure, points: int = 5, digits: int = 3):
        self.figure, self.points, self.digits = figure, points, digits

    def __repr__(self) -> str:
        return digest(self.figure, points=self.points, digits=self.digits)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"image/png": png(self.figure), "text/plain": repr(self)}


def png(figure: Figure, dpi: int = 80) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def digest(figure: Figure, *, points: int = 5, digits: int = 3) -> str:
    """A figure's numbers as text: for each panel, each curve at `points` places, bars, dots and images.

    digits: significant digits. The text is the same on every machine as long as the numbers agree to nine digits.
    """
    return "\n".join(line for axes in figure.axes for line in _panel(axes, points, digits))


def _panel(axes: Axes, points: int, digits: int) -> list[str]:
    name = axes.get_title() or axes.get_ylabel() or "panel"
    lines = [f"{name} by {axes.get_xlabel()}" if axes.get_xlabel() else name]
    for number, line in enumerate(axes.get_lines(), start=1):
        label = str(line.get_label())
        x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
        if len(x) > 2 or not label.startswith("_"):  # a guide line without a label carries no data
            label = f"curve {number}" if label.startswith("_") else label
            at = np.unique(np.linspace(0, len(x) - 1, min(points, len(x))).round().astype(int))
            pairs = zip(_text(x, digits, at), _text(y, digits, at))
            lines.append(f"  {label}: " + ", ".join(f"({a}, {b})" for a, b in pairs))
    for bars in axes.containers:
        if heights := [bar.get_height() for bar in bars if hasattr(bar, "get_height")]:
            lines.append(f"  {_label(bars, 'bars')}: " + ", ".join(_text(heights, digits)))
    for steps in axes.patches:
        if hasattr(steps, "get_data"):  # axes.stairs
            lines.append(f"  {_label(steps, 'steps')}: " + ", ".join(_text(steps.get_data().values, digits)))
    for dots in axes.collections:
        offsets = np.ma.filled(np.ma.asarray(dots.get_offsets(), dtype=float), np.nan)
        if len(offsets) > 1:
            middle = _text(np.nanmean(offsets, axis=0), digits)
            lines.append(f"  {_label(dots, 'dots')}: {len(offsets)} dots, mean ({', '.join(middle)})")
    for image in axes.get_images():
        values = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
        low, middle, high = _text([np.nanmin(values), np.nanmean(values), np.nanmax(values)], digits)
        lines.append(f"  image {'x'.join(map(str, values.shape))}: from {low} to {high}, mean {middle}")
    return lines


def _label(artist: Any, otherwise: str) -> str:
    label = str(artist.get_label())
    return otherwise if not label or label.startswith("_") else label


def _text(values: Any, digits: int, at: Any = slice(None)) -> list[str]:
    """Numbers in `digits` significant digits, the same on every machine.

    Rounded twice: to nine digits first, so that a value on the edge between two roundings (0.0625 to two digits) does
    not go the other way for a last-bit difference. What is nothing beside the largest value is 0.
    """
    values = np.asarray(values, dtype=float)
    finite = np.abs(values[np.isfinite(values)])
    floor = 1e-9 * finite.max() if finite.size else 0.0
    return [f"{float(f'{0.0 if abs(v) <= floor else v:.9g}'):.{digits}g}" for v in values[at]]
