"""The explorer: a live figure where widgets work, the picture and its numbers everywhere else."""

from __future__ import annotations

import io
import math
import re
import sys
import time
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from sage_lite.errors import UserError
from sage_lite.explore import WIDGET_VIEW, Explorer

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "01_weighting_curve.ipynb"
EXPLORERS = {"explorer", "budget-explorer"}  # cells of notebook 01 that end with one


def line(axes, slope=1.0, shown=True):
    axes.plot([0, 1], [0, slope if shown else 0], label="line")
    axes.set(xlabel="x", ylabel="y")


def size(png: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(png)).size


@pytest.fixture(params=["ipywidgets", "no ipywidgets"])
def frontend(request, monkeypatch) -> str:
    if request.param == "no ipywidgets":
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    return request.param


def test_static_view_is_a_picture_and_its_numbers(frontend):
    explorer = Explorer(line, slope=(0.1, 10.0, 2.0, "log"), shown=True)
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == repr(explorer) == explorer.digest
    assert explorer.digest == "slope = 2, shown\ny by x\n  line: (0, 0), (1, 2)"
    assert bundle["image/png"] == explorer.png and size(explorer.png) == (512, 304)
    assert (WIDGET_VIEW in bundle) == (frontend == "ipywidgets")


def test_setting_a_value_redraws(frontend):
    explorer = Explorer(line, slope=(0.1, 10.0, 2.0, "log"), shown=True)
    before = explorer.png
    explorer.sliders["slope"].value = 0.5
    assert explorer.values == {"slope": 0.5, "shown": True}
    assert explorer.digest.endswith("line: (0, 0), (1, 0.5)") and explorer.png != before
    explorer.sliders["shown"].value = False
    assert explorer.digest.endswith("line: (0, 0), (1, 0)")
    explorer.sliders["shown"].value = True
    explorer.sliders["slope"].value = 2.0
    assert explorer.png == before


def test_shown_widgets_follow_and_are_labelled():
    import ipywidgets

    explorer = Explorer(line, slope=(0.1, 10.0, 2.0), shown=True)
    explorer.sliders["slope"].value = 3.0  # before it is shown
    bundle = explorer._repr_mimebundle_()
    slider, tick_boxes, picture, text = explorer._box.children
    assert bundle[WIDGET_VIEW]["model_id"] == explorer._box.model_id
    assert slider.description == "slope" and [box.description for box in tick_boxes.children] == ["shown"]
    assert isinstance(picture, ipywidgets.Image) and picture.value == explorer.png and "(1, 3)" in text.value
    before = picture.value
    slider.value = 4.0
    assert picture.value == explorer.png != before and "(1, 4)" in text.value
    assert 'role="status"' in text.value  # a screen reader hears the new numbers
    assert explorer._repr_mimebundle_()[WIDGET_VIEW] == bundle[WIDGET_VIEW], "shown twice: one model, two views"


def test_kinds_of_sliders():
    import ipywidgets as w

    def draw(axes, **values):
        pass

    explorer = Explorer(draw, whole=(2, 64, 8), part=(0.0, 1.0, 0.25), log=(0.01, 10.0, 0.1, "log"), sage=True,
                        grpo=False, kind=["plain", "scaled"], mixed=(0, 1.0, 0.5))  # fmt: skip
    kinds = {name: type(slider) for name, slider in explorer.sliders.items()}
    assert kinds == {"whole": w.IntSlider, "part": w.FloatSlider, "log": w.FloatLogSlider, "sage": w.Checkbox,
                     "grpo": w.Checkbox, "kind": w.Dropdown, "mixed": w.FloatSlider}  # fmt: skip
    assert explorer.values == {"whole": 8, "part": 0.25, "log": 0.1, "sage": True, "grpo": False, "kind": "plain",
                               "mixed": 0.5}  # fmt: skip
    assert explorer.sliders["sage"].description == "SAGE"  # a method has the name it has in every legend
    log = explorer.sliders["log"]
    assert (log.min, log.max) == (-2.0, 1.0)
    log.value = 1e3
    assert log.value == 10.0  # kept within its ends


@pytest.mark.parametrize("spec", [
    (0.01, 10.0, 0.3, "log"), (0.01, 10.0, 10.0, "log"), (0.01, 10.0, 0.01, "log"), (0.05, 0.5, 0.2), (0.0, 1.0, 0.999),
    (0.0, 1.0, 0.001),
])  # fmt: skip
def test_the_start_is_on_a_step_so_that_a_page_leaves_it_alone(spec):
    """A page rounds what is between two steps: low + n * step (or high)."""
    slider = Explorer(line, slope=spec).sliders["slope"]
    start = math.log10(slider.value) if spec[-1] == "log" else slider.value
    steps = (start - slider.min) / slider.step
    assert steps == pytest.approx(round(steps), abs=1e-9)
    assert 40 <= (slider.max - slider.min) / slider.step <= 1001


@pytest.mark.parametrize("spec", [
    (1, 2), (1, 2, 3), (2, 1, 1), (0, 1, "a"), (0.0, 1.0, 0.5, "log"), (0.1, 1.0, 0.5, "linear"), [], "sage", 3.0, None,
    (1, 1, 1), (float("nan"), 1.0, 1.0),
])  # fmt: skip
def test_a_wrong_slider_is_named(spec):
    with pytest.raises(UserError, match="slider 'tau': give \\(low, high, start\\)") as error:
        Explorer(line, tau=spec)
    assert repr(spec) in str(error.value)


def fails_above_one(axes, slope):
    if slope > 1:
        raise ValueError("slope <must> be at most 1")
    line(axes, slope)


def test_an_error_at_the_start_is_raised(frontend):
    with pytest.raises(ValueError, match="at most 1"):
        Explorer(fails_above_one, slope=(0.0, 2.0, 1.5))
    with pytest.raises(TypeError, match="unexpected keyword"):
        Explorer(line, slant=(0.0, 2.0, 1.5))


def test_a_later_error_is_shown_in_the_text_and_gone_when_mended(frontend):
    explorer = Explorer(fails_above_one, slope=(0.0, 2.0, 0.5))
    start = explorer._repr_mimebundle_()
    explorer.sliders["slope"].value = 1.5
    assert explorer.digest == (
        "slope = 1.5\nnot drawn (the picture is the last that was): ValueError: slope <must> be at most 1"
    )
    assert explorer.png == start["image/png"]
    if frontend == "ipywidgets":
        assert "slope &lt;must&gt; be" in explorer._box.children[-1].value
    explorer.sliders["slope"].value = 0.5
    assert explorer.digest == start["text/plain"]


def test_several_panels_stand_still():
    def draw(axes, height):
        for panel in axes:
            line(panel, height)

    explorer = Explorer(draw, 2, height=(1.0, 1000.0, 1.0))
    assert size(explorer.png) == (1024, 304)
    low = [axes.get_position().bounds for axes in explorer.figure().axes]
    explorer.sliders["height"].value = 1000.0
    assert low == [axes.get_position().bounds for axes in explorer.figure().axes]


# --- notebook 01 ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def notebook_explorer(notebook: nbformat.NotebookNode) -> Explorer:
    """The first explorer of notebook 01, from the cells that it needs."""
    scope: dict = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "methods", "explorer"):
            exec(cell.source, scope)  # the repository's own text
    return scope["explorer"]


def test_redraw_takes_less_than_100_ms_at_64_rollouts_with_every_method_shown(notebook):
    explorer = notebook_explorer(notebook)
    for name, slider in explorer.sliders.items():
        slider.value = {"group_size": 64, "match_scale": False}.get(name, slider.value if name == "tau" else True)
    explorer._repr_mimebundle_()
    times = []
    for tau in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        start = time.process_time()  # the processor's time: other programs of a busy machine do not count
        explorer.sliders["tau"].value = tau
        times.append(time.process_time() - start)
    assert min(times) < 0.1, times


def test_notebook_stores_pictures_not_widgets(notebook):
    outputs = {cell.id: cell.outputs[0].data for cell in notebook.cells if cell.id in EXPLORERS}
    assert set(outputs) == EXPLORERS
    for data in outputs.values():
        assert set(data) == {"image/png", "text/plain"}
        assert "SAGE: " in data["text/plain"]


@pytest.mark.parametrize("saved_live", [False, True], ids=["as committed", "saved from a live notebook"])
def test_html_export_shows_the_picture(notebook, saved_live):
    """A notebook saved by Jupyter names the widget, without its state: the export must fall back to the picture."""
    nbconvert = pytest.importorskip("nbconvert")
    copy = nbformat.from_dict(notebook)
    copy.cells = [cell for cell in copy.cells if cell.id in EXPLORERS]
    assert len(copy.cells) == len(EXPLORERS)
    if saved_live:
        for cell in copy.cells:
            cell.outputs[0].data[WIDGET_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": "0" * 32}
    page, _ = nbconvert.HTMLExporter().from_notebook_node(copy)
    outputs = page.split("<body", 1)[1]
    assert outputs.count("data:image/png;base64,") == len(EXPLORERS)
    assert WIDGET_VIEW not in outputs
    assert not re.search(r"VBox\(|Explorer object|sage_lite\.explore", outputs)
