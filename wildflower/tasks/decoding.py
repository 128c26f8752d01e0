"""Image files as people see them, decoded to bytes of one size and one kind of color."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**26  # of one image, before it is decoded


def read_image(file: Path | io.BytesIO, mode: str, size: Sequence[int] = ()) -> Tensor:
    """Return the bytes (channels, height, width) of an image, for training and for `wildflower predict` alike.

    It is read as people see it: turned as its EXIF data say, and what is transparent is white. Of several frames or
    pages the first is read.

    Args:
        file: of at most MAX_PIXELS pixels; others are not decoded.
        mode, size: as of `pixels_of`.

    Raises:
        ValueError: it cannot be read as an image; the text says why.
    """
    return decoded(file, mode, size)[0]


def decoded(file: Path | io.BytesIO, mode: str, size: Sequence[int]) -> tuple[Tensor, bool]:
    """Return what `read_image` does, and whether there are several frames or pages."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            width, height = image.size
            of_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")  # as Pillow reads some that have 16
            of_32_bits = image.mode in ("I", "F") and not of_16_bits
            unknown = image.mode in ("LAB", "HSV")  # of TIFF; what people see depends on more than the numbers
            if width * height <= MAX_PIXELS and not of_32_bits and not unknown:
                # A photo in MPO has a preview or a second view beside it, and shows the first.
                several = image.format != "MPO" and getattr(image, "is_animated", False)
                return pixels_of(_upright(image), mode, size), several
    except UnidentifiedImageError:  # whose text names the file, or an object in memory by its address
        raise ValueError("its bytes are of no image format that is known here") from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has more than {MAX_PIXELS} pixels") from None
    # Those of the system have a number, Pillow's have none, and its decoders have kinds of their own.
    except (OSError, ValueError, SyntaxError, RuntimeError, EOFError, LookupError, struct.error) as error:
        of_system = error.strerror if isinstance(error, OSError) else None
        lacks = str(error) if "not available" in str(error) else ""  # a decoder, in this installation of Pillow
        raise ValueError(of_system or lacks or "it is damaged, or a part of it is missing") from error
    if of_32_bits:  # which Pillow would clip to 255
        raise ValueError(
            "its pixels are signed or have 32 bits, and nothing says which value is white: save it with 8 or 16 bits"
        )
    if unknown:
        raise ValueError("its colors are in Lab or HSV: save it in RGB or gray")
    raise ValueError(f"{width} x {height} are more than {MAX_PIXELS} pixels")


def _upright(image: Image) -> Image:
    """Return an image turned as its EXIF data say; damaged data say nothing, as to programs that show photos."""
    from PIL import ImageOps

    image.load()  # so that an error below is one of the EXIF data
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # of whichever part of the data is damaged
        return image


def pixels_of(image: Image, mode: str, size: Sequence[int] = ()) -> Tensor:
    """Return the bytes (channels, height, width) of an image that is open.

    Args:
        mode: Pillow's "L" or "RGB", to which the image is converted. Of gray values of 16 bits the upper 8 are taken.
            What is transparent becomes white.
        size: height and width, or one side of a square, to which it is resized; empty keeps its size.
    """
    from PIL.Image import Resampling, alpha_composite, fromarray, new

    if image.mode.startswith("I"):  # which Pillow would clip to 255
        values, clear = np.asarray(image).clip(0, 65535), image.info.get("transparency")
        image = fromarray((values >> 8).astype(np.uint8))
        if isinstance(clear, int):  # the value that stands for nothing
            image.putalpha(fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    if image.has_transparency_data:
        image = image if image.mode != "La" else image.convert("LA")
        image = image.convert("RGBA")
        image = alpha_composite(new("RGBA", image.size, "white"), image)
    image = image if image.mode == mode else image.convert(mode)
    if size and image.size != (size[-1], size[0]):
        image = image.resize((size[-1], size[0]), Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(mode)).permute(2, 0, 1).contiguous()
