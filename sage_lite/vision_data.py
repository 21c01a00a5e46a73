"""Images for the classifier experiment: numbers made of real digits, a folder of images, or a data set from the hub.

Every source gives two `ImageSet`s, for training and for testing. No torchvision: decoding is Pillow's, augmentation is
one `grid_sample` for the whole batch.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sage_lite.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
IN_MEMORY = 2**30  # bytes of decoded pixels up to which a set is decoded once and kept
HUB: dict[str, dict[str, Any]] = {  # what `datasets.load_dataset` is told, and whether a limit must be given
    # Its main branch is a loading script, which datasets 4 no longer runs; the hub's parquet copy has the same rows.
    "frgfm/imagenette": {"revision": "refs/convert/parquet", "data_dir": "160px"},
    "ILSVRC/imagenet-1k": {"needs_limit": True},
}


@dataclass
class ImageSet:
    """Square images and their labels. `pixels` is uint8 [N, C, S, S'] or None; then `files` are decoded when asked for.

    files: paths or encoded bytes. labels: int64 [N]. classes: a name for each label. size: side S of decoded files.
    """

    labels: Tensor
    classes: list[str]
    pixels: Tensor | None = None
    files: Sequence[Path | bytes] = ()
    size: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        return 3 if self.pixels is None else self.pixels.shape[1]

    def batch(self, index: Sequence[int] | Tensor) -> Tensor:
        """The images at `index` as uint8 [n, C, S, S']."""
        index = torch.as_tensor(index, dtype=torch.long)
        if self.pixels is not None:
            return self.pixels[index]
        with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter's lock
            images = list(pool.map(lambda i: decode(self.files[i], self.size), index.tolist()))
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def load_images(data: str | Path = "digits", *, size: int = 224, digits: int = 3, classes: int | None = None,
                limit: int | None = None, seed: int = 0) -> tuple[ImageSet, ImageSet | None]:
    """Training and test images of `data`; the test set is None where the source has none.

    data: "digits" (offline), a folder (`image_folder`) or the name of a data set on the hub (`hub_images`).
    size: side of a decoded image; not for digits. classes, limit: keep the first so many classes, and so many images
    a split. Raises UserError for a source that is not there or holds nothing.
    """
    for name, value in (("size", size), ("classes", classes), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if str(data) == "digits":
        if classes is not None or limit is not None:
            raise UserError("classes and limit are for folders and the hub: digits has 10^digits classes")
        return digit_numbers(digits, seed=seed)
    if Path(data).expanduser().is_dir():
        return image_folder(Path(data).expanduser(), size, classes=classes, limit=limit)
    if str(data).count("/") != 1 or str(data)[0] in "./~\\":
        raise UserError(f"{str(data)!r} is neither 'digits', nor a folder here, nor the name of a data set on the hub "
                        "(owner/name)")
    return hub_images(str(data), size, classes=classes, limit=limit)


def digit_numbers(digits: int = 3, *, train_images: int = 16_000, test_images: int = 2_000,
                  seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Pictures of the numbers 0 … 10^digits - 1, 8 x 8 * digits pixels: scikit-learn's digits side by side.

    An image's class is its number; the digits in it are drawn at random. A fifth of the 1,797 digits serves the test
    images only. The same arguments give the same pictures on every machine.
    """
    if digits not in (1, 2, 3, 4):
        raise UserError(f"digits must be 1, 2, 3 or 4 (10 to 10,000 classes), got {digits!r}")
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels, value = (found.images * 15).astype(np.uint8), found.target
    order = np.random.default_rng(0).permutation(len(value))  # the split of the digits does not hang on the seed
    parts, sets = np.split(order, [len(order) * 4 // 5]), []
    for part, count in zip(parts, (train_images, test_images)):
        rng = np.random.default_rng([seed, len(sets)])
        labels = rng.permutation(np.arange(max(count, 10**digits)) % 10**digits)[:count]
        picked = np.empty((count, digits), dtype=np.int64)
        for place in range(digits):
            wanted = labels // 10 ** (digits - 1 - place) % 10
            for digit in range(10):
                rows = np.flatnonzero(wanted == digit)
                picked[rows, place] = rng.choice(part[value[part] == digit], len(rows))
        wide = pixels[picked].transpose(0, 2, 1, 3).reshape(count, 1, 8, 8 * digits)
        names = [f"{number:0{digits}d}" for number in range(10**digits)]
        sets.append(ImageSet(torch.from_numpy(labels), names, torch.from_numpy(np.ascontiguousarray(wide))))
    return sets[0], sets[1]


def image_folder(folder: Path, size: int, *, classes: int | None = None,
                 limit: int | None = None) -> tuple[ImageSet, ImageSet | None]:
    """A folder with one folder of images a class, or with `train/` and perhaps `val/` (`validation/`, `test/`) of them.

    limit: so many images a split, spread evenly over the classes.
    """
    train = folder / "train" if (folder / "train").is_dir() else folder
    names = sorted(entry.name for entry in train.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    names = names[:classes]
    if len(names) < 2:
        raise UserError(f"{train} needs at least two folders, one a class, with images in them; found {len(names)}")
    test = next((folder / name for name in ("val", "validation", "test") if (folder / name).is_dir()), None)
    return _folder(train, names, size, limit), None if test is None else _folder(test, names, size, limit)


def _folder(folder: Path, names: list[str], size: int, limit: int | None) -> ImageSet:
    found = []
    for label, name in enumerate(names):
        files = sorted(folder.joinpath(name).glob("*"))
        files = [file for file in files if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
        found += [(place, label, file) for place, file in enumerate(files)]
    if not found:
        raise UserError(f"no images ({', '.join(SUFFIXES)}) in the class folders of {folder}")
    found.sort(key=lambda entry: entry[:2])  # the first image of every class, then the second: a limit is spread evenly
    found = found[:limit]
    return _kept(torch.tensor([label for _, label, _ in found]), names, [file for *_, file in found], size)


def hub_images(name: str, size: int, *, classes: int | None = None,
               limit: int | None = None) -> tuple[ImageSet, ImageSet | None]:
    """A data set of the hub with columns "image" and "label", streamed; the first `limit` images a split are kept.

    They are kept as they are encoded (about 110 kB an image of ImageNet) and decoded when needed. The test set is the
    split "validation" or "test". A gated data set needs a login (`hf auth login`).
    """
    settings = dict(HUB.get(name, {}))
    if settings.pop("needs_limit", False) and limit is None:
        raise UserError(f"{name} is too large to be kept in memory: give limit (images a split), or a folder of images")
    import datasets

    try:
        splits = datasets.load_dataset(name, streaming=True, **settings)
        test = next((split for split in ("validation", "test") if split in splits), None)
        train = _stream(splits["train"], name, size, classes, limit)
        return train, None if test is None else _stream(splits[test], name, size, classes, limit)
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"could not load {name!r} from the hub: {reason} (without a network: data='digits' or a folder "
                        "of images; a gated data set needs `hf auth login`)") from error


def _stream(rows: Any, name: str, size: int, classes: int | None, limit: int | None) -> ImageSet:
    import datasets

    if not {"image", "label"} <= set(rows.features or ()):
        raise UserError(f"{name} has the columns {', '.join(rows.features or ()) or '(none)'}; needed: image, label")
    names = list(getattr(rows.features["label"], "names", None) or ())
    files, labels = [], []
    for row in rows.cast_column("image", datasets.Image(decode=False)):
        if classes is None or row["label"] < classes:
            files.append(row["image"]["bytes"])
            labels.append(row["label"])
        if len(labels) == limit:
            break
    if not labels or min(labels) < 0:
        raise UserError(f"{name} gave no labelled image" + (f" of the first {classes} classes" if classes else ""))
    if len(set(labels)) == 1:
        raise UserError(f"the first {len(labels)} images of {name} are all of one class: raise limit")
    names = names or [str(label) for label in range(max(labels) + 1)]
    return _kept(torch.tensor(labels), names[:classes], files, size)


def _kept(labels: Tensor, names: list[str], files: list[Path | bytes], size: int) -> ImageSet:
    """Decoded now where that fits into memory, else at every use."""
    images = ImageSet(labels, names, files=files, size=size)
    if len(files) * 3 * size * size <= IN_MEMORY:
        images.pixels = images.batch(range(len(files)))
        images.files = ()
    return images


def decode(file: Path | bytes, size: int) -> np.ndarray:
    """An image file as uint8 [size, size, 3]: the shorter side scaled to `size`, then the middle square."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.draft("RGB", (size, size))  # a JPEG is decoded at a smaller scale where that is enough
            return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC))
    except OSError as error:
        what = "an image of the hub" if isinstance(file, bytes) else str(file)
        raise UserError(f"cannot read {what}: {error}; remove it or replace it") from None


def random_crop(images: Tensor, size: int, *, smallest: float = 0.08, flip: bool = True,
                generator: torch.Generator | None = None) -> Tensor:
    """Inception's augmentation of float images[N, C, H, W] to [N, C, size, size], in one `grid_sample`.

    A rectangle of `smallest` to 1 of the area and of aspect ratio 3/4 to 4/3, anywhere in the image, mirrored in half
    of the cases; sides that would not fit are cut to the image.
    """
    if not 0 < smallest <= 1:
        raise UserError(f"smallest must be a share of the area in (0, 1], got {smallest}")
    n = len(images)
    area, ratio, x, y, side = torch.rand(5, n, generator=generator)
    area, ratio = smallest + (1 - smallest) * area, torch.exp((2 * ratio - 1) * np.log(4 / 3))
    width, height = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    mirror = torch.where(side < 0.5, -1.0, 1.0) if flip else torch.ones(n)
    theta = torch.zeros(n, 2, 3)  # where in the image, in [-1, 1], the output pixel (x, y, 1) looks
    theta[:, 0, 0], theta[:, 0, 2] = width * mirror, (2 * x - 1) * (1 - width)
    theta[:, 1, 1], theta[:, 1, 2] = height, (2 * y - 1) * (1 - height)
    grid = F.affine_grid(theta.to(images), [n, images.shape[1], size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
