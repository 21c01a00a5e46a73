"""The tau slider of notebook 01 in JupyterLab, moved by keyboard in a real browser.

Everything stays on this machine: the server listens on loopback only, without a token and with folders of its own, and
what the page asks for elsewhere (the picture of the Colab badge) is refused. Screenshots lie in pytest's tmp_path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = "01_weighting_curve.ipynb"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
ELSEWHERE = re.compile(r"https?://(?!127\.0\.0\.1[:/])")
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are in the page, too
}


@pytest.fixture
def chromium():
    """A headless Chromium, or a skip that says what is missing."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: install one, as in `apt-get install chromium`")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def jupyterlab(tmp_path):
    """Address of a JupyterLab whose folder holds notebook 01 without outputs."""
    pytest.importorskip("jupyterlab", reason="no JupyterLab: pip install jupyterlab")
    work, settings = tmp_path / "work", tmp_path / "settings"
    work.mkdir()
    notebook = nbformat.read(ROOT / "notebooks" / NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, work / NOTEBOOK)
    for name, values in SETTINGS.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"HOME": tmp_path, "JUPYTER_CONFIG_DIR": tmp_path / "config", "JUPYTER_RUNTIME_DIR": tmp_path / "runtime",
           "JUPYTER_DATA_DIR": tmp_path / "data", "JUPYTERLAB_WORKSPACES_DIR": tmp_path / "workspaces",
           "JUPYTERLAB_SETTINGS_DIR": settings, "IPYTHONDIR": tmp_path / "ipython", "PYTHONPATH": ROOT}  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
               f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
               f"--ServerApp.root_dir={work}", "--LabApp.expose_app_in_browser=True",
               "--LabApp.extension_manager=readonly",
               "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]  # fmt: skip
    log = tmp_path / "jupyterlab.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, env=os.environ | {k: str(v) for k, v in own.items()}, cwd=work,
                                  stdout=file, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/api", server, log)
        yield address
    finally:
        server.terminate()  # it shuts its kernels down
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_for(address: str, server: subprocess.Popen, log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, f"JupyterLab stopped:\n{log.read_text()}"
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer within {seconds} s:\n{log.read_text()}")


def test_the_tau_slider_moves_the_picture_and_its_numbers(jupyterlab, chromium, tmp_path):
    page = chromium.new_page(viewport={"width": 1200, "height": 1100})
    page.set_default_timeout(120_000)  # of one step; a busy machine takes its time to start a kernel
    page.route(ELSEWHERE, lambda route: route.abort())
    page.goto(f"{jupyterlab}/lab/tree/{NOTEBOOK}")
    # Cells that are run before the page is connected to the kernel are dropped without a word.
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"() => {kernel}?.connectionStatus == 'connected' && {kernel}.status == 'idle'")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    box = page.locator(".widget-vbox", has=page.locator(".sage-explorer-picture")).first
    picture, numbers = box.locator("img.widget-image"), box.locator(".sage-explorer-digest")
    picture.wait_for()
    # The cells below move the slider, too, and put it back: wait for the last of them.
    last = page.locator(".jp-CodeCell").last
    page.wait_for_function("cell => /\\[\\d+\\]/.test(cell.innerText)", arg=last.element_handle())
    picture.scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / "before.png")
    assert picture.evaluate("image => image.naturalWidth") == 512
    start = numbers.inner_text()
    assert start.startswith("tau = 0.3, group_size = 8, sage, grpo, maxrl, rloo\n")

    def press(key: str) -> str:
        """Press a key; returns the numbers once they and the picture have changed."""
        source, text = picture.get_attribute("src"), numbers.inner_text()
        page.keyboard.press(key)
        changed = "([image, source, numbers, text]) => image.src != source && numbers.innerText != text"
        arguments = [picture.element_handle(), source, box.locator(".widget-html-content").element_handle(), text]
        page.wait_for_function(changed, arg=arguments)
        return numbers.inner_text()

    box.locator(".noUi-handle").first.focus()
    taus = [float(re.search(r"tau = ([\d.]+)", press(key))[1]) for key in ("ArrowRight", "ArrowRight", "ArrowLeft")]
    assert 0.3 < taus[2] == taus[0] < taus[1] < 0.4
    page.screenshot(path=tmp_path / "after.png")
    assert press("ArrowLeft") == start

    assert "F-GRPO" not in start
    box.get_by_label("F-GRPO", exact=True).focus()
    assert "F-GRPO: (0, " in press("Space")
    page.screenshot(path=tmp_path / "ticked.png")
