"""Files that a user asked for, on a real disk."""

from pathlib import Path

import pytest

from api.errors import IsthmusError
from api.output_file import make_directory, output_file, require_writable


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), output_file(path) as file:
        file.write(bytes([1 // 0]))
    require_writable(path)
    assert path.read_bytes() == b"before"
    with output_file(path) as file:
        file.write(b"after")
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "reason"), [("/proc/x", "No such file"), ("/", "it is a folder"), ("/no/x", "folder /no")]
)
def test_where_none_can_be_written(path, reason):
    with pytest.raises(IsthmusError, match=f"^cannot write {path}: .*{reason}"):
        require_writable(Path(path))


@pytest.mark.parametrize(("path", "reason"), [("/proc/x", "No such file"), ("/dev/null", "it is a file")])
def test_where_no_directory_can_be(path, reason):
    with pytest.raises(IsthmusError, match=f"^cannot make the directory {path}: {reason}"):
        make_directory(Path(path))
