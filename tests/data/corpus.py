"""Encoded images in every format, color mode, depth and orientation."""

import io
from itertools import product

import numpy as np
from PIL import Image, PngImagePlugin

WIDTH, HEIGHT = 40, 24
RAMP = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{}"/></rdf:RDF></x:xmpmeta>'
)
MODES = {
    "JPEG": ("RGB", "L", "CMYK"), "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "WEBP": ("RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB"), "BMP": ("1", "L", "P", "RGB"), "PPM": ("1", "L", "RGB", "I"), "MPO": ("RGB", "L"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "F"),
}  # fmt: skip
OPTIONS = (
    ("JPEG", {"progressive": True}), ("JPEG", {"quality": 30, "subsampling": 2}), ("WEBP", {"lossless": True}),
    ("PNG", {"transparency": (1, 2, 3)}), ("TIFF", {"compression": "tiff_lzw"}), ("TIFF", {"compression": "jpeg"}),
    ("TIFF", {"compression": "tiff_adobe_deflate"}), ("TIFF", {"compression": "packbits"}),
)  # fmt: skip


def picture(mode="RGB"):
    """Colors that differ at every place, in any mode."""
    if mode == "I;16":
        return Image.frombytes(mode, (WIDTH, HEIGHT), RAMP.tobytes())
    if mode in ("I", "F"):
        return Image.fromarray(RAMP.astype(np.int32) if mode == "I" else (RAMP / 65535).astype(np.float32))
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    pixels = np.stack([x * 255 // WIDTH, y * 255 // HEIGHT, (x * y) % 256], axis=-1).astype(np.uint8)
    if mode == "LAB":
        return Image.frombytes("LAB", (WIDTH, HEIGHT), pixels.tobytes())
    return Image.fromarray(pixels).convert(mode)


def encoded(mode, kind, **options):
    """Return a file of the picture."""
    stream = io.BytesIO()
    picture(mode).save(stream, kind, **options)
    return stream.getvalue()


def oriented(kind, mode, orientation, place):
    """Return a file with an orientation in its EXIF or XMP data."""
    if place == "exif":
        exif = Image.Exif()
        exif[0x0112] = orientation
        return encoded(mode, kind, exif=exif)
    text = XMP.format(orientation)
    if kind != "PNG":
        return encoded(mode, kind, xmp=text.encode())
    more = PngImagePlugin.PngInfo()
    more.add_itxt("XML:com.adobe.xmp", text)
    return encoded(mode, kind, pnginfo=more)


def corpus():
    """Return the files by name."""
    files = {f"{kind} {mode}": encoded(mode, kind) for kind, modes in MODES.items() for mode in modes}
    files |= {f"{kind} {options}": encoded("RGB", kind, **options) for kind, options in OPTIONS}
    files["PNG P transparent"] = encoded("P", "PNG", transparency=bytes(range(256)))
    files["GIF animated"] = encoded("P", "GIF", save_all=True, append_images=[picture("P").rotate(90)])
    kinds = (("JPEG", "exif"), ("PNG", "exif"), ("WEBP", "exif"), ("TIFF", "exif"), ("MPO", "exif"), ("JPEG", "xmp"),
             ("PNG", "xmp"), ("WEBP", "xmp"))  # fmt: skip
    for (kind, place), turn in product(kinds, range(1, 9)):
        files[f"{kind} RGB {place} {turn}"] = oriented(kind, "RGB", turn, place)
    for kind, turn in product(("JPEG", "PNG", "TIFF"), range(1, 9)):
        files[f"{kind} L {turn}"] = oriented(kind, "L", turn, "exif")
    for kind, turn in product(("PNG", "TIFF"), range(1, 9)):
        files[f"{kind} I;16 {turn}"] = oriented(kind, "I;16", turn, "exif")
    return files
