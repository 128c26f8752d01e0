"""Make the folder that Flower's app hub takes, and check it: `python deploy/hub_bundle.py FOLDER [ADDRESS]`.

All of the app lies in `wildflower/` there, as in a wheel. The hub takes at most 1,000 files of UTF-8, of 10 MB in all
and 1 MB each, and no pictures.

ADDRESS is where the files of the repository are read, such as https://HOST/OWNER/wildflower/blob/main. README's links
and pictures lead there. Without it a link is its text, and a picture its description.
"""

import re
import shutil
import sys
from pathlib import Path

from wildflower.launch.bundle import make_bundle

ROOT = Path(__file__).parents[1]
MOST_FILES = 1_000
MOST_BYTES = 10_000_000
MOST_BYTES_OF_A_FILE = 1_000_000
ENDINGS = ("", ".md", ".py", ".toml")

PICTURE = re.compile(r'<picture>.*?<img alt="(?P<alt>[^"]*)" src="(?P<src>[^"]*)">\s*</picture>', re.DOTALL)
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<src>[^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:)[^)\s]+)\)")


def readme(text: str, address: str) -> str:
    """Return README's text for a reader who has no other file of the repository."""

    def picture(match: re.Match[str]) -> str:
        return f"![{match['alt']}]({address}/{match['src']}?raw=true)" if address else f"*{match['alt']}*"

    text = PICTURE.sub(picture, IMAGE.sub(picture, text))
    return LINK.sub(lambda m: f"[{m['text']}]({address}/{m['target']})" if address else m["text"], text)


def make(folder: Path, address: str = "") -> Path:
    """Make the folder, which must not be there yet; return it. Raises ValueError if the hub would refuse it."""
    make_bundle(ROOT, folder, "heterofl", {})
    (folder / "README.md").write_text(
        readme((ROOT / "README.md").read_text(encoding="utf-8"), address), encoding="utf-8"
    )
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Raise ValueError if the hub would refuse a folder, with the file and the limit."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    if len(files) > MOST_FILES:
        raise ValueError(f"{folder} has {len(files)} files; the hub takes {MOST_FILES}")
    if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
        raise ValueError(f"{folder} has {size:,} bytes; the hub takes {MOST_BYTES:,}")
    for file in files:
        if file.suffix not in ENDINGS:
            raise ValueError(f"{file}: the hub takes {', '.join(ENDINGS[1:])} and LICENSE")
        if (size := file.stat().st_size) > MOST_BYTES_OF_A_FILE:
            raise ValueError(f"{file} has {size:,} bytes; the hub takes {MOST_BYTES_OF_A_FILE:,} of a file")
        file.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), *sys.argv[2:3]))
