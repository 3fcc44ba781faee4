"""HTTPS by a real coordinator: whom it convinces, and what it says of files that are wrong."""

import subprocess
import sys

import httpx
import pytest

from api.client import CoordinatorClient, UnreachableError
from api.errors import IsthmusError
from tests.certificates import make_certificates
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("strangers"))


def coordinator(folder, *options):
    """Runs `python -m coordinator` that is not to start."""
    command = [
        sys.executable,
        "-m",
        "coordinator",
        "--port",
        "0",
        "--data-dir",
        str(folder / "data"),
        *map(str, options),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_it_serves_https(new_coordinator, certificates, strangers):
    live = new_coordinator(*certificates.options)
    assert live.url.startswith("https://127.0.0.1:")
    token = live.token("admin")
    with CoordinatorClient(live.url, token, ca_file=certificates.authority) as client:
        assert client.runs() == []
    for authority in (None, strangers.authority):
        client = CoordinatorClient(live.url, token, ca_file=authority, patience=0.5)
        with client, pytest.raises(UnreachableError, match=r"not trusted here \(.+\); .*ISTHMUS_CA_FILE"):
            client.runs()
    with pytest.raises(httpx.TransportError):
        httpx.get(live.url.replace("https", "http") + "/version", trust_env=False)


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key"])
def test_a_certificate_has_a_key(tmp_path, certificates, option):
    done = coordinator(tmp_path, option, certificates.certificate)
    assert done.returncode == 2
    assert "--tls-cert and --tls-key go together" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_are_wrong(tmp_path, certificates, strangers):
    nothing, text = tmp_path / "nothing.pem", tmp_path / "text.pem"
    text.write_text("no certificate")
    encrypted = tmp_path / "encrypted.pem"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", certificates.key, "-out", encrypted]
    if b"EC PRIVATE" in certificates.key.read_bytes():
        command[1] = "ec"
    subprocess.run(command, check=True, capture_output=True)
    good = certificates.certificate, certificates.key
    for certificate, key, message in (
        (nothing, good[1], f"cannot read --tls-cert {nothing}: No such file"),
        (good[0], nothing, f"cannot read --tls-key {nothing}: No such file"),
        (good[0], tmp_path, f"cannot read --tls-key {tmp_path}: Is a directory"),
        (good[0], strangers.key, f"--tls-key {strangers.key} is not the key of the certificate in --tls-cert"),
        (text, good[1], f"--tls-cert {text} and --tls-key {good[1]} are to be PEM files"),
        (good[1], good[0], "are to be PEM files"),
        (good[0], encrypted, f"--tls-key {encrypted} is encrypted"),
    ):
        done = coordinator(tmp_path, "--tls-cert", certificate, "--tls-key", key)
        assert done.returncode == 1, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_authorities_that_are_wrong(tmp_path, certificates):
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    with pytest.raises(IsthmusError, match=f"{text} holds no certificate"):
        CoordinatorClient("https://x.example", "token", ca_file=text)
    with pytest.raises(IsthmusError, match=r"cannot read the authority's certificate in .*: No such file"):
        CoordinatorClient("https://x.example", "token", ca_file=tmp_path / "nothing")


def test_an_address_of_a_network_without_a_certificate(tmp_path, certificates):
    """192.0.2.1 is nobody's, so that listening fails; the warning comes before."""
    warning = "tokens cross the network in the clear"
    done = coordinator(tmp_path, "--host", "192.0.2.1")
    assert (done.returncode, warning in done.stderr) == (1, True)
    done = coordinator(tmp_path, "--host", "192.0.2.1", *certificates.options)
    assert (done.returncode, warning in done.stderr) == (1, False)
    assert "cannot listen on 192.0.2.1" in done.stderr
