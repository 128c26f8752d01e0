"""Folders of images as people keep them: which lie in which class, and what is left out and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from wildflower.tasks.labels import label_text
from wildflower.tasks.remarks import Remarks, in_words

SUFFIXES = (
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".webp", ".avif"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2"),
)
OF_CAMERAS = (".heic", ".heif", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".raw", ".jxl", ".psd")
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
OF_SYSTEMS = (
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir", "$recycle.bin"),
    *("system volume information", "lost+found"),
)
METADATA = ("metadata.csv", "metadata.jsonl")
SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # of a folder that `datasets` wrote
TRAINING, TESTING, VALIDATION = ("train", "training"), ("test", "testing"), ("valid", "val", "validation", "dev")

HIDDEN = "hidden files and folders, and those of operating systems, left out"
NESTED = "images in folders inside that of their class, read as of the class"
LINKS = "links that lead nowhere, or to a folder that they lie in, left out"
LOOSE = "images that lie in no folder of a class, left out"
OF_DEVICES = "folders of simulated devices, which are read for them alone"


def is_image(path: Path) -> bool:
    """Return whether a file is one that is read as an image, by its name."""
    return path.suffix.lower() in SUFFIXES and not is_hidden(path)


def is_hidden(path: Path) -> bool:
    """Return whether a file or folder is hidden, or kept by an operating system for itself."""
    return path.name.startswith(".") or path.name.lower() in OF_SYSTEMS


def layout_of(folder: Path, classes: Collection[str], remarks: Remarks) -> tuple[Path | None, Path | None]:
    """Find the folders to train on and to test on; without such folders the folder itself is to train on.

    Each has folders of classes, or a list of its own.

    Args:
        classes: names that are declared as classes, so that folders called so are no splits.
        remarks: where what is left out is counted.

    Raises:
        ValueError: two folders could be the one to train on, or a folder could be a class or a split.
    """
    inside = [path for path in entries(folder) if path.is_dir() and not is_hidden(path)]
    kinds = {path: _kind(path, classes) for path in inside}
    split = [path for path in inside if kinds[path] and _has_classes(path)]
    parts = {kind: [path for path in split if kinds[path] == kind] for kind in ("train", "test")}
    for found in parts.values():
        if len(found) > 1:
            raise ValueError(f"{folder}: {found[0].name}/ and {found[1].name}/ mean the same: leave one of them")
    if not parts["train"] and not parts["test"]:
        _check_flat(folder, [path for path in inside if path not in split], kinds)
        return folder, None
    train, test = (next(iter(parts[kind]), None) for kind in ("train", "test"))
    _count_beside(folder, [path for path in (train, test) if path is not None], kinds, remarks)
    return train, test


def _kind(folder: Path, classes: Collection[str]) -> str:
    """Return which split a folder is by its name: "train", "test", "validation", or "" for none."""
    name = folder.name.lower()
    if label_text(folder.name) in classes:
        return ""
    splits = {"train": TRAINING, "test": TESTING, "validation": VALIDATION}
    return next((kind for kind, names in splits.items() if name in names), "")


def _has_classes(folder: Path) -> bool:
    """Return whether a folder has folders with images, a list of images, or what `datasets` wrote."""
    inside = entries(folder)
    if any(path.name in (*METADATA, SAVED[0]) for path in inside):
        return True
    return any(path.is_dir() and not is_hidden(path) and _has_images(path) for path in inside)


def _has_images(folder: Path) -> bool:
    return next(images_below(folder, Remarks()), None) is not None


def _add_images(remarks: Remarks, what: str, folder: Path) -> bool:
    """Count the images in a folder and below it, if there are any."""
    images = list(images_below(folder, Remarks()))
    remarks.add(what, images[0].relative_to(folder.parent) if images else "", len(images))
    return bool(images)


def _check_flat(folder: Path, inside: list[Path], kinds: dict[Path, str]) -> None:
    """Raise ValueError where images lie right in a folder that is called like a split, so that it could be a class."""
    full = [path for path in inside if _has_images(path)]
    unclear = [path for path in full if kinds[path]]
    others = [path for path in full if not kinds[path] and not is_of_devices(path)]
    if others:
        # Nothing can be learned of images without a class: beside folders of classes train/ is one, a vehicle.
        unclear = [path for path in unclear if kinds[path] != "train"]
    if unclear:
        name = unclear[0].name
        names = [path.name for path in full if path != unclear[0] and not is_of_devices(path)]
        listed = next(
            (f"; {folder.name} has {each}: put one into each split" for each in METADATA if (folder / each).is_file()),
            "",
        )
        declared = (
            f"If {name!r} is a class, name all classes in task-arguments, such as classes = {[*names[:2], name]}; else "
            "put"
            if names
            else "Put"
        )
        raise ValueError(
            f"{unclear[0]}: images lie in no folder of a class{listed}. {declared} the images into a folder for each "
            f"class, such as {name}/cat, or move them away"
        )


def _count_beside(folder: Path, parts: list[Path], kinds: dict[Path, str], remarks: Remarks) -> None:
    """Count what lies beside the folders to train on and to test on."""
    names = " and ".join(f"{part.name}/" for part in parts)
    for path in entries(folder):
        if path in parts or (path.name in SAVED and path.is_file()):
            continue
        if not path.is_dir() or is_hidden(path):
            _count_file(path, folder, remarks, loose=True)
        elif kinds[path] == "validation":
            _add_images(remarks, f"images in {path.name}/, left out because nothing is read but {names}", path)
        elif kinds[path]:
            _add_images(remarks, LOOSE, path)
        elif is_of_devices(path):
            remarks.add(OF_DEVICES, path.name)
        elif not _add_images(remarks, f"images in folders beside {names}, left out", path):
            remarks.add(f"folders without images beside {names}, left out", path.name)


def is_of_devices(folder: Path) -> bool:
    """Return whether a folder is that of simulated devices (`spec.folder_of`), which are read as devices."""
    return folder.name == "devices" and all(re.fullmatch(r"\d{4,}", p.name) for p in entries(folder) if p.is_dir())


def images_of_classes(folder: Path, classes: Collection[str], remarks: Remarks, *, testing: bool) -> list[Path]:
    """Return the images of a folder with a folder for each class, in order of classes and of names.

    Args:
        classes: names that are declared as classes.
        testing: whether the images are to test on, of which a class may have none.

    Raises:
        ValueError: a class is left without images, or folders could be classes of their own.
    """
    found: dict[Path, list[Path]] = {}
    left: dict[Path, Remarks] = {}
    for path in entries(folder):
        if not path.is_dir() or is_hidden(path):
            _count_file(path, folder, remarks, loose=True)
        elif is_of_devices(path):
            remarks.add(OF_DEVICES, path.name)
        elif _kind(path, classes) == "validation" and not testing and _has_classes(path):
            _add_images(remarks, f"images in {path.name}/, left out because it is no class", path)
        else:
            left[path] = Remarks()
            found[path] = list(images_below(path, left[path], folder))
    full = [path for path, images in found.items() if images]
    for path, images in found.items():
        remarks.include(left[path])
        if not images and full:
            if not testing and not _kind(path, ()):
                why = in_words(left[path].found())
                raise ValueError(
                    f"{path}: no image is read for this class{f' ({why})' if why else ', the folder is empty'}: add "
                    "images, or move the folder away"
                )
            remarks.add("folders without images, left out", path.name)
    _check_nested(folder, full, found, classes)
    return [image for path in full for image in found[path]]


def _check_nested(folder: Path, full: list[Path], found: dict[Path, list[Path]], classes: Collection[str]) -> None:
    """Raise ValueError where folders inside of that of a class are rather classes, or splits."""
    for path in full:
        below = sorted({image.relative_to(path).parts[0] for image in found[path] if image.parent != path})
        splits = [name for name in below if name.lower() in (*TESTING, *VALIDATION)]
        if splits:
            raise ValueError(
                f"{path / splits[0]}: it is called like a split, but lies inside of {path.name}/: if that is a class, "
                f"the other way round is read, {splits[0]}/{path.name}/; else put what it holds right into {folder}"
            )
        direct = any(image.parent == path for image in found[path])
        if len(full) == 1 and len(below) > 1 and not direct and label_text(path.name) not in classes:
            raise ValueError(
                f"{path}: is it a class? It is the only folder, and all images lie in {', '.join(below[:3])}"
                f"{', ...' if len(below) > 3 else ''}. If these are the classes, put them right into {folder}; if "
                f"{path.name!r} is the class, put its images right into its folder, or name all classes in "
                "task-arguments"
            )


def images_below(folder: Path, remarks: Remarks, root: Path | None = None) -> Iterator[Path]:
    """Give the images in a folder and in those inside it, in order.

    Args:
        remarks: where what is left out is counted, and what lies deeper than in the folder itself.
        root: to which examples are relative.
    """
    root = folder if root is None else root

    def below(inside: Path, above: tuple[Path, ...]) -> Iterator[Path]:
        for path in entries(inside):
            if is_hidden(path):
                remarks.add(HIDDEN, path.relative_to(root))
            elif path.is_dir():
                real = path.resolve()
                if real in above:
                    remarks.add(LINKS, path.relative_to(root))
                else:
                    yield from below(path, (*above, real))
            elif is_image(path) and path.is_file():
                if inside != folder:
                    remarks.add(NESTED, path.relative_to(root))
                yield path
            else:
                _count_file(path, root, remarks)

    return below(folder, (folder.resolve(),))


def _count_file(path: Path, root: Path, remarks: Remarks, *, loose: bool = False) -> None:
    """Count a file that is not read, with the reason."""
    name, suffix = path.relative_to(root), path.suffix.lower()[:20]
    if is_hidden(path):
        remarks.add(HIDDEN, name)
    elif not path.exists():
        remarks.add(LINKS, name)
    elif not path.is_file():
        remarks.add("things that are no files, such as pipes, left out", name)
    elif loose and is_image(path):
        remarks.add(LOOSE, name)
    elif suffix in OF_CAMERAS:
        remarks.add(f"photos that end in {suffix}, which is not read (save them as .jpg)", name)
    elif suffix in ARCHIVES:
        remarks.add("archives, left out because they are not unpacked", name)
    elif suffix:
        remarks.add(f"files that end in {suffix}, left out because they are no images", name)
    else:
        remarks.add("files without an ending, left out", name)


def entries(folder: Path) -> list[Path]:
    """Return what lies in a folder, in order; ValueError where it cannot be looked into."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read: {error.strerror}") from None
