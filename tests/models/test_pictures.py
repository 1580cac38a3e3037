"""Pictures become the patches that transformers' image processors make of them; damaged, animated,
huge and transparent ones are refused, each with one message, before their pixels are decoded."""

from __future__ import annotations

import ast
import math
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_folders import drawn, encoded
from PIL import Image as Pillow
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from hydraspec.errors import WorkloadError
from hydraspec.models.pictures import decoding
from hydraspec.models.pictures.format import PictureFormat
from hydraspec.models.pictures.patches import digest, fitted_size, to_image
from hydraspec.pictures import MAX_SOFT_TOKENS

TOWER = PictureFormat(
    patch_size=16,
    pooling=3,
    max_tokens=70,
    max_positions=10240,
    begin_id=1,
    image_id=2,
    end_id=3,
    may_be_cut=True,
)


def form(**changes: Any) -> PictureFormat:
    fields = {name: getattr(TOWER, name) for name in PictureFormat.__slots__}
    return PictureFormat(**fields | changes)


# ------------------------------------------------------------------ parity

SIZES = [(37, 91), (200, 333), (50, 2000), (3, 1000), (600, 320), (48, 48), (2, 2), (481, 479)]
SIZES += [(336, 480), (1000, 3)]  # 336 x 480 is whole tokens at max_tokens=70: not resized
# Levels of 255, at most and on average, by which Pillow's resampling differs from torch's (more
# where both sides shrink). Any other filter is above 1 on average. Between torchvision's processor,
# which resamples with torch, and ours there is no difference; the tests do not ask for torchvision.
ROUNDING = (20.0, 0.35)


@pytest.mark.parametrize("max_tokens", [70, 280])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_and_positions_are_transformers(size: tuple[int, int], max_tokens: int) -> None:
    pixels = drawn(*size)
    processor = Gemma4ImageProcessorPil(max_soft_tokens=max_tokens)
    theirs = processor(Pillow.fromarray(pixels), return_tensors="np")
    is_patch = theirs["image_position_ids"][0, :, 0] >= 0
    ours = to_image(pixels, form(max_tokens=max_tokens))
    assert ours.num_tokens == theirs["num_soft_tokens_per_image"][0]
    np.testing.assert_array_equal(ours.positions, theirs["image_position_ids"][0][is_patch])
    assert ours.patches.dtype == np.float32
    difference = np.abs(ours.patches - theirs["pixel_values"][0][is_patch])
    assert 255 * difference.max() <= ROUNDING[0]
    assert 255 * difference.mean() <= ROUNDING[1]


@pytest.mark.parametrize("max_tokens", MAX_SOFT_TOKENS)
def test_sizes_are_transformers(max_tokens: int) -> None:
    """Over thousands of sizes, those that are exact multiples among them."""
    source = find_spec("transformers.models.gemma4.image_processing_pil_gemma4")
    theirs = function_of(source, "get_aspect_ratio_preserving_size", {"math": math})
    rng = np.random.default_rng(max_tokens)
    sizes = [(48 * r, 48 * c) for r in range(1, 30) for c in range(1, 30)]
    sizes += [tuple(map(int, rng.integers(1, limit, 2))) for limit in (60, 900, 9000) * 300]
    for height, width in sizes:
        rows, columns = fitted_size(height, width, form(max_tokens=max_tokens))
        assert (rows * 48, columns * 48) == theirs(height, width, 16, max_tokens * 9, 3)


@pytest.mark.parametrize("size", [(200, 333), (900, 111)], ids=str)
def test_unified_patches_are_transformers(size: tuple[int, int]) -> None:
    """A 48-pixel patch is what transformers merges of nine 16-pixel ones, in raster order."""
    source = find_spec("transformers.models.gemma4_unified.image_processing_gemma4_unified")
    merge = function_of(source, "patches_merge", {"torch": torch, "math": math})
    pixels = drawn(*size)
    small, large = to_image(pixels, TOWER), to_image(pixels, form(patch_size=48, pooling=1))
    merged, positions = merge(
        torch.from_numpy(small.patches)[None],
        torch.from_numpy(small.positions)[None],
        small.num_tokens,
    )
    assert large.num_tokens == small.num_tokens == len(large.patches)
    np.testing.assert_array_equal(large.patches, merged[0].numpy())
    np.testing.assert_array_equal(large.positions, positions[0].numpy())


def function_of(source: Any, name: str, names: dict[str, Any]) -> Any:
    """A function of a transformers module whose import needs torchvision."""
    tree = ast.parse(Path(source.origin).read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    exec(compile(ast.Module([found], []), source.origin, "exec"), names)
    return names[name]


def test_a_picture_wider_than_the_table_of_positions_is_refused() -> None:
    assert to_image(drawn(3, 1000), form(max_positions=210)).positions.max() == 209
    with pytest.raises(WorkloadError, match=r"becomes 210 x 3 patches, .* has 209 positions"):
        to_image(drawn(3, 1000), form(max_positions=209))


def test_digests_differ_with_any_pixel_and_with_the_form() -> None:
    pixels = drawn(8, 6)
    other = pixels.copy()
    other[7, 5, 2] += 1
    found = [
        digest(pixels, TOWER),
        digest(other, TOWER),
        digest(pixels.reshape(6, 8, 3), TOWER),
        digest(pixels, form(max_tokens=140)),
        digest(pixels, form(patch_size=48, pooling=1)),
    ]
    assert len(set(found)) == len(found)
    assert digest(np.asfortranarray(pixels), form(begin_id=9)) == found[0]


# ------------------------------------------------------------------ decoding


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def webp_of_size(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    extended = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + sides
    return b"RIFF" + struct.pack("<I", 4 + len(extended)) + b"WEBP" + extended


PIXELS = drawn(20, 30)
GRAY = Pillow.fromarray(PIXELS[..., 0])
OPAQUE = Pillow.fromarray(np.dstack([PIXELS, np.full((20, 30), 255, np.uint8)]))
GLASS = Pillow.fromarray(np.dstack([PIXELS, np.full((20, 30), 254, np.uint8)]))
FRAMES = {"save_all": True, "append_images": [Pillow.fromarray(255 - PIXELS)]}
PALETTE = Pillow.fromarray(PIXELS).quantize(16)

FINE = {
    "png": encoded("PNG", PIXELS),
    "webp": encoded("WEBP", PIXELS, lossless=True),
    "opaque": encoded("PNG", OPAQUE),
    "orientation upright": encoded("PNG", PIXELS, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"),
}

BAD = {
    "empty": (b"", "is empty"),
    "text": (b"a picture, honestly", "no picture in PNG, JPEG or WebP"),
    "gif": (encoded("GIF", PIXELS), "no picture in PNG"),
    "bmp": (encoded("BMP", PIXELS), "no picture in PNG"),
    "tiff": (encoded("TIFF", PIXELS), "no picture in PNG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture in PNG"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no picture in PNG"),
    "png cut short": (encoded("PNG", PIXELS)[:-200], "damaged or cut short"),
    "jpeg cut short": (encoded("JPEG", PIXELS)[:-200], "damaged or cut short"),
    "webp cut short": (encoded("WEBP", PIXELS)[:-100], "damaged or cut short"),
    "webp without a header": (b"RIFF\4\0\0\0WEBP", "damaged or cut short"),
    "png signature alone": (b"\x89PNG\r\n\x1a\n", "no picture in PNG"),
    "png bomb": (png_of_size(30000, 30000), "at most 67108864 are decoded"),
    "png just too large": (png_of_size(8193, 8192), "8193 x 8192 pixels; at most 67108864"),
    "webp bomb": (webp_of_size(16384, 16384), "16384 x 16384 pixels; at most"),
    "png without pixels": (png_of_size(0, 9), "no picture in PNG"),
    "webp without pixels": (
        b"RIFF\x1e\0\0\0WEBPVP8 \x12\0\0\0\x10\0\0\x9d\x01\x2a\0\0\x09\0" + bytes(8),
        "0 x 9 pixels",
    ),
    "animated png": (encoded("PNG", PIXELS, **FRAMES), "2 pictures or frames"),
    "animated webp": (encoded("WEBP", PIXELS, **FRAMES), "2 pictures or frames"),
    "several in a jpeg": (encoded("MPO", PIXELS, **FRAMES), "2 pictures or frames"),
    "cmyk": (encoded("JPEG", Pillow.fromarray(PIXELS).convert("CMYK")), "mode 'CMYK'"),
    "16 bits": (encoded("PNG", Pillow.fromarray(PIXELS[..., 0].astype(np.uint16))), "mode 'I;16'"),
    "transparent": (encoded("PNG", GLASS), "transparent pixels"),
    "transparent webp": (encoded("WEBP", GLASS, lossless=True), "transparent pixels"),
    "transparent gray": (encoded("PNG", GLASS.convert("LA")), "transparent pixels"),
    "transparent palette": (encoded("PNG", PALETTE, transparency=3), "transparent pixels"),
    "too many bytes": (b"\x89PNG\r\n\x1a\n" + bytes(1 << 25), "at most 33554432 are read"),
}


@pytest.mark.parametrize("name", FINE)
def test_pixels_are_those_that_were_saved(name: str) -> None:
    np.testing.assert_array_equal(decoding.decode(FINE[name]), PIXELS)


def test_other_colours_become_rgb_and_pictures_stand_upright() -> None:
    gray = decoding.decode(encoded("PNG", GRAY))
    np.testing.assert_array_equal(gray, np.repeat(PIXELS[..., :1], 3, axis=2))
    palette = decoding.decode(encoded("PNG", PALETTE))
    np.testing.assert_array_equal(palette, np.asarray(PALETTE.convert("RGB")))
    tag = Pillow.Exif()
    tag[274] = 6  # stored turned left
    turned = decoding.decode(encoded("PNG", PIXELS, exif=tag))
    np.testing.assert_array_equal(turned, np.rot90(PIXELS, -1))
    assert decoding.decode(encoded("JPEG", PIXELS)).shape == (20, 30, 3)


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_refused_before_their_pixels_are_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = BAD[name]
    is_huge = "at most 67108864" in message

    def decoded(*_: object) -> None:
        raise AssertionError("pixels of a huge picture are decoded")

    if is_huge:
        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
        monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile._open", decoded)
    with pytest.raises(WorkloadError) as caught:
        decoding.decode(content)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_damaged_files_are_pictures_or_refused(kind: str) -> None:
    """Flipped bytes, and cuts: no other error, and no size beyond the header's bound."""
    content, rng = encoded(kind, PIXELS), np.random.default_rng(len(kind))
    messages: list[str] = []
    for _ in range(120):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), rng.integers(1, 6)).tolist():
            damaged[place] = int(rng.integers(256))
        cut = int(rng.integers(len(content) // 2, len(content) + 1))
        try:
            pixels = decoding.decode(bytes(damaged[:cut]))
            assert pixels.dtype == np.uint8
            assert pixels.ndim == 3
            assert pixels.shape[2] == 3
        except WorkloadError as error:
            messages.append(str(error))
    assert len(messages) > 40
    assert not any("\n" in message for message in messages)
