"""Which store of blobs the settings name."""

from pathlib import Path

from api.errors import IsthmusError
from coordinator.blob_directory import BlobDirectory
from coordinator.blobs import Blobs
from coordinator.settings import Settings

__all__ = ["blob_store"]


def blob_store(settings: Settings) -> Blobs:
    """Drafts of blobs for a bucket are in the data directory."""
    here = settings.data_dir / "blobs"
    named = settings.blobs or str(here)
    scheme, separator, _ = named.partition("://")
    if not separator:
        return _directory(Path(named))
    if scheme != "s3":
        raise IsthmusError(f"--blobs {named}: a directory or s3://BUCKET/PREFIX is needed")
    try:
        from coordinator.blob_bucket import BlobBucket
    except ModuleNotFoundError:
        raise IsthmusError(f"--blobs {named} needs the extra s3: pip install 'isthmus[s3]'") from None
    return BlobBucket(named, here)


def _directory(path: Path) -> BlobDirectory:
    try:
        return BlobDirectory(path)
    except OSError as error:
        raise IsthmusError(f"cannot keep blobs in {path}: {error.strerror}; name another directory") from None
