"""Method colours, and figures as text."""

from __future__ import annotations

import numpy as np
import pytest

from sage_lite import advantages, plots, recipes


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_every_method_has_its_own_look():
    methods = {*recipes.RECIPES, *advantages.names()}
    assert methods <= set(plots.COLORS)
    aliases = {"focal_grpo": "f_grpo", "mdp": "mdp_grpo"}  # an advantage and the method named after it
    looks = [(plots.COLORS[m], plots.LINESTYLES[m]) for m in plots.COLORS if m not in aliases]
    assert len(looks) == len(set(looks))
    for advantage, method in aliases.items():
        assert plots.COLORS[advantage] == plots.COLORS[method]


@pytest.mark.parametrize("method", sorted(plots.COLORS))
def test_colours_can_be_seen_on_white(method):
    assert 1.05 / (luminance(plots.COLORS[method]) + 0.05) > 2


def test_style_of_an_own_method():
    assert plots.style("sage")["label"] == "SAGE"
    assert plots.style("mine", alpha=0.5) == {
        "color": "#7F7F7F", "linestyle": "-.", "label": "mine", "linewidth": 2, "alpha": 0.5
    }  # fmt: skip


def test_digest_of_curves():
    figure, axes = plots.new_figure(xlabel="pass rate", ylabel="weight")
    x = np.linspace(0, 1, 101)
    axes.plot(x, 1 + 2 * x, **plots.style("sage"))
    axes.axhline(1.0)  # a guide line carries no data
    axes.plot([0.5], [2.0], "o", label="a dot")
    assert plots.digest(figure, points=3) == (
        "weight by pass rate\n  SAGE: (0, 1), (0.5, 2), (1, 3)\n  a dot: (0.5, 2)"
    )  # fmt: skip


def test_digest_of_bars_dots_and_images():
    figure, (left, middle, right) = plots.new_figure(1, 3)
    left.bar(["a", "b"], [0.25, 0.75], label="share", yerr=[0.1, 0.1])
    middle.scatter([0, 1, 2], [3, 4, 5])
    right.imshow([[0.0, 1.0], [2.0, 5.0]])
    assert plots.digest(figure).splitlines() == [
        "panel", "  share: 0.25, 0.75",
        "panel", "  dots: 3 dots, mean (1, 4)",
        "panel", "  image 2x2: from 0 to 5, mean 2",
    ]  # fmt: skip


@pytest.mark.parametrize("noise", [1 - 1e-13, 1 + 1e-13])
def test_digest_is_the_same_for_last_bit_differences(noise):
    values = np.array([0.0625, 0.125, 2.5, 1e-17, -0.0]) * noise
    assert plots._text(values, 2) == ["0.062", "0.12", "2.5", "0", "0"]
    assert plots._text([np.nan, 1.0], 3) == ["nan", "1"]


def test_shown_figure_is_a_picture_and_its_numbers():
    figure, axes = plots.new_figure(2, 1)
    axes[0].plot([0, 1, 2], [1, 2, 3], label="up")
    bundle = plots.show(figure, points=2)._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG") and len(bundle["image/png"]) > 5000
    assert bundle["text/plain"] == "panel\n  up: (0, 1), (2, 3)\npanel"
