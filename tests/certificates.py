"""An authority and a certificate for loopback, made for one test."""

from dataclasses import dataclass
from pathlib import Path

import trustme

__all__ = ["Certificates", "make_certificates"]


@dataclass(frozen=True)
class Certificates:
    """PEM files."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def options(self) -> list[str]:
        """Of a coordinator."""
        return ["--tls-cert", str(self.certificate), "--tls-key", str(self.key)]


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    authority, files = trustme.CA(), Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(files.authority)
    issued.private_key_pem.write_to_path(files.key)
    for pem in issued.cert_chain_pems:
        pem.write_to_path(files.certificate, append=True)
    return files
