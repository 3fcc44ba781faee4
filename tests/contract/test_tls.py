"""HTTPS by a real coordinator: whom it convinces, and what it says of files that are wrong."""

import re
import subprocess
import sys

import httpx
import pytest

from api.client import CoordinatorClient, UnreachableError
from api.errors import IsthmusError
from coordinator.tls import check_certificate
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


@pytest.fixture(scope="module")
def files(tmp_path_factory, certificates, strangers):
    """By what is in them."""
    folder = tmp_path_factory.mktemp("files")
    encrypted, text = folder / "encrypted.pem", folder / "text.pem"
    text.write_text("no certificate")
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", certificates.key, "-out", encrypted]
    if b"EC PRIVATE" in certificates.key.read_bytes():
        command[1] = "ec"
    subprocess.run(command, check=True, capture_output=True)
    good = {"certificate": certificates.certificate, "key": certificates.key, "folder": folder}
    return good | {"other": strangers.key, "text": text, "encrypted": encrypted, "nothing": folder / "nothing.pem"}


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("nothing", "key", "cannot read --tls-cert {nothing}: No such file"),
        ("certificate", "nothing", "cannot read --tls-key {nothing}: No such file"),
        ("certificate", "folder", "cannot read --tls-key {folder}: Is a directory"),
        ("certificate", "other", "--tls-key {other} is not the key of the certificate in --tls-cert"),
        ("text", "key", "--tls-cert {text} and --tls-key {key} are to be PEM files"),
        ("key", "certificate", "are to be PEM files"),
        ("certificate", "encrypted", "--tls-key {encrypted} is encrypted"),
    ],
)
def test_files_that_are_wrong(files, certificate, key, message):
    with pytest.raises(IsthmusError, match=re.escape(message.format(**files))):
        check_certificate(files[certificate], files[key])


def test_it_does_not_start_with_files_that_are_wrong(tmp_path, files):
    done = coordinator(tmp_path, "--tls-cert", files["certificate"], "--tls-key", files["other"])
    assert done.returncode == 1
    assert f"isthmus coordinator: --tls-key {files['other']} is not the key of the certificate" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


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
