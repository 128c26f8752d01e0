"""Apps that are signed: a node that is told whose signatures it trusts runs no other code.

Flower 1.42 verifies only apps that come from its hub: an app that is submitted to a SuperLink has no signature, and a
SuperNode with --trusted-entities refuses it. Here the signature is a file of the app, made by `wildflower run --sign`
over all other files, and the node takes it beside Flower's own.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from wildflower.devices.validation import one_line
from wildflower.plugins.flower_log import log

SIGNATURE = "signature.toml"
MANIFEST = ".info/CONTENT"  # Flower's list of the files, in which the signature stands too
MAX_APP_BYTES, MAX_FILES, MAX_SIGNATURE_BYTES = 2**26, 10_000, 1000
_HEAD = b"wildflower app 1\n"


def app_digest(app: bytes) -> bytes:
    """Return what is signed: all names and contents of a Flower app bundle, but for its signature and Flower's list.

    Raises ValueError where the bundle is larger than any app or has two files of one name, and errors of many kinds
    where it cannot be read.
    """
    with zipfile.ZipFile(io.BytesIO(app)) as bundle:
        files = bundle.infolist()
        names = [file.filename for file in files]
        if len(files) > MAX_FILES or sum(file.file_size for file in files) > MAX_APP_BYTES:
            raise ValueError(f"it has more than {MAX_FILES} files or {MAX_APP_BYTES} bytes")
        if len(set(names)) != len(names):
            raise ValueError("it has two files of one name")
        lines = [
            json.dumps([name, hashlib.sha256(bundle.read(name)).hexdigest()]).encode()
            for name in sorted(names)
            if name not in (SIGNATURE, MANIFEST)
        ]
    return _HEAD + b"\n".join(lines)


def is_signed(app: bytes, trusted: Mapping[str, str]) -> bool:
    """Return whether a bundle has a good signature of one of the trusted keys: OpenSSH's Ed25519, by any names."""
    try:
        digest = app_digest(app)
        with zipfile.ZipFile(io.BytesIO(app)) as bundle:
            if bundle.getinfo(SIGNATURE).file_size > MAX_SIGNATURE_BYTES:
                raise ValueError(f"{SIGNATURE} has more than {MAX_SIGNATURE_BYTES} bytes")
            signature = base64.b64decode(tomllib.loads(bundle.read(SIGNATURE).decode())["signature"], validate=True)
    except KeyError:
        log.error("The app has no signature: `wildflower run --sign KEY` makes one")
        return False
    except Exception as error:  # of any kind: the readers of ZIP and TOML have many
        log.error("The app or its signature cannot be read: %s: %s", type(error).__name__, one_line(str(error)))
        return False
    for text in trusted.values():
        key: Any = load_ssh_public_key(text.encode())  # Flower has checked when the node started that it is Ed25519
        try:
            key.verify(signature, digest)
            return True
        except InvalidSignature:
            continue
    log.error("The app's signature is of nobody whom this node trusts, or the app was changed since")
    return False


def verifying(flowers: Callable[[Any, dict[str, str]], bool]) -> Callable[[Any, dict[str, str]], bool]:
    """Return Flower's check of an app, which also takes an app that holds its own signature."""

    def verify(fab: Any, trusted: dict[str, str]) -> bool:
        return flowers(fab, trusted) or is_signed(fab.content, trusted)

    return verify


def taking_submitted(pull: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return Flower's function that pulls a message, which checks an app also where a SuperLink knows no signature.

    Flower refuses such an app before it looks for signatures.
    """

    def pull_and_check(*, get_fab: Callable[[str, int], Any], **others: Any) -> int | None:
        def get_to_check(fab_hash: str, run_id: int) -> Any:
            fab = get_fab(fab_hash, run_id)
            fab.verifications = {"valid_license": "none", **fab.verifications}
            return fab

        return pull(get_fab=get_to_check, **others)

    return pull_and_check
