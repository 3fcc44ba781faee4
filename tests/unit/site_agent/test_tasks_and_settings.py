"""What an operator may write, and what is answered when it makes no sense."""

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from api.errors import IsthmusError
from api.locks import only_process
from site_agent import join
from site_agent.settings import Settings, faults_of_settings
from site_agent.tasks import Task, missing, parse_task

BASIC = {"name": "a", "region": "west", "task": ["tiny=python train.py"]}


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t=python -m train", (sys.executable, "-m", "train")),
        ("t=python3 train.py", (sys.executable, "train.py")),
        ("t=/opt/python train.py", ("/opt/python", "train.py")),
        ("t=python3.12 train.py", ("python3.12", "train.py")),
        ("t=run 'two words' a\\ b x=1", ("run", "two words", "a b", "x=1")),
        ("t=run python", ("run", "python")),
    ],
)
def test_a_command_is_split_as_a_shell_would(text: str, words: tuple[str, ...]):
    assert parse_task(text) == Task("t", words)


@pytest.mark.parametrize("text", ["tiny_lm", "tiny_lm=", "tiny_lm=  ", "python train.py"])
def test_a_task_needs_a_name_and_a_command(text: str):
    with pytest.raises(ValueError, match="must read NAME=COMMAND"):
        parse_task(text)


@pytest.mark.parametrize("name", ["", "Tiny", "a b", "-x", "a/b", "a\n", "x" * 64])
def test_a_task_needs_a_proper_name(name: str):
    with pytest.raises(ValueError, match="name"):
        parse_task(f"{name}=run")


def test_an_open_quote():
    with pytest.raises(ValueError, match="quotation"):
        parse_task("t=run 'x")


# --- versions of tasks ------------------------------------------------------------------------------------------------


def test_the_version_of_a_task_is_that_of_its_script_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (package := tmp_path / "code" / "deep").mkdir(parents=True)
    for path in (tmp_path / "train.py", package / "train.py", package / "__main__.py"):
        path.write_text(f"# {path}")
    commands = ["python train.py --lr 1", "python -m code.deep.train", "python -u -m code.deep", "cat other.txt"]
    tasks = [f"t{number}={command}" for number, command in enumerate(commands)]
    settings = Settings(name="a", region="west", task=[*tasks, "own=python train.py"], task_version=["own=v 1=2"])
    first = settings.versions()
    assert len(set(first.values())) == 5
    assert first["t0"] == "sha256:" + hashlib.sha256((tmp_path / "train.py").read_bytes()).hexdigest()[:16]
    assert first["own"] == "v 1=2"
    (tmp_path / "train.py").write_text("# changed")
    assert {name for name, version in settings.versions().items() if version != first[name]} == {"t0"}


@pytest.mark.parametrize("command", ["python -c pass", "python gone.py", "no-such-program", "python -m no.such.module"])
def test_a_script_that_is_not_found_has_no_version(command: str):
    assert Settings(name="a", region="west", task=[f"t={command}"]).versions() == {"t": ""}


def test_no_module_has_no_version():
    assert Settings(name="a", region="west", task=["t=python -m"]).versions() == {"t": ""}


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("python trian.py --lr 1", "trian.py"),
        ("torchrunn train.py", "torchrunn"),
        ("python -m no.such.module", "module 'no.such.module'"),
        ("python -m", "module ''"),
        ("python train.py other.py", None),
        ("python -u -m json.tool gone.py", None),
        ("python -c 'import x' gone.py", None),
        ("bash -c 'python gone.py'", None),
        ("true --out gone.py -m none", None),
    ],
)
def test_what_a_command_names_and_is_not_there(
    command: str, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert missing(parse_task(f"t={command}").command) == named


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("tiny", "must read NAME=TEXT"),
        ("tiny=", "must read NAME=TEXT"),
        ("other=1", "'other', which is no task: tiny"),
        (f"tiny={'x' * 101}", "at most 100 characters"),
    ],
)
def test_versions_that_make_no_sense(given: str, words: str):
    with pytest.raises(ValidationError, match=words):
        Settings(name="a", region="west", task=["tiny=python train.py"], task_version=[given])


# --- settings ---------------------------------------------------------------------------------------------------------


def test_flags(tmp_path: Path):
    line = f"--name a --region west --task 't=python x.py' --task u=true --ranks 2 --site-dir {tmp_path} --grace-s 1.5"
    settings = CliApp.run(Settings, cli_args=shlex.split(line))
    assert settings.tasks == {"t": Task("t", (sys.executable, "x.py")), "u": Task("u", ("true",))}
    assert (settings.ranks, settings.grace_s, settings.directory) == (2, 1.5, tmp_path)
    assert settings.coordinator == "http://127.0.0.1:8420"


def test_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"NAME": "b", "REGION": "east", "TASK": '["t=python x.py"]', "JOIN_TOKEN": "secret"}.items():
        monkeypatch.setenv(f"ISTHMUS_{name}", value)
    settings = CliApp.run(Settings, cli_args=["--region", "west"])
    assert (settings.name, settings.region, settings.read_join_token()) == ("b", "west", "secret")
    assert settings.directory == tmp_path / "isthmus-site-b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": ["nonsense"]}, "must read NAME=COMMAND"),
        ({"task": []}, "at least 1"),
        ({"ranks": 0}, "greater than or equal to 1"),
        ({"name": "Upper"}, "Upper"),
        ({"coordinator": "127.0.0.1:8420"}, "'127.0.0.1:8420' is no .*http://HOST:PORT"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, object], message: str):
    with pytest.raises(ValidationError, match=message):
        Settings(**(BASIC | change))


def test_settings_that_are_missing_are_named_as_they_are_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ISTHMUS_REGION", raising=False)
    monkeypatch.delenv("ISTHMUS_TASK", raising=False)
    with pytest.raises(ValidationError) as caught:
        CliApp.run(Settings, cli_args=["--name", "a", "--ranks", "0"])
    assert faults_of_settings(caught.value) == [
        "--region is missing: give it, or set ISTHMUS_REGION",
        "--task is missing: give it, or set ISTHMUS_TASK",
        "ranks: Input should be greater than or equal to 1",
    ]


def test_join_token_from_a_file(tmp_path: Path):
    path = tmp_path / "join-token"
    path.write_text("the token\n")
    assert Settings(**BASIC, join_token_file=path).read_join_token() == "the token"
    assert Settings(**BASIC, join_token_file=path, join_token="other").read_join_token() == "other"


def test_no_join_token_names_the_remedies():
    with pytest.raises(IsthmusError, match=r"--join-token-file.*ISTHMUS_JOIN_TOKEN"):
        Settings(**BASIC).read_join_token()


def test_a_join_token_file_that_is_missing(tmp_path: Path):
    path = tmp_path / "no-such-file"
    with pytest.raises(IsthmusError, match=rf"cannot read the join token in {path}: No such file"):
        Settings(**BASIC, join_token_file=path).read_join_token()


def test_the_agent_says_so_and_ends(tmp_path: Path):
    options = ["--name", "a", "--region", "west", "--task", "t=true", "--site-dir", tmp_path / "data"]
    command = [sys.executable, "-m", "site_agent", *options, "--join-token-file", tmp_path / "none"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.strip() == (
        f"isthmus agent: cannot read the join token in {tmp_path / 'none'}: No such file or directory"
    )


def test_the_agent_warns_of_a_script_that_is_not_there(tmp_path: Path):
    options = ["--name", "a", "--region", "west", "--task", "t=python gone.py", "--site-dir", tmp_path / "data"]
    command = [sys.executable, "-m", "site_agent", *options, "--join-token-file", tmp_path / "none"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    warning, _ = ended.stderr.splitlines()
    assert "names what is not there" in warning
    assert "missing=gone.py" in warning


def test_a_second_agent_in_the_same_directory_is_refused(tmp_path: Path):
    command = [sys.executable, "-m", "site_agent", "--name", "a", "--region", "west", "--task", "t=true"]
    remedy = "stop it, or give this one another --site-dir"
    with only_process(tmp_path / "agent.pid", "it", "wait"):
        second = [*command, "--site-dir", tmp_path, "--coordinator", "http://127.0.0.1:1"]
        ended = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False)
    said = f"isthmus agent: the site directory {tmp_path} is in use by process {os.getpid()}: {remedy}"
    assert (ended.returncode, ended.stderr.strip()) == (1, said)


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_joining_without_an_agent_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ISTHMUS_SESSION_FILE", raising=False)
    with pytest.raises(IsthmusError, match=r"isthmus agent --task NAME=COMMAND.*isthmus simulate"), join():
        pass
