"""The signature of an app that is submitted, by which nodes know whose code it is."""

from __future__ import annotations

import base64
from pathlib import Path

from wildflower.client_app.signed_app import SIGNATURE, app_digest
from wildflower.launch.experiment_file import SettingsError
from wildflower.plugins.raised_as import raised_as

_INCLUDE = "fab-include = ["


def sign(app: Path, key_file: Path) -> None:
    """Sign the files of an app's folder, as `make_bundle` makes it, with an Ed25519 key of OpenSSH's.

    Raises SettingsError where it is none.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.cli.build import build_fab_from_disk

    with raised_as(SettingsError, f"--sign {key_file}: ", (OSError, ValueError, TypeError, UnsupportedAlgorithm)):
        key = load_ssh_private_key(key_file.read_bytes(), None)
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"--sign {key_file}: expected an Ed25519 key, as deploy/certs makes it: app.key")
    pyproject = app / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace(_INCLUDE, f'{_INCLUDE}\n    "{SIGNATURE}",', 1), encoding="utf-8")
    file = app / SIGNATURE
    file.write_text("", encoding="utf-8")
    signature = base64.b64encode(key.sign(app_digest(build_fab_from_disk(app)))).decode()
    file.write_text(f'signature = "{signature}"\n', encoding="utf-8")
