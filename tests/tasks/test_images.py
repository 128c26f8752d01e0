"""Images are read as people see them: upright, on white, in the colors that they have."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from wildflower.tasks.decoding import read_image
from wildflower.tasks.images import ImageArguments, own

ORIENTATION = 0x0112
# By the EXIF standard: where row 0 and column 0 of what is stored are to be seen, for each value of the orientation.
SEEN = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: np.transpose,
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored.T, 2),
    8: np.rot90,
}


def encoded(image, form="PNG", **options):
    content = io.BytesIO()
    image.save(content, form, **options)
    return io.BytesIO(content.getvalue())


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("value", SEEN)
def test_photos_are_turned_as_their_exif_data_say(value, form):
    stored = np.arange(6, dtype=np.uint8).reshape(2, 3)
    exif = Image.Exif()
    exif[ORIENTATION] = value
    found = read_image(encoded(Image.fromarray(stored), form, exif=exif), "L")[0]
    assert found.tolist() == SEEN[value](stored).tolist()


@pytest.mark.filterwarnings("ignore")
def test_damaged_exif_data_say_nothing():
    broken = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\x03\xff\xff\xff\xff"
    found = read_image(encoded(Image.new("L", (3, 2), 7), "JPEG", exif=broken), "L")
    assert found.shape == (1, 2, 3)


def drawing():
    """A black stroke on nothing, whose hidden colors are black as well, as drawing programs write them."""
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0, 3], pixels[0, 1, 3] = 255, 51
    return Image.fromarray(pixels)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_what_is_transparent_is_white(form, mode):
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    found = read_image(encoded(drawing(), form, **options), mode)
    # Black that covers a fifth leaves four fifths of white.
    assert found.tolist() == [[[0, 204], [255, 255]]] * len(mode)


def test_what_is_transparent_in_gray_in_palettes_and_by_a_color_is_white():
    assert read_image(encoded(drawing().convert("LA")), "L").tolist() == [[[0, 204], [255, 255]]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.putpixel((0, 0), 1)
    for form in ("PNG", "GIF"):
        assert read_image(encoded(palette, form, transparency=0), "RGB").tolist() == [
            [[255, 255]],
            [[0, 255]],
            [[0, 255]],
        ]
    assert (
        read_image(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), transparency=(9, 8, 7)), "RGB").unique().item() == 255
    )
    deep = Image.fromarray(np.array([[0, 40000]], np.uint16))
    assert read_image(encoded(deep, transparency=40000), "L").tolist() == [[[0, 255]]]
    assert read_image(encoded(deep), "L").tolist() == [[[0, 156]]]


def test_other_colors():
    red = Image.new("RGB", (8, 8), (200, 30, 40))
    for image, form in ((red.convert("CMYK"), "JPEG"), (red.convert("CMYK"), "TIFF"), (red.convert("P"), "PNG")):
        found = read_image(encoded(image, form), "RGB")[:, 0, 0]
        assert (found - torch.tensor([200, 30, 40])).abs().max() <= 4 or form == "PNG"
        assert found[0] > 150 > found[1]
    assert read_image(encoded(Image.new("1", (2, 2), 1)), "L").unique().tolist() == [255]
    profiles = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
    lab = ImageCms.profileToProfile(red, *profiles, outputMode="LAB")
    with pytest.raises(ValueError, match="its colors are in Lab or HSV: save it in RGB or gray"):
        read_image(encoded(lab, "TIFF"), "RGB")


@pytest.mark.filterwarnings("ignore")  # Pillow's, of damaged tags
@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP", "AVIF"])
def test_damage_of_any_kind_is_told_in_words(form):
    chance = random.Random(3)
    whole = encoded(Image.effect_noise((16, 12), 60).convert("RGB"), form).getvalue()
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(4):
            content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            assert read_image(io.BytesIO(bytes(content)), "RGB", (4, 4)).shape == (3, 4, 4)
        except ValueError:
            continue


def test_one_color_and_several_frames_are_counted(tmp_path):
    of_class = tmp_path / "a"
    of_class.mkdir()
    frames = [Image.linear_gradient("L").resize((4, 4)).rotate(angle) for angle in (0, 90)]
    for form in ("GIF", "TIFF", "PNG", "WEBP"):
        frames[0].save(of_class / f"several.{form.lower()}", form, save_all=True, append_images=frames[1:])
    frames[0].convert("RGB").save(
        of_class / "camera.jpg", "MPO", save_all=True, append_images=[frames[1].convert("RGB")]
    )
    for number, value in enumerate((0, 255, 255)):
        Image.new("RGBA", (4, 4), (value,) * 3 + (0,)).save(of_class / f"{number}.png")
    data = own(str(tmp_path), ImageArguments(color="gray"))
    assert [(remark.what.split(",")[0], remark.count, remark.example) for remark in data.remarks] == [
        ("images have several frames or pages", 4, "a/several.gif"),
        ("images are of one color all over", 3, "a/0.png"),
    ]
    # What was counted is kept beside the decoded images.
    assert own(str(tmp_path), ImageArguments(color="gray")).remarks == data.remarks


def test_all_broken_images_are_counted_at_once(tmp_path):
    (tmp_path / "cat").mkdir()
    for name, content in (
        ("1.png", b""),
        ("2.png", encoded(Image.new("L", (2, 2))).getvalue()),
        ("3.jpg", b"no image"),
    ):
        (tmp_path / "cat" / name).write_bytes(content)
    told = r"cat/1\.png: cannot be read as an image: .* \(2 images cannot be read, this is the first\)"
    with pytest.raises(ValueError, match=told):
        own(str(tmp_path), ImageArguments(color="gray"))
