"""The state that stays on a device, across rounds and restarts: one safetensors file per device, key and round."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import safetensors.torch
from torch import Tensor

from wildflower.client_app.undo import will_write
from wildflower.devices.private import close_to_others, private_folder, sync
from wildflower.messages.frozen_parts import Part, name_of
from wildflower.messages.packing import Layout, unpack
from wildflower.plugins.flower_log import log

KEPT_RUNS = 16  # of a device; when another one begins, the state of older ones is removed
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9.,=+_-]{0,149}", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", re.ASCII)
_NAME = re.compile(r"(.+)\.(\d+)\.safetensors", re.ASCII)  # KEY.ROUND.safetensors


def folder_name(run: str) -> str:
    """Return the name of a run's folder, another one for every run.

    The run's name comes from the server: it must not lead out of the folder, nor to what else lies in a node's. A name
    that cannot stay as it is gets a hash, after a letter that no other name has.
    """
    if _PLAIN.fullmatch(run) and run not in ("worker", "links.json", "speed.json"):
        return run
    return (
        f"{re.sub('[^A-Za-z0-9.,=+_-]', '_', run)[:80].lstrip('.')}~{sha256(run.encode(errors='replace')).hexdigest()}"
    )


class DeviceState:
    """The state folder of one device in one run."""

    def __init__(self, state_dir: str, run: str, device: int) -> None:
        self.folder = Path(state_dir) / folder_name(run) / f"device-{device}"

    def load(self, key: str, before_round: int, since_round: int = 0) -> dict[str, Tensor] | None:
        """Return the tensors kept under `key` in the newest round before the one and not before the other, or None.

        A file that is not whole, which a power cut can leave, is passed over for the one of the round before, with a
        warning. Raises ValueError where none is whole.
        """
        earlier = [path for number, path in self._versions(key) if since_round <= number < before_round]
        problems = []
        for path in reversed(earlier):
            try:
                tensors = safetensors.torch.load_file(path)
            except (safetensors.SafetensorError, OSError) as error:
                problems.append(f"{path}: not a complete device state ({error})")
                continue
            if problems:
                log.warning("%s: going on with %s", problems[0], path.name)
            return tensors
        if problems:
            raise ValueError(f"{problems[0]}; delete it to start this device anew")
        return None

    def is_empty(self, before_round: int) -> bool:
        """Say whether this device keeps nothing of this run from before a round."""
        return not any(number < before_round for _, number, _ in self._files())

    def save(self, key: str, round_number: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors under `key`: written beside, then renamed, and on the disk when this returns.

        Versions of earlier rounds stay until `forget`, because a run that is resumed may do this round again.

        Raises ValueError for a key that is no file's name.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key[:100]!r} is no name to keep tensors under: letters, digits, and - _ . within it")
        if not self.folder.parent.exists():
            _forget_old_runs(self.folder.parent.parent)
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            private_folder(folder)
        path = self.folder / f"{key}.{round_number}.safetensors"
        beside = path.with_suffix(f".{os.getpid()}.part")
        for half in self.folder.glob(f"{key}.*.part"):
            half.unlink()  # of a process that was killed here
        safetensors.torch.save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, beside)
        close_to_others(beside)
        sync(beside)
        will_write(path)  # what another future of the run has left there is void
        os.replace(beside, path)
        sync(self.folder)
        for number, old in self._versions(key):
            if number > round_number:
                old.unlink()  # of a future that the resumed run is about to write anew

    def take_back(self, key: str, round_number: int) -> None:
        """Delete what was kept under `key` in a round whose update nobody takes."""
        for number, path in self._versions(key):
            if number == round_number:
                path.unlink()

    def forget(self, checkpoint: int, *, other_than: str) -> None:
        """Delete versions that are too old for a run that goes on from the round of a checkpoint, or from a later one.

        Of each key its newest version up to that round stays, and all later ones. Keys that begin with `other_than`
        are left alone.
        """
        old: dict[str, dict[int, Path]] = {}
        for key, number, path in self._files():
            if number <= checkpoint and not key.startswith(other_than):
                old.setdefault(key, {})[number] = path
        for versions in old.values():
            newest = max(versions)
            for number, path in versions.items():
                if number != newest:
                    path.unlink()

    def second_last_round(self, prefix: str, before_round: int) -> int:
        """Return the second last of the rounds before one in which keys that begin with `prefix` were saved.

        The only such round where there is one, and 0 where there is none.
        """
        rounds = {number for key, number, _ in self._files() if key.startswith(prefix) and number < before_round}
        return next(iter(sorted(rounds)[-2:]), 0)

    def forget_before(self, prefix: str, round_number: int) -> None:
        """Delete all versions from before a round of the keys that begin with `prefix`."""
        for key, number, path in self._files():
            if key.startswith(prefix) and number < round_number:
                path.unlink()

    def frozen(self, name: str, layout: Layout) -> dict[str, Tensor] | None:
        """Return the frozen tensors of a part; None if one of them is not there as it was kept."""
        listed = self._read_frozen(name)
        if listed is None:
            return None
        found: dict[str, Tensor] = {}
        # All are read even where one is damaged, so that one order finds and removes all damaged files.
        for entry, tensor in zip(layout.entries, Part.read(listed, layout).tensors, strict=True):
            data = self._read_frozen(tensor)
            if data is not None:
                found |= unpack(data, Layout((replace(entry, offset_bytes=0),)))
        return found if len(found) == len(layout.entries) else None

    def keep_frozen(self, part: Part, contents: Mapping[str, memoryview]) -> None:
        """Keep a part and tensors of it by their names, once for all devices of this node; both have been checked.

        What is there already is read, because a damaged file has its size still, and here are its bytes.
        """
        # The list after the tensors: what a power cut leaves has no list of tensors that never reached the disk. The
        # folder is synced once for all tensors, of which there may be hundreds.
        for files in (contents, {part.name: memoryview(part.listed)}):
            lacking = [name for name in files if self._read_frozen(name) is None]
            for name in lacking:
                path = self._frozen_file(name)
                for folder in (path.parent.parent.parent, path.parent.parent, path.parent):
                    private_folder(folder)
                beside = path.with_suffix(f".{os.getpid()}.part")
                beside.write_bytes(files[name])
                close_to_others(beside)
                sync(beside)
                os.replace(beside, path)
            if lacking:
                sync(self._frozen_file(lacking[0]).parent)

    def _read_frozen(self, name: str) -> bytes | None:
        """Return what is kept under a name, the hash of it; None if it is not there, or is no more what it was."""
        path = self._frozen_file(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if name_of(data) == name:
            return data
        path.unlink(missing_ok=True)  # it is of no use to anybody, and may be large
        return None

    def _frozen_file(self, name: str) -> Path:
        return self.folder.parent / "frozen" / f"{name}.packed"

    def _versions(self, key: str) -> list[tuple[int, Path]]:
        return sorted((number, path) for found, number, path in self._files() if found == key)

    def _files(self) -> list[tuple[str, int, Path]]:
        """Key, round and path of every file; what has another name is none of ours."""
        found = ((_NAME.fullmatch(path.name), path) for path in self.folder.glob("*.safetensors"))
        return [(match[1], int(match[2]), path) for match, path in found if match]


def _forget_old_runs(state_dir: Path) -> None:
    """Remove what a device keeps of runs but the newest, by when it kept something, so that its card never fills.

    By their order and not by their age, because a board's clock may be wrong by years.
    """
    last: dict[Path, int] = {}
    for run in state_dir.glob("*"):
        with suppress(FileNotFoundError):  # other workers of this machine add and remove folders meanwhile
            if times := [_changed_ns(path) for path in run.glob("device-*")]:
                last[run] = max(times)
    for run in sorted(last, key=lambda run: last[run])[: 1 - KEPT_RUNS]:
        log.info("%s: what this device kept of an old run is removed", run)
        shutil.rmtree(run, ignore_errors=True)


def _changed_ns(path: Path) -> int:
    """Return when a folder was changed last; 0 where it is gone."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0
