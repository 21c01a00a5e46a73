"""`Explorer`: a figure with sliders in a live notebook, the picture and its numbers everywhere else.

    def draw(axes, tau, group_size, sage):
        axes.plot(...)

    Explorer(draw, tau=(0.01, 10.0, 0.1, "log"), group_size=(2, 64, 8), sage=True)

A frontend that shows widgets gets sliders that redraw the figure. GitHub, an HTML export or a plain terminal gets the
picture at the values of that moment, or its digest (`plots.digest`). matplotlib and ipywidgets are imported when used.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sage_lite import plots
from sage_lite.errors import UserError

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_STEPS = 60  # of a slider between two floats
_WIDTH, _HEIGHT = 6.4, 3.8  # inches, of a panel
_MARGINS = {"left": 0.8, "right": 0.15, "bottom": 0.55, "top": 0.35, "between": 0.95}  # inches


class Explorer:
    """A figure whose parameters can be turned: `Explorer(draw, **sliders)`.

    draw: `draw(axes, **values)` paints on empty axes (an array of them if `panels` > 1); its result is ignored.
    panels: number of panels, side by side. sliders: one for each parameter of `draw`, by its form:

    - `(low, high, start)`: whole numbers if all three are; `(low, high, start, "log")`, logarithmic;
    - `True` or `False`: a tick-box;
    - a list: a choice, which starts at its first entry.

    `explorer.sliders["tau"].value = 0.3` redraws, as moving the slider does (a live page may then round the value to
    a step of its slider); `explorer.digest` has the figure's numbers. An error of `draw` at the start is raised; one
    after a slider has moved is shown in the digest, below the last picture that was drawn. Raises UserError for a
    slider of another form.
    """

    def __init__(self, draw: Callable[..., Any], panels: int = 1, /, **sliders: Any) -> None:
        self._draw, self._panels, self._box = draw, panels, None
        self.sliders = {name: _slider(name, spec) for name, spec in sliders.items()}
        self._redraw()
        for slider in self.sliders.values():
            slider.observe(self._moved, names="value")
            if hasattr(slider, "tooltip"):
                slider.tooltip = slider.description  # without one, ipywidgets 8 shows "null" under the mouse

    @property
    def values(self) -> dict[str, Any]:
        """What `draw` is called with now."""
        return {name: slider.value for name, slider in self.sliders.items()}

    def figure(self) -> Any:
        """A new matplotlib figure at the values of now; raises what `draw` raises."""
        # Fixed margins: the axes stand still while a slider moves, and half the drawing time is saved.
        width, height, m = _WIDTH, _HEIGHT, _MARGINS
        whole = width * self._panels
        margins = {"left": m["left"] / whole, "right": 1 - m["right"] / whole,
                   "bottom": m["bottom"] / height, "top": 1 - m["top"] / height,
                   "wspace": m["between"] / (width - m["between"])}
        figure, axes = plots.new_figure(1, self._panels, width=width, height=height, gridspec_kw=margins)
        figure.set_layout_engine("none")
        self._draw(axes, **self.values)
        return figure

    def _redraw(self) -> None:
        figure = self.figure()
        self.png, self.digest = _png(figure), f"{_text(self.values)}\n{plots.digest(figure)}"

    def _moved(self, change: Any) -> None:
        try:
            self._redraw()
        except Exception as error:  # raised in a slider's callback it would end in a log that nobody sees
            self.digest = (f"{_text(self.values)}\n"
                           f"not drawn (the picture is the last that was): {type(error).__name__}: {error}")
        if self._box is not None:
            self._image.value, self._lines.value = self.png, _pre(self.digest)

    def _widget(self) -> Any:
        """Sliders, tick-boxes in one row, picture and digest, as one widget; None without ipywidgets or a kernel."""
        if self._box is None:
            try:
                import ipywidgets
            except ImportError:
                return None
            sliders = list(self.sliders.values())
            boxes = [s for s in sliders if isinstance(s, ipywidgets.Checkbox)]
            row = ipywidgets.HBox(boxes, layout={"flex_flow": "row wrap"})
            unstretched = {"max_width": "100%", "align_self": "flex-start", "margin": "0"}
            self._image = ipywidgets.Image(value=self.png, format="png", layout=unstretched)
            self._image.add_class("sage-explorer-picture")
            self._lines = ipywidgets.HTML(_pre(self.digest))
            others = [s for s in sliders if s not in boxes]
            self._box = ipywidgets.VBox([*others, *([row] if boxes else []), self._image, self._lines])
        return self._box

    def __repr__(self) -> str:
        return self.digest

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = {"image/png": self.png, "text/plain": self.digest}
        box = self._widget()
        if getattr(box, "model_id", None):
            bundle[WIDGET_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
        return bundle


class _Value:
    """What a slider is without ipywidgets: a value that tells when it is set."""

    def __init__(self, value: Any) -> None:
        self._value, self._handler = value, None

    def observe(self, handler: Callable[[Any], None], names: str) -> None:
        self._handler = handler

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value
        self._handler({"name": "value", "new": value})


def _slider(name: str, spec: Any) -> Any:
    """The ipywidgets control for one slider's form, labelled with its name."""
    start = _start(name, spec)
    try:
        import ipywidgets as w
    except ImportError:
        return _Value(start)
    label = {"description": plots.LABELS.get(name, name.replace("_", " ")), "style": {"description_width": "initial"}}
    if isinstance(spec, bool):
        return w.Checkbox(value=start, indent=False, layout={"width": "auto", "margin": "0 1em 0 0"}, **label)
    if isinstance(spec, list):
        return w.Dropdown(options=spec, value=start, **label)
    low, high = spec[:2]
    label["layout"] = {"width": "28em", "max_width": "100%"}
    if all(isinstance(v, int) for v in spec):
        return w.IntSlider(value=start, min=low, max=high, **label)
    label["readout_format"] = ".3g"
    if len(spec) == 4:
        low, high = math.log10(low), math.log10(high)
        return w.FloatLogSlider(value=start, min=low, max=high, step=_step(low, high, math.log10(start)), **label)
    return w.FloatSlider(value=start, min=low, max=high, step=_step(low, high, start), **label)


def _step(low: float, high: float, start: float) -> float:
    """About 1/60 of the way, such that `start` is a whole number of steps from `low`.

    A page moves a value that is not back to the nearest step, and the figure would not be the one that was asked for.
    """
    step = (high - low) / _STEPS
    return (start - low) / max(1, round((start - low) / step)) if start > low else step


def _start(name: str, spec: Any) -> Any:
    """A slider's first value, or a UserError that says which forms there are."""
    if isinstance(spec, bool):
        return spec
    if isinstance(spec, list) and spec:
        return spec[0]
    if isinstance(spec, tuple) and len(spec) in (3, 4) and all(isinstance(v, (int, float)) for v in spec[:3]):
        low, high, start = spec[:3]
        if low <= start <= high and low < high and (len(spec) == 3 or (spec[3] == "log" and low > 0)):
            return start
    raise UserError(f"slider {name!r}: give (low, high, start) with low <= start <= high, the same with a fourth entry "
                    f"\"log\" and low > 0, True or False, or a list of choices; got {spec!r}")


def _text(values: dict[str, Any]) -> str:
    """The values on one line; of the tick-boxes those that are ticked."""
    parts = []
    for name, value in values.items():
        if isinstance(value, bool):
            parts += [name] if value else []
        else:
            parts.append(f"{name} = {value:.3g}" if isinstance(value, float) else f"{name} = {value}")
    return ", ".join(parts)


def _pre(text: str) -> str:
    """The digest for the page; announced by a screen reader when it changes, for it is the picture in words."""
    style = "line-height: 1.3; margin: 0; white-space: pre-wrap"
    return f'<pre class="sage-explorer-digest" role="status" style="{style}">{html.escape(text)}</pre>'


def _png(figure: Any) -> bytes:
    """`plots.png` in half the time: `savefig` draws twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.dpi = 80
    canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])  # the background is opaque
    Image.fromarray(pixels).save(buffer, "png", compress_level=1)
    return buffer.getvalue()
