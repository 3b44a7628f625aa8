"""Reading of PNG files, for tests."""

import struct
import zlib


def decode(png):
    """Returns the size, kind and pixels of an unfiltered PNG, after checking the sums of its chunks."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, place = {}, 8
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        data = png[place + 8 : place + 8 + size]
        (check,) = struct.unpack(">I", png[place + 8 + size : place + 12 + size])
        assert check == zlib.crc32(kind + data)
        chunks[kind] = data
        place += 12 + size
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    raw, line = zlib.decompress(chunks[b"IDAT"]), width * {0: 1, 2: 3}[color]
    lines = [raw[at : at + line + 1] for at in range(0, len(raw), line + 1)]
    assert all(one[0] == 0 for one in lines)
    assert (depth, list(chunks)) == (8, [b"IHDR", b"IDAT", b"IEND"])
    return width, height, color, b"".join(one[1:] for one in lines)
