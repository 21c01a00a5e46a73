"""Images for the classifier experiment: digits, folders, the hub (without a network), augmentation."""

from __future__ import annotations

import io
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

from sage_lite import vision_data
from sage_lite.errors import UserError
from sage_lite.vision_data import decode, digit_numbers, load_images, random_crop


def picture(colour, size=(20, 12)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


# -- digits ----------------------------------------------------------------------------------------------------------


def test_digits_are_side_by_side_and_say_their_number():
    from sklearn.datasets import load_digits

    train, test = digit_numbers(3, train_images=400, test_images=100)
    known = {(image * 15).astype(np.uint8).tobytes(): int(value) for image, value in
             zip(load_digits().images, load_digits().target)}
    assert train.pixels.shape == (400, 1, 8, 24) and test.pixels.shape == (100, 1, 8, 24)
    assert len(train.classes) == 1000 and train.classes[7] == "007"
    for images in (train, test):
        for pixels, label in zip(images.pixels, images.labels):
            parts = [pixels[0, :, 8 * i:8 * i + 8].contiguous().numpy().tobytes() for i in range(3)]
            assert [known[part] for part in parts] == [int(c) for c in images.classes[label]]


def test_no_digit_is_in_both_sets_and_classes_are_even():
    train, test = digit_numbers(2, train_images=3000, test_images=1000)

    def digits(images):
        return {images.pixels[i, 0, :, 8 * place:8 * place + 8].contiguous().numpy().tobytes()
                for i in range(len(images)) for place in range(2)}

    assert not digits(train) & digits(test)
    assert (train.labels.bincount(minlength=100) == 30).all() and (test.labels.bincount(minlength=100) == 10).all()


def test_digits_are_the_same_every_time_and_another_seed_gives_others():
    (a, ta), (b, tb), (c, _) = (digit_numbers(3, train_images=50, test_images=20, seed=s) for s in (0, 0, 1))
    assert a.pixels.equal(b.pixels) and a.labels.equal(b.labels) and ta.pixels.equal(tb.pixels)
    assert not a.pixels.equal(c.pixels)
    # the same on every machine: a checksum of numpy's seeded generator and scikit-learn's file
    assert int((a.pixels.long().sum((1, 2, 3)) * torch.arange(50)).sum()) == CHECKSUM


CHECKSUM = 17347005


def test_test_images_are_of_all_numbers_also_where_they_are_fewer():
    labels = digit_numbers(4, train_images=10, test_images=500)[1].labels
    assert labels.unique().numel() == 500 and labels.max() > 9000 and 4500 < labels.double().mean() < 5500


def test_digits_take_no_classes_and_no_limit():
    for given in ({"classes": 5}, {"limit": 100}):
        with pytest.raises(UserError, match="folders and the hub"):
            load_images("digits", **given)


def test_digits_must_be_few():
    with pytest.raises(UserError, match="1, 2, 3 or 4"):
        load_images("digits", digits=5)


# -- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Three classes, two training images each, one validation image each; and files that are no images."""
    for label, name in enumerate(("cat", "dog", "eel")):
        for split, count in (("train", 2), ("val", 1)):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for i in range(count):
                (place / f"{i}.PNG").write_bytes(picture((80 * label, 100 * i, 7)))
            (place / ".hidden.png").write_bytes(b"x")
            (place / "notes.txt").write_text("x")
    return tmp_path


def test_a_folder_of_images(folder):
    train, test = load_images(folder, size=8)
    assert (len(train), len(test), train.classes) == (6, 3, ["cat", "dog", "eel"])
    assert train.labels.tolist() == [0, 1, 2, 0, 1, 2] and test.labels.tolist() == [0, 1, 2]
    batch = train.batch([5, 0])
    assert batch.shape == (2, 3, 8, 8) and batch.dtype is torch.uint8
    assert batch[0, :, 4, 4].tolist() == [160, 100, 7] and batch[1, :, 4, 4].tolist() == [0, 0, 7]


def test_class_folders_without_a_split_have_no_test_set(folder):
    train, test = load_images(folder / "train", size=8)
    assert len(train) == 6 and test is None


def test_classes_and_limit(folder):
    train, test = load_images(folder, size=8, classes=2, limit=3)
    assert train.classes == ["cat", "dog"] and train.labels.tolist() == [0, 1, 0] and test.labels.tolist() == [0, 1]


def test_too_large_for_memory_is_decoded_when_asked_for(folder, monkeypatch):
    kept, _ = load_images(folder, size=8)
    monkeypatch.setattr(vision_data, "IN_MEMORY", 100)
    lazy, _ = load_images(folder, size=8)
    assert lazy.pixels is None and len(lazy.files) == 6 and kept.pixels is not None
    assert lazy.batch([0, 4]).equal(kept.batch([0, 4])) and lazy.channels == kept.channels == 3


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_kind_of_picture_becomes_rgb(tmp_path, mode):
    file = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.new(mode, (30, 50)).save(file)
    assert decode(file, 16).shape == (16, 16, 3)


def test_the_middle_square_is_kept():
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = 200  # the middle third is the middle square
    buffer = io.BytesIO()
    Image.fromarray(wide).save(buffer, "PNG")
    assert decode(buffer.getvalue(), 10).min() == 200


def test_folders_that_are_no_image_folders_say_so(folder, tmp_path):
    (tmp_path / "train" / "cat" / "0.PNG").write_bytes(b"no picture")
    with pytest.raises(UserError, match="cannot read .*0.PNG"):
        load_images(folder, size=8)
    empty = tmp_path / "empty"
    (empty / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="at least two folders"):
        load_images(empty)
    (empty / "b").mkdir()
    with pytest.raises(UserError, match="no images"):
        load_images(empty)
    with pytest.raises(UserError, match="neither 'digits', nor a folder here"):
        load_images("/no/such/folder")
    for bad in ({"size": 0}, {"limit": 0}, {"classes": -1}):
        with pytest.raises(UserError, match="must be at least 1"):
            load_images(folder, **bad)


# -- the hub, without a network --------------------------------------------------------------------------------------


def table(count, classes=4):
    import datasets

    names = datasets.ClassLabel(names=list("abcd")[:classes])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    columns = {"image": [{"bytes": picture((i, 0, 0)), "path": None} for i in range(count)],
               "label": [i % classes for i in range(count)]}
    return datasets.Dataset.from_dict(columns, features=features)


def rows(count):
    return table(count).to_iterable_dataset()


@pytest.fixture
def hub(monkeypatch):
    """`datasets.load_dataset` replaced: remembers how it was called and gives 12 training and 6 validation images."""
    import datasets

    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return {"train": rows(12), "validation": rows(6)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_imagenette_is_streamed_from_the_parquet_copy(hub):
    train, test = load_images("frgfm/imagenette", size=8)
    options = {"streaming": True, "revision": "refs/convert/parquet", "data_dir": "160px"}
    assert hub == [(("frgfm/imagenette",), options)]
    assert (len(train), len(test), train.classes) == (12, 6, ["a", "b", "c", "d"])
    assert train.labels.tolist() == [0, 1, 2, 3] * 3 and train.batch([5])[0, 0, 3, 3] == 5


def test_a_parquet_copy_laid_out_like_imagenettes_is_streamed(tmp_path, monkeypatch):
    """No stand-in: `datasets` reads a local copy of the hub's folders, one for each size of the images."""
    for size, counts in (("160px", (12, 6)), ("320px", (3, 3))):
        for split, count in zip(("train", "validation"), counts):
            (tmp_path / size / split).mkdir(parents=True)
            table(count).to_parquet(tmp_path / size / split / "0000.parquet")
    monkeypatch.setitem(vision_data.HUB, str(tmp_path), vision_data.HUB["frgfm/imagenette"])
    train, test = vision_data.hub_images(str(tmp_path), 8, limit=7)
    assert (len(train), len(test), train.classes) == (7, 6, ["a", "b", "c", "d"])
    assert train.labels.tolist() == [0, 1, 2, 3, 0, 1, 2] and train.batch([5])[0, 0, 3, 3] == 5


def test_a_stream_sorted_by_class_needs_a_larger_limit(monkeypatch):
    import datasets

    sorted_rows = table(12).sort("label").to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": sorted_rows})
    with pytest.raises(UserError, match="first 3 images of a/b are all of one class"):
        load_images("a/b", size=8, limit=3)


def test_imagenet_needs_a_limit_and_takes_the_first_images_or_classes(hub):
    with pytest.raises(UserError, match="give limit"):
        load_images("ILSVRC/imagenet-1k", size=8)
    train, test = load_images("ILSVRC/imagenet-1k", size=8, limit=5, classes=2)
    assert train.labels.tolist() == [0, 1, 0, 1, 0] and train.classes == ["a", "b"]
    assert test.labels.tolist() == [0, 1, 0, 1]  # of six validation images, those of the first two classes
    assert hub == [(("ILSVRC/imagenet-1k",), {"streaming": True})]


def test_a_hub_that_cannot_be_reached_or_has_other_columns(monkeypatch):
    import datasets

    def fails(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(UserError, match="could not load 'a/b' from the hub: no route .*digits") as error:
        load_images("a/b")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": rows(3).remove_columns("label")})
    with pytest.raises(UserError, match="columns image; needed: image, label"):
        load_images("a/b")


def test_importing_the_module_imports_no_optional_package():
    import subprocess

    code = ("import sys, sage_lite.vision_data; "
            "print([m for m in ('datasets', 'PIL', 'sklearn', 'torchvision', 'transformers') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert isinstance(vision_data, types.ModuleType)


# -- augmentation ----------------------------------------------------------------------------------------------------


def ramp(n=64, size=32):
    """Images whose first channel is the column and whose second is the row, in [0, 1]."""
    x = (torch.arange(size) + 0.5) / size
    return torch.stack([x.expand(size, size), x[:, None].expand(size, size)]).repeat(n, 1, 1, 1)


def test_the_whole_image_is_the_identity():
    images = ramp(4)
    assert torch.allclose(random_crop(images, 32, smallest=1.0, flip=False)[:, :, 8:24, 8:24].mean(),
                          images[:, :, 8:24, 8:24].mean(), atol=0.05)
    square = vision_data.F.affine_grid(torch.eye(2, 3)[None], [1, 2, 32, 32], align_corners=False)
    assert torch.allclose(vision_data.F.grid_sample(images[:1], square, align_corners=False), images[:1], atol=1e-5)


def test_crops_lie_in_the_image_and_have_the_asked_area_and_ratio():
    out = random_crop(ramp(2000), 16, smallest=0.3, generator=torch.Generator().manual_seed(0))
    assert out.shape == (2000, 2, 16, 16) and out.min() >= 0 and out.max() <= 1
    width, height = (out[:, 0, 8, 12] - out[:, 0, 8, 4]).abs() * 2, (out[:, 1, 12, 8] - out[:, 1, 4, 8]) * 2
    area, ratio = width * height, width / height
    assert area.min() > 0.28 and area.max() <= 1.01 and 0.5 < area.mean() < 0.7
    assert ratio.min() > 0.74 and ratio.max() < 1.34
    centre = out[:, 0].mean((1, 2))
    assert 0.45 < centre.mean() < 0.55 and centre.std() > 0.05  # anywhere, not only in the middle


def test_half_are_mirrored_and_none_where_it_is_off():
    def mirrored(**options):
        out = random_crop(ramp(1000), 16, generator=torch.Generator().manual_seed(0), **options)
        return (out[:, 0, 8, 12] < out[:, 0, 8, 4]).float().mean().item()

    assert 0.45 < mirrored() < 0.55 and mirrored(flip=False) == 0


def test_crops_follow_the_generator():
    a, b, c = (random_crop(ramp(4), 8, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert a.equal(b) and not a.equal(c)
    with pytest.raises(UserError, match="smallest"):
        random_crop(ramp(1), 8, smallest=0.0)
