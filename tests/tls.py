"""Self-signed certificates for servers of tests on this machine."""

import subprocess
from pathlib import Path


def self_signed(folder: Path, days: int = 2) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 and its key; returns both files.

    With `days` below 0 it has expired. CalledProcessError where this OpenSSL makes none of so many days.
    """
    certificate, key = folder / "server.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", str(days)]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
