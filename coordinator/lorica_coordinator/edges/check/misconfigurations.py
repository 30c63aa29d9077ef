"""What `coordinator check` can find, by name; ops/docs/preflight.md shows this table."""

from enum import Enum

from lorica_security.console.preflight import Misconfiguration


class Mistake(Enum):
    """One member for each, in the order of the checks."""

    SETTINGS = Misconfiguration(
        "settings-wrong",
        "settings",
        "`federation.toml` has an unknown key, a value that is not allowed, or is no TOML",
        "correct the key that the line names",
    )
    FOLDER_OPEN = Misconfiguration(
        "folder-open", "folders", "others can look into the folder, its keys or its state", "chmod 700 the folder"
    )
    STATE_UNUSABLE = Misconfiguration(
        "state-unusable",
        "folders",
        "the state folder cannot be made or written to",
        "correct `state` of federation.toml, or the folder's owner",
    )
    FOLDER_HELD = Misconfiguration(
        "folder-held",
        "process",
        "a process holds the folder, and no coordinator of this federation answers where the settings say",
        "wait until it has started, or end that process and run coordinator serve",
    )
    KEY_OPEN = Misconfiguration(
        "key-open", "keys", "others can read a private key", "chmod 600 the file, and replace the key if it was exposed"
    )
    KEY_MISSING = Misconfiguration(
        "key-missing", "keys", "a key or the authority's certificate is gone", "restore it from a backup"
    )
    KEY_CLEAR = Misconfiguration(
        "key-clear",
        "keys",
        "a passphrase is given, and a key lies there in clear",
        "encrypt it with coordinator keys protect, or unset the passphrase",
    )
    PASSPHRASE = Misconfiguration(
        "passphrase-wrong",
        "keys",
        "keys are encrypted, and the passphrase of the environment does not open them, or there is none",
        "give the right one in LORICA_KEY_PASSPHRASE_FILE",
    )
    TOKEN = Misconfiguration(
        "token-unusable",
        "keys",
        "a key lies in a PKCS#11 token, and the library, the token, its PIN or the key is not as its file says",
        "do what the line says before the next start: a token counts wrong PINs, and locks after a few",
    )
    KEY_DAMAGED = Misconfiguration(
        "key-damaged",
        "keys",
        "a key or certificate does not parse, or the two of the authority do not belong together",
        "restore both from one backup",
    )
    FEDERATION_RENAMED = Misconfiguration(
        "federation-renamed",
        "keys",
        "the settings name another federation than the authority's certificate",
        "put the name back: it stands in every certificate",
    )
    AUTHORITY_ENDED = Misconfiguration(
        "authority-ended",
        "certificates",
        "the authority's certificate has ended: nobody's is valid any more",
        "correct the clock if it is wrong; else make a new authority",
    )
    AUTHORITY_ENDING = Misconfiguration(
        "authority-ending",
        "certificates",
        "the authority ends before certificates would that are issued now, which are cut short",
        "let a successor follow it: coordinator ca rotate",
    )
    CERTIFICATE_ENDING = Misconfiguration(
        "own-certificate-ending",
        "certificates",
        "the certificate that the running coordinator shows has less than a tenth of its life left",
        "the coordinator renews it by itself: look for why it did not in its log",
    )
    NAMES_CHANGED = Misconfiguration(
        "names-changed",
        "certificates",
        "`[public] hosts` has a name that the running coordinator's certificate does not carry",
        "the coordinator renews it by itself: look for why it did not in its log",
    )
    CLOCK_EARLY = Misconfiguration(
        "clock-early", "clock", "the clock is before the making of the authority", "set the clock, and keep it by NTP"
    )
    CLOCK_BEHIND = Misconfiguration(
        "clock-behind",
        "clock",
        "the clock is before the newest record of the state",
        "set the clock, and keep it by NTP",
    )
    HOST_UNRESOLVED = Misconfiguration(
        "host-unresolved",
        "address",
        "a name of `[public] hosts` does not resolve here",
        "correct it, or have it entered in DNS: invitations carry it",
    )
    HOST_LOOPBACK = Misconfiguration(
        "host-loopback",
        "address",
        "every name of `[public] hosts` leads back to the machine that asks, though silos elsewhere are listened for",
        "put a name there that silos can reach, or say `this_machine_alone = true`, or listen on loopback alone",
    )
    LISTEN_LOOPBACK = Misconfiguration(
        "listen-loopback",
        "address",
        "`[public] hosts` names an address of the network, and the coordinator listens on loopback alone",
        "set `[listen] silos` to 0.0.0.0 or to that address",
    )
    PORTS_ALIKE = Misconfiguration(
        "ports-alike", "ports", "two listeners of `[listen]` are on one port", "give each a port of its own"
    )
    PORT_TAKEN = Misconfiguration(
        "port-taken", "ports", "another process has a port of `[listen]`", "end it, or choose another port"
    )
    PORT_PRIVILEGED = Misconfiguration(
        "port-privileged",
        "ports",
        "a port below 1024, which this user may not have",
        "choose another port, or give the service CAP_NET_BIND_SERVICE",
    )
    ADDRESS_ELSEWHERE = Misconfiguration(
        "address-elsewhere",
        "ports",
        "an address of `[listen]` is not of this machine",
        "use 0.0.0.0, [::], or an address that `ip address` shows",
    )
    DATABASE_MISSING = Misconfiguration(
        "database-missing",
        "state database",
        "there is no state.sqlite: the next start would know no silo and no round",
        "restore the state from a backup, or correct `state` of federation.toml",
    )
    DATABASE_VERSION = Misconfiguration(
        "database-version",
        "state database",
        "another release wrote the database",
        "run `coordinator upgrade`, or the release that wrote it",
    )
    DATABASE_DAMAGED = Misconfiguration(
        "database-damaged",
        "state database",
        "SQLite cannot read the database, or finds it inconsistent",
        "restore the state from a backup",
    )
    DATABASE_SERVER = Misconfiguration(
        "database-server",
        "state database",
        "the PostgreSQL database of `[storage] database` cannot be used as it is",
        "see that the server runs and is reached, that it is the one that is written to, and its role and tables",
    )
    KEYS_OLDER = Misconfiguration(
        "keys-older",
        "state database",
        "another coordinator of this database has made or retired an authority, and this folder has not",
        "copy all of that coordinator's keys/ to this folder",
    )
    BUCKET = Misconfiguration(
        "bucket-unusable",
        "bucket",
        "the bucket of `[storage] blobs` cannot be put into, read, listed or deleted from",
        "do what the line says: the server, the credentials and their rights, the clock, the bucket's name",
    )
    KEYS_DISK = Misconfiguration(
        "attempt-keys-unusable",
        "attempt keys",
        "the folder of `[storage] attempt_keys` is not there, or next to nothing is free on its disk",
        "mount it, or free some space on that disk: without it no update and no masked attempt is taken",
    )
    PLAN_MISSING = Misconfiguration(
        "plan-missing", "plan", "there is no plan of that name", "make it with coordinator plan new NAME"
    )
    THRESHOLD = Misconfiguration(
        "threshold-impossible",
        "plan",
        "`[aggregation] threshold` is more than the smallest cohort has silos, or fewer than three",
        "set it to 0, which is the cohort's default, or to 3 up to min_silos",
    )
    PLAN_WRONG = Misconfiguration(
        "plan-wrong",
        "plan",
        "plan.toml has an unknown key, a value that is not allowed, or promises what its noise does not keep",
        "correct the key that the line names",
    )
    NOISE = Misconfiguration(
        "noise-poor",
        "plan",
        "the noise of a sum is longer than `[privacy] max_noise_to_signal` allows: nothing would be learnt",
        "do one of what the line says",
    )
    PLAN_EDITED = Misconfiguration(
        "plan-edited",
        "plan",
        "a file of the plan folder is not the one whose digest plan.toml has",
        "restore it, or make a new plan with coordinator plan new NAME",
    )
    TOO_FEW = Misconfiguration(
        "too-few-silos",
        "cohort",
        "fewer silos are enrolled than the plan's min_silos: no round can begin",
        "invite more with coordinator invite SILO, or lower min_silos",
    )
    TOO_MANY = Misconfiguration(
        "too-many-silos",
        "cohort",
        "more silos are enrolled than secure aggregation takes in one cohort",
        "split the federation, or make a plan without secure aggregation",
    )
    DISK = Misconfiguration(
        "disk-small",
        "disk",
        "the state's disk has no room for the cohort's updates and the models that are kept",
        "free some space, or put `state` on a larger disk",
    )
    MEMORY = Misconfiguration(
        "memory-small",
        "memory",
        "less memory is free than the coordinator takes at most",
        "close other programs, or add memory",
    )
    OPEN_FILES = Misconfiguration(
        "open-files-few",
        "open files",
        "the limit on open files lets few connections keep every silo out",
        "raise it (LimitNOFILE of systemd, `ulimit -Hn`)",
    )
    DEVICE = Misconfiguration(
        "device-missing",
        "device",
        "`[aggregation] device` names a GPU that PyTorch does not find",
        'set it to "auto" or "cpu", or install the driver and a PyTorch for it',
    )
