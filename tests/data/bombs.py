"""Small files that take much memory or time to decode, by what is wrong with them."""

import io
import struct
import zlib

from PIL import Image


def save(image, format_, **options):
    stream = io.BytesIO()
    image.save(stream, format_, **options)
    return stream.getvalue()


def flat(side, format_, **options):
    return save(Image.new("RGB", (side, side)), format_, **options)


def zeros(count):
    return zlib.compress(bytes(count), 9)


def png(width, height, depth, color):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    samples = {0: 1, 2: 3, 4: 2, 6: 4}[color]
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    data = zeros(((width * samples * depth + 7) // 8 + 1) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tiff(width, height, data, *, bits=8, compression=8, after=b"", tags=()):
    """A TIFF of one strip; ``tags`` are (tag, type, count, value or offset), and ``after`` follows the data."""
    entries = {
        256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, bits), 259: (3, 1, compression), 262: (3, 1, 1),
        273: (4, 1, 8), 277: (3, 1, 1), 278: (4, 1, height), 279: (4, 1, len(data)),
    }  # fmt: skip
    entries.update({tag: rest for tag, *rest in tags})
    folder = b"".join(struct.pack("<HHII", tag, *entries[tag]) for tag in sorted(entries))
    place = 8 + len(data) + len(after)
    return struct.pack("<2sHI", b"II", 42, place) + data + after + struct.pack("<H", len(entries)) + folder + bytes(4)


def tiff_of_strips(count):
    """A TIFF whose rows lie in ``count`` strips, all of them the same bytes."""
    places = struct.pack("<H", 8) * count
    tags = [(273, 3, count, 72), (279, 3, count, 72), (278, 4, 1, 1)]
    return tiff(64, 64, bytes(64), compression=1, after=places, tags=tags)


def tiff_of_overlapping_tags(count, numbers):
    """A TIFF with ``count`` tags, each with the same list of 16-bit numbers."""
    data = zeros(4096)
    tags = [(40000 + place, 3, numbers, 8) for place in range(count)]
    return tiff(64, 64, data, after=bytes(2 * numbers), tags=tags)


def tiff_of_one_tile(side):
    """A TIFF of 16 x 16 pixels whose tile is much larger."""
    data = zeros(side * side)
    return tiff(16, 16, data, tags=[(322, 4, 1, side), (323, 4, 1, side), (324, 4, 1, 8), (325, 4, 1, len(data))])


def tiff_with_broken_tag(number):
    """A TIFF that can be decoded, and about which Pillow warns in words that depend on ``number``."""
    return tiff(8, 8, bytes(64), compression=1, tags=[(50000 + number, 4, 1000 + number, 8)])


def jpeg_of_scans(side, scans):
    data = save(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * scans + data[-2:]


def png_of_chunks(count, kind=b"prVt", content=b""):
    """A PNG with ``count`` chunks before the pixels."""
    data = png(8, 8, 8, 2)
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return data[:33] + chunk * count + data[33:]


def jpeg_of_markers(count):
    """A JPEG with ``count`` empty comments."""
    data = flat(8, "JPEG")
    return data[:2] + b"\xff\xfe\0\2" * count + data[2:]


def gif_of_blocks(count):
    """A GIF with a comment in blocks of one byte."""
    data = flat(8, "GIF")
    place = data.index(b"\x2c", 13)
    return data[:place] + b"\x21\xfe" + b"\x01a" * count + b"\0" + data[place:]


def bmp_of_runs(side):
    """A BMP in which each pixel is a run of its own."""
    body = b"\x01\x07" * side**2 + b"\0\x01"
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(body), 0, 0, 256, 0)
    start = 14 + 40 + 1024
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + header + bytes(1024) + body


def bmp_header(width, height):
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def gif_header(side):
    return b"GIF89a" + struct.pack("<HHBBBBHHHHBH", side, side, 0, 0, 0, 0x2C, 0, 0, 9, 9, 0, 2) + b";"


def animation(format_, side):
    frames = [Image.new("P", (side, side), number % 250) for number in range(20)]
    return save(frames[0], format_, save_all=True, append_images=frames[1:])


def rationals(count):
    """EXIF data with a tag of ``count`` rational numbers."""
    tag = struct.pack("<HHHII", 1, 40000, 5, count, 26) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + tag + struct.pack("<II", 1, 1) * count


def overlapping_exif(tags, size):
    """EXIF data whose tags share the same bytes."""
    place = 10 + 12 * tags + 4
    entries = b"".join(struct.pack("<HHII", 30000 + n, 7, size, place) for n in range(tags))
    return b"II*\0" + struct.pack("<IH", 8, tags) + entries + bytes(4 + size)


def jpeg_of_exif(exif):
    """A JPEG with EXIF data in as many segments as it needs."""
    parts = [exif[at : at + 65_000] for at in range(0, len(exif), 65_000)]
    segments = [b"\xff\xe1" + struct.pack(">H", len(part) + 8) + b"Exif\0\0" + part for part in parts]
    data = flat(8, "JPEG")
    return data[:2] + b"".join(segments) + data[2:]


BOMBS = {
    "png 1 x 2^26": (lambda: png(1, 1 << 26, 1, 0), "1 x 67108864 pixels, the limit is 16384 a side"),
    "png 2 x 20000": (lambda: png(2, 20_000, 1, 0), "2 x 20000 pixels, the limit is 16384 a side"),
    "png 8193 x 8193": (lambda: png(8193, 8193, 1, 0), "8193 x 8193 pixels, the limit is"),
    "png 30000 x 30000": (lambda: png(30_000, 30_000, 1, 0), "(30000 x 30000|far more) pixels, the limit is"),
    "gif screen": (lambda: gif_header(65_535), "(65535 x 65535|far more) pixels"),
    "jpeg 20000 x 10": (lambda: save(Image.new("L", (20_000, 10)), "JPEG"), "20000 x 10 pixels, the limit is 16384"),
    "bmp": (lambda: bmp_header(1, 1 << 26), "1 x 67108864 pixels"),
    "ppm no pixels": (lambda: b"P6 60000 60000 255\n", "(60000 x 60000|far more) pixels"),
}  # fmt: skip
"""Files, and what the refusal by their header says."""

COSTLY = {
    "jpeg exif": lambda: jpeg_of_exif(rationals(15 << 17)),
    "jpeg shared exif": lambda: jpeg_of_exif(overlapping_exif(3000, 700_000)),
    "jpeg scans": lambda: jpeg_of_scans(2048, 400),
    "jpeg markers": lambda: jpeg_of_markers(100_000),
    "bmp runs": lambda: bmp_of_runs(1500),
    "ppm plain": lambda: b"P2 2000 2000 255\n" + b"1 " * 4_000_000,
    "png exif": lambda: png_of_chunks(1, b"eXIf", rationals(15 << 17)),
    "png chunks": lambda: png_of_chunks(100_000),
    "gif blocks": lambda: gif_of_blocks(100_000),
    "ppm comment": lambda: b"P6 #" + b"x" * 1_000_000,
    "tiff short": lambda: tiff(6000, 6000, bytes(9), compression=1),
    "tiff float": lambda: tiff(6000, 6000, zeros(4 * 6000**2), bits=32, tags=[(339, 3, 1, 3)]),
    "tiff tile": lambda: tiff_of_one_tile(32_768),
    "tiff strips": lambda: tiff_of_strips(1 << 20),
    "tiff tags": lambda: tiff_of_overlapping_tags(500, 1 << 20),
    "webp": lambda: flat(8000, "WEBP", quality=1, method=0),
    "webp exif": lambda: flat(8, "WEBP", exif=b"Exif\0\0" + rationals(15 << 17)),
}
"""Files of some kilobytes, if they are compressed, that cost Pillow much memory or time, whatever their header says."""

UNSUPPORTED = {
    "ico": lambda: save(Image.new("RGB", (256, 256)), "ICO"),
    "jpeg2000": lambda: b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100),
    "avif": lambda: b"\0\0\0\x1cftypavif" + bytes(100),
    "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60000 60000\n",
}
