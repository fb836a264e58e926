"""Folders and tars of images that tests write."""

import io
import tarfile

import numpy as np
from PIL import Image

FILES = {
    "cat/1.png": b"cat one",
    "cat/2.JPG": b"cat two",
    "dog/1.jpeg": b"dog one",
    "dog/deeper/3.webp": b"dog three",
    "dog/.hidden.png": b"no",
    "dog/notes.txt": b"no",
    ".cache/1.png": b"no",
    "__MACOSX/cat/1.png": b"no",
}
"""Bytes by name, in which only four names count as images."""
NAMES = ["cat/1.png", "cat/2.JPG", "dog/1.jpeg", "dog/deeper/3.webp"]


def write_folder(top, files=FILES):
    for name, content in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return top


def write_tar(path, files=FILES, mode="w", prefix=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_images(top, per_class=6, classes=("cat", "dog"), size=(20, 18)):
    """Write class folders of PNG files with random pixels."""
    rng = np.random.default_rng(0)
    for name in classes:
        (top / name).mkdir(parents=True)
        for index in range(per_class):
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(top / name / f"{index}.png")
    return top


def write_every_mode(top):
    """Write images of every mode that a file can have, and rotated photos."""
    rng = np.random.default_rng(0)
    colors = Image.fromarray(rng.integers(0, 256, (20, 26, 3), dtype=np.uint8))
    wide = rng.integers(0, 65536, (20, 26), dtype=np.uint16)
    lying = Image.Exif()
    lying[0x0112] = 6
    for name in ("cat", "dog"):
        (top / name).mkdir(parents=True)
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            colors.convert(mode).save(top / name / f"{mode}.png")
        colors.convert("P").save(top / name / "clear.png", transparency=bytes(range(256)))
        colors.convert("CMYK").save(top / name / "cmyk.jpg", quality=95)
        colors.save(top / name / "lying.jpg", exif=lying)
        Image.frombytes("I;16", (26, 20), wide.tobytes()).save(top / name / "wide.png")
        Image.frombytes("I;16B", (26, 20), wide.astype(">u2").tobytes()).save(top / name / "wide.tif")
        Image.fromarray((wide / 65535).astype(np.float32)).save(top / name / "float.tif")
    return top
