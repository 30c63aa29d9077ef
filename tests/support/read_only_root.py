"""A command as a hardened container runs it: no root, no privilege to be had, and a root of its own that cannot be
written to.

Mount namespace and chroot, so it takes root; what a container runtime adds beyond that (seccomp filters, cgroups) is
not here. The root has this machine's /usr and /etc, what is asked for, an empty /tmp in memory, and one folder that
stays: /var/lib/lorica.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

UID = 10001  # the Dockerfile's
STATE = Path("/var/lib/lorica")
CAN = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("unshare", "setpriv"))
WHY_NOT = "a root that cannot be written to takes root here, and unshare and setpriv of util-linux"

_SCRIPT = """
set -eu
root=$1 state=$2; shift 2
mount -t tmpfs -o mode=0755 tmpfs "$root"
mkdir "$root/tmp"; mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
for path in /bin /sbin /lib /lib64; do [ ! -L "$path" ] || cp -P "$path" "$root$path"; done
for path in /proc /dev; do mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; done
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"  # its own, as a container has
while [ "$1" != -- ]; do
    mkdir -p "$root$1"; mount --bind "$1" "$root$1"; mount -o remount,bind,ro "$root$1"; shift
done
shift
mkdir -p "$root/var/lib/lorica"; mount --bind "$state" "$root/var/lib/lorica"
mount -o remount,ro "$root"
exec unshare --root "$root" setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""


def confined(words: Sequence[str | Path], *, root: Path, state: Path, readable: Sequence[Path]) -> list[str]:
    """`words`, to be run so. `root` is an empty folder that it is built on; `state` becomes /var/lib/lorica; `readable`
    stay where they are."""
    if not state.exists():
        state.mkdir()
        os.chown(state, 0, UID)
        state.chmod(0o2775)  # as Kubernetes hands over a new volume (fsGroup)
    root.mkdir(exist_ok=True)
    given = [str(path) for path in ("/usr", "/etc", *readable)]
    enter = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "--",
        "sh",
        "-c",
        _SCRIPT,
        "confined",
        str(root),
        str(state),
    ]
    return [*enter, *given, "--", *map(str, words)]
