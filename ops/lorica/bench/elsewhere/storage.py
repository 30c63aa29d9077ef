"""Where a coordinator that is measured has its state and files, if not in its folder alone.

Servers are the caller's own: their time is in no figure. Database and prefix are new, since a coordinator leaves
another one's alone, and keep what the benchmark has put there.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.opening import bucket_place
from lorica_coordinator.edges.kept.settled import probe
from lorica_coordinator.settings import Settings, settings_text
from lorica_security.errors import ConfigurationError
from lorica_security.host import files

WORDS: Final = {"database": "PostgreSQL", "blobs": "S3", "attempt_keys": "shared keys"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """As `[storage]` of federation.toml has it; what is empty is in the folder. `attempt_keys` is made where it is not
    there."""

    database: str
    blobs: str = ""
    attempt_keys: str = ""

    @property
    def words(self) -> str:
        return f"over {', '.join(WORDS[name] for name, value in asdict(self).items() if value)}"

    def require_usable(self, work: Path) -> None:
        """Raises ConfigurationError or StorageError now, rather than after the federation that is measured first. The
        database alone is not asked. `work` is a folder for a scratch file."""
        file = work / "storage.toml"
        try:
            files.write_private(file, settings_text("bench", ["127.0.0.1"]).encode())
            self.write_into(file)
            if self.blobs:
                probe(Bucket.at(bucket_place(Settings.read(file), file)))
        finally:
            file.unlink(missing_ok=True)

    def write_into(self, settings: Path) -> None:
        """Into the file that `coordinator init` wrote. Raises ConfigurationError, before that also for what does not go
        together."""
        text = settings.read_text(encoding="utf-8")
        for name, value in asdict(self).items():
            assert f'\n{name} = ""\n' in text
            text = text.replace(f'\n{name} = ""\n', f"\n{name} = {json.dumps(value)}\n", 1)
        Settings.parse(text, settings.name)
        if self.attempt_keys:
            files.make_private_folder(Path(self.attempt_keys))
        files.write_private(settings, text.encode())  # `database` may have a password


def storage(database: str, blobs: str, attempt_keys: str) -> Storage | None:
    """None where nothing is named. Raises ConfigurationError."""
    if database:
        return Storage(database=database, blobs=blobs, attempt_keys=attempt_keys)
    for name, value in (("--blobs", blobs), ("--attempt-keys", attempt_keys)):
        if value:
            raise ConfigurationError(f"{name} {value} is for a state in PostgreSQL: name one by --database")
    return None
