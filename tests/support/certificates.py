"""Certificates for tests of TLS."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "a") -> tuple[Path, Path]:
    """A new key and a certificate for it, which nobody but itself has signed. Needs the openssl command."""
    key, certificate = folder / "key", folder / "certificate"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-subj", f"/CN={name}", "-days", "1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def sign_certificate(
    folder: Path, name: str, authority: tuple[Path, Path], days: int = 1
) -> tuple[Path, Path]:
    """A new key and a certificate for it that an authority has signed, given by its own key and certificate.

    A negative number of days makes one that has expired.
    """
    folder.mkdir(exist_ok=True)
    key, request, certificate = folder / "key", folder / "request", folder / "certificate"
    command = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-keyout", key, "-out", request]
    subprocess.run(command, check=True, capture_output=True)
    signs = ["openssl", "x509", "-req", "-in", request, "-CA", authority[1], "-CAkey", authority[0]]
    signs += ["-CAcreateserial", "-days", str(days), "-out", certificate]
    subprocess.run(signs, check=True, capture_output=True)
    return key, certificate
