# NBVAL_IGNORE_OUTPUT
# Set-up, the same in every notebook: an installed sage_lite, else the checkout around us, else (in Colab) an install.
import importlib.metadata, importlib.util, os, pathlib, subprocess, sys, tempfile

SOURCE = os.environ.get("SAGE_LITE_SOURCE", "git+https://github.com/sage-lite/sage-lite")
found, here = importlib.util.find_spec, pathlib.Path.cwd()
checkout = next((f for f in (here, *here.parents) if (f / "sage_lite" / "__init__.py").is_file()), None)
if not found("sage_lite") and checkout:
    sys.path.insert(0, str(checkout))
elif not found("sage_lite") and found("google") and found("google.colab"):
    # The torch and numpy that are here stay as they are: pip may only install around them.
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "numpy") if found(name)]
    file = pathlib.Path(tempfile.mkdtemp(), "pins.txt")
    file.write_text("\n".join(pins))
    pip = [sys.executable, "-m", "pip", "install", "-c", str(file), SOURCE]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install sage-lite:\n{done.stdout[-3000:]}")
    importlib.invalidate_caches()

import sage_lite.doctor  # not found? pip install git+https://github.com/sage-lite/sage-lite

print(sage_lite.doctor.notebook_banner())
