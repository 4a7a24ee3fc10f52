"""Decodes image files with Pillow. Format and size are read from the header and checked before any
pixel is decoded.

:mod:`radixrt.tokenizer.images.decoder` does it in a process of its own."""

import base64
import binascii
import io
import re
import warnings
from typing import Any, NamedTuple

from radixrt.base.errors import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's names of the formats that are decoded."""


_OTHERS = {
    "AVIF": rb".{4}ftypavi[fs]",
    "HEIC": rb".{4}ftyp(hei|hev|mif1|msf1)",
    "TIFF": rb"II\*\0|MM\0\*",
    "SVG": rb"(\xef\xbb\xbf)?\s*<(svg|\?xml|!DOCTYPE svg|!--)",
    "PDF": rb"%PDF",
}
"""The beginnings of files that people take for images, by the names of their formats."""


class ImageLimits(NamedTuple):
    """What a request may ask to be decoded."""

    images: int = 64
    """Of one request."""
    pixels: int = 1 << 24
    """Of one image; a decoded one takes 3 bytes a pixel, and twice that while it is converted."""
    num_bytes: int = 20 << 20
    """Of the file of one image."""


DEFAULT_LIMITS = ImageLimits()

MAX_SIDE = 1 << 15
"""Pixels of the longer side, so that no strip of one pixel's height becomes a huge tensor."""

_ANIMATED = ("PNG", "WEBP", "GIF")
"""Formats whose further pictures are frames; those of JPEG files are previews."""


def decode_image(data: str | bytes, where: str, limits: ImageLimits = DEFAULT_LIMITS) -> Any:
    """A Pillow image in RGB, turned as its EXIF data say: what transformers' ``load_image`` makes
    of it.

    Args:
        data: the file in base64.
        where: names the image in errors.

    Raises:
        RequestError: it is of another format, too large, animated or damaged.
        MemoryError: the process may not take as much as it needs.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if (size := len(data) * 3 // 4) > limits.num_bytes + 2:
        raise invalid_image(
            where,
            f"has {size} bytes; at most {limits.num_bytes} are taken (--max-image-mib). Scale it down",
            status=413,
        )
    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_image(where, f"is not valid base64: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(file), formats=FORMATS)
            _check_header(image, where, limits)
            turned = ImageOps.exif_transpose(image)
            return turned.convert("RGB")
    except RequestError:
        raise
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        for name, beginning in _OTHERS.items():
            if re.match(beginning, file, re.DOTALL):
                raise invalid_image(
                    where, f"has the format {name}; this server decodes {known}"
                ) from error
        raise invalid_image(where, f"is in no format that this server decodes ({known})") from error
    except Image.DecompressionBombError as error:
        raise _too_large(where, limits) from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many kinds at damaged files
        raise invalid_image(where, f"can't be decoded: {str(error)[:200]}") from error


def _check_header(image: Any, where: str, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.pixels or max(width, height) > MAX_SIDE:
        raise _too_large(where, limits, f" and has {width}x{height}")
    if not width or not height:
        raise invalid_image(where, "has no pixels")
    if image.format in _ANIMATED and getattr(image, "is_animated", False):
        raise invalid_image(where, f"is an animated {image.format}; send one of its frames")


def _too_large(where: str, limits: ImageLimits, found: str = "") -> RequestError:
    return invalid_image(
        where,
        f"may have at most {limits.pixels} pixels (--max-image-pixels) and {MAX_SIDE} on a side{found}; scale it down",
        status=413,
    )


def invalid_image(where: str, reason: str, status: int = 400) -> RequestError:
    """The error of an image that is refused."""
    return RequestError(f"{where} {reason}.", status=status, param="messages", code="invalid_image")
