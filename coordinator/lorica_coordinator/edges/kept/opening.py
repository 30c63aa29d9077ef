"""What `[storage] blobs` comes to: a bucket that the leader's files are kept in, settled before anything else."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.bucket_place import BucketPlace
from lorica_coordinator.edges.kept.kept_in_bucket import KeptInBucket, Leader, Listed, Seen
from lorica_coordinator.edges.kept.settled import HasKey, meanwhile, probe, settle
from lorica_coordinator.settings import Settings
from lorica_security.errors import ConfigurationError


def bucket_place(settings: Settings, file: Path) -> BucketPlace:
    """What `settings`, read from `file`, name. Raises ConfigurationError."""
    if not settings.storage.database:
        raise ConfigurationError(
            f"{file}: [storage] blobs is set, and database is not: without PostgreSQL no coordinator elsewhere could "
            "go on with what is kept there; set [storage] database, or leave blobs empty"
        )
    return BucketPlace.parse(settings.storage.blobs, file)


def kept_so_far(settings: Settings, file: Path) -> Listed:
    """What the bucket has, once it was seen to take, give back and list something; nothing without a bucket. Raises
    ConfigurationError, StorageError."""
    if not settings.storage.blobs:
        return Listed()
    bucket = Bucket.at(bucket_place(settings, file))
    probe(bucket)
    return Listed.of(bucket)


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
    root = settings.state_folder
    kept = KeptInBucket(root, bucket, leader, seen=seen)
    aside: threading.Thread | None = None
    try:
        with meanwhile(beat, every_s):
            settled = settle(kept, root, has_key)
        if settled.lacking:
            aside = threading.Thread(target=kept.keep_aside, args=(settled.lacking,), name="puts aside")
            aside.start()
        yield kept
    finally:
        kept.close()
        if aside is not None:
            aside.join()
