"""Facts from the log of a run: what it waits for, its warnings, and its last traceback."""

import re
from collections.abc import Collection, Mapping
from itertools import takewhile
from pathlib import Path

from wildflower.launch.superlink import last_lines
from wildflower.plugins.beside import files_of

WAITING = "Waiting for nodes: "  # how an app's log says so
TRACEBACK_LINES = 30
MAX_WARNINGS = 5
WARNING_LETTERS = 400
LOGGER_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) *:")


def waiting_text(log: Path, start: int) -> str:
    """Return what an app waits for, by the last line of its log after `start` bytes; "" where it does not wait."""
    found = re.search(rf"{WAITING}\d+ connected so far.*", last_lines(log, 1, start))
    return found[0] if found else ""


def log_since(log: Path, start: int) -> str:
    """Return what a log holds after its first `start` bytes, without colors; "" where there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode("utf-8", errors="replace"))


def warnings_text(log: str, path: Path, already: Collection[str]) -> str:
    """Return how often the app warned in a log, and of what: the first of each kind, at most `MAX_WARNINGS`; "" if
    never.

    What has been told `already` is left out.

    Warnings that differ in their numbers only are of one kind.
    """
    told = {text.partition("\n")[0].strip() for text in already}
    kinds: dict[str, list[str]] = {}
    for line in log.splitlines():
        begin, colon, text = line.partition(":")
        text = text.strip()
        if colon and begin.rstrip() == "WARNING" and text not in told:
            kinds.setdefault(re.sub(r"\d[\d,.]*", "#", text), []).append(text[:WARNING_LETTERS])
    if not kinds:
        return ""
    total = sum(map(len, kinds.values()))
    lines = [f"{total} warning{'s' if total > 1 else ''} in {path}"]
    for texts in list(kinds.values())[:MAX_WARNINGS]:
        more = f" (and {len(texts) - 1} more like it)" if len(texts) > 1 else ""
        lines.append(f"  {texts[0]}{more}")
    if len(kinds) > MAX_WARNINGS:
        lines.append(f"  and {len(kinds) - MAX_WARNINGS} of other kinds")
    return "\n".join(lines)


def last_traceback(text: str, app_dir: Path, modules: Mapping[str, Path] | None = None) -> str | None:
    """The last Python traceback in the text of a log, at most its last lines; or None.

    Flower's own frames are left out, and files of the submitted app, whose copy is gone by now, are named as they are
    in `app_dir`, or where the modules lie that travelled with it.
    """
    sources = {str(app_dir / name): file for path in (modules or {}).values() for name, file in files_of(path).items()}
    found = text.rfind("Traceback (most recent call last)")
    if found < 0:
        return None
    kept: list[str] = []
    flowers = False
    # It ends where a blank line or the next message of Flower's logger begins.
    for line in takewhile(lambda line: line.strip() and not LOGGER_LINE.match(line), text[found:].splitlines()):
        if line.startswith('  File "') or not line.startswith("  "):
            flowers = "/site-packages/flwr/" in line
        if not flowers:
            line = re.sub(r'(?<=File ").*/home/apps/[^/]+', lambda _: str(app_dir), line)
            kept.append(re.sub(r'(?<=File ")[^"]+', lambda file: str(sources.get(file[0], file[0])), line))
    if len(kept) > TRACEBACK_LINES:  # the outermost calls are always the same
        kept = [kept[0], "  ...", *kept[2 - TRACEBACK_LINES :]]
    return "\n".join(kept)
