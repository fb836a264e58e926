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


def png_of_chunks(count, kind=b"prVt"):
    """A PNG with ``count`` empty chunks before the pixels, of a kind that Pillow does not know."""
    data = png(8, 8, 8, 2)
    return data[:33] + struct.pack(">I4sI", 0, kind, zlib.crc32(kind)) * count + data[33:]


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


SIDE = 6000
BOMBS = {
    "png 1 x 2^26": (lambda: png(1, 1 << 26, 1, 0), "1 x 67108864 pixels, the limit is 16384 a side"),
    "png 2^26 x 1": (lambda: png(1 << 26, 1, 1, 0), "67108864 x 1 pixels, the limit is 16384 a side"),
    "png 2 x 20000": (lambda: png(2, 20_000, 1, 0), "2 x 20000 pixels, the limit is 16384 a side"),
    "png 8193 x 8193": (lambda: png(8193, 8193, 1, 0), "8193 x 8193 pixels, the limit is"),
    "png 30000 x 30000": (lambda: png(30_000, 30_000, 1, 0), "(30000 x 30000|far more) pixels, the limit is"),
    "png 16 bits": (lambda: png(SIDE, SIDE, 16, 0), "to be decoded as PNG I;16, the limit is 384 MiB; scale it down"),
    "png alpha": (lambda: png(8000, 8000, 8, 6), "to be decoded as PNG RGBA, the limit is 384 MiB"),
    "apng": (lambda: save(Image.new("RGBA", (8000, 8000)), "PNG", save_all=True), "PNG RGBA, the limit is 384 MiB"),
    "gif screen": (lambda: gif_header(65_535), "(65535 x 65535|far more) pixels"),
    "webp": (lambda: flat(SIDE, "WEBP", quality=1, method=0), "WEBP RGB, the limit is 384 MiB"),
    "jpeg 20000 x 10": (lambda: save(Image.new("L", (20_000, 10)), "JPEG"), "20000 x 10 pixels, the limit is 16384"),
    "jpeg progressive": (lambda: flat(8190, "JPEG", progressive=True), "to be decoded as JPEG RGB"),
    "jpeg scans": (lambda: jpeg_of_scans(2048, 400), "a JPEG with 4.. scans of 4194304 pixels, the limit is"),
    "jpeg scanned": (lambda: jpeg_of_scans(4096, 80), "a JPEG with 8. scans of 16777216 pixels, the limit is"),
    "jpeg markers": (lambda: jpeg_of_markers(100_000), "has too many chunks, markers or blocks; save it again"),
    "png chunks": (lambda: png_of_chunks(100_000), "has too many chunks, markers or blocks; save it again"),
    "png parts": (lambda: png_of_chunks(100_000, b"IDAT"), "has too many chunks, markers or blocks; save it again"),
    "gif blocks": (lambda: gif_of_blocks(100_000), "has too many chunks, markers or blocks; save it again"),
    "ppm comment": (lambda: b"P6 #" + b"x" * 100_000, "has too many chunks, markers or blocks; save it again"),
    "bmp": (lambda: bmp_header(1, 1 << 26), "1 x 67108864 pixels"),
    "bmp runs": (lambda: bmp_of_runs(1500), "2250000 pixels in a variant of BMP that is slow to decode"),
    "ppm odd maximum": (lambda: b"P5 2000 2000 254\n" + bytes(4_000_000), "in a variant of PPM that is slow to decode"),
    "ppm plain": (lambda: b"P2 2000 2000 255\n" + b"1 " * 4_000_000, "in a variant of PPM that is slow to decode"),
    "pbm plain": (lambda: b"P1 1000 1000\n" + b"1 " * 4_000_000, "in a variant of PPM that is slow to decode"),
    "ppm no pixels": (lambda: b"P6 60000 60000 255\n", "(60000 x 60000|far more) pixels"),
    "ppm short": (lambda: b"P6 8000 8000 255\n" + bytes(9), "26 bytes, too few for 8000 x 8000 pixels without comp"),
    "pgm short": (lambda: b"P5 8000 8000 65535\n" + bytes(9), "28 bytes, too few for 8000 x 8000 pixels without comp"),
    "pbm short": (lambda: b"P4 8000 8000\n", "13 bytes, too few for 8000 x 8000 pixels without comp"),
    "bmp short": (lambda: bmp_header(8000, 8000), "bytes, too few for 8000 x 8000 pixels without comp"),
    "tiff short": (lambda: tiff(SIDE, SIDE, bytes(9), compression=1), "bytes, too few for .* pixels without comp"),
    "tiff float": (lambda: tiff(SIDE, SIDE, zeros(4 * SIDE**2), bits=32, tags=[(339, 3, 1, 3)]), "TIFF F, the limit"),
    "tiff tile": (lambda: tiff_of_one_tile(8192), "16 x 16 pixels and needs 1024 MiB to be decoded as TIFF L"),
    "tiff strips": (lambda: tiff_of_strips(1 << 20), "has tags with 0 bytes and 20971.. numbers; save it again"),
    "tiff tags": (lambda: tiff_of_overlapping_tags(500, 1 << 20), "has tags with 0 bytes and 5242880.. numbers"),
}  # fmt: skip
"""Files, and what the refusal says about them."""

UNSUPPORTED = {
    "ico": lambda: save(Image.new("RGB", (256, 256)), "ICO"),
    "jpeg2000": lambda: b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100),
    "avif": lambda: b"\0\0\0\x1cftypavif" + bytes(100),
    "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60000 60000\n",
}
