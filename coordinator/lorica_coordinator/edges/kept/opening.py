"""What `[storage] blobs` comes to: a bucket that the leader's files are kept in, settled before anything else."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.bucket_place import BucketPlace
from lorica_coordinator.edges.kept.kept_in_bucket import KeptInBucket, Leader, Seen, newest_term
from lorica_coordinator.edges.kept.settled import HasKey, meanwhile, probe, put_later, settle
from lorica_coordinator.settings import Settings
from lorica_security.errors import ConfigurationError

PUT_AFTER_S: Final = 60.0
"""When a service that has started has let go of what it needs no more."""


def bucket_place(settings: Settings, file: Path) -> BucketPlace:
    """What `settings`, read from `file`, name. Raises ConfigurationError."""
    if not settings.storage.database:
        raise ConfigurationError(
            f"{file}: [storage] blobs is set, and database is not: without PostgreSQL no coordinator elsewhere could "
            "go on with what is kept there; set [storage] database, or leave blobs empty"
        )
    return BucketPlace.parse(settings.storage.blobs, file)


def newest_kept_term(settings: Settings, file: Path) -> int:
    """The latest term that has files in the bucket; 0 without a bucket. Raises ConfigurationError, StorageError."""
    if not settings.storage.blobs:
        return 0
    return newest_term(Bucket.at(bucket_place(settings, file)))


@contextmanager
def kept_in_bucket(
    settings: Settings,
    file: Path,
    leader: Leader,
    has_key: HasKey,
    beat: Callable[[], None],
    every_s: float,
    went_on: Callable[[], None] = lambda: None,
    seen: Mapping[str, Seen] | None = None,
) -> Iterator[KeptInBucket]:
    """Raises ConfigurationError, IntegrityError or StorageError before the block. Until then `beat` is called every
    `every_s` seconds, and `went_on` when the bucket has done something."""
    bucket = Bucket.at(bucket_place(settings, file))
    bucket.called = lambda call, size, seconds, failed: None if failed else went_on()
    root, over = settings.state_folder, threading.Event()
    kept = KeptInBucket(root, bucket, leader, seen=seen)
    later: threading.Thread | None = None
    try:
        with meanwhile(beat, every_s):
            probe(bucket)
            settled = settle(kept, root, has_key)
        if settled.lacking:
            arguments = (kept, root, settled.lacking, over, PUT_AFTER_S)
            later = threading.Thread(target=put_later, args=arguments, name="puts later")
            later.start()
        yield kept
    finally:
        over.set()
        kept.close()
        if later is not None:
            later.join()
