"""What `silo-agent check` can find, by name; ops/docs/preflight.md shows this table."""

from enum import Enum

from lorica_security.console.preflight import Misconfiguration


class Mistake(Enum):
    """One member for each, in the order of the checks."""

    NOT_ENROLLED = Misconfiguration(
        "not-enrolled",
        "files and permissions",
        "the folder holds no enrolled silo",
        "run silo-agent enroll TOKEN, or name its folder with `--dir`",
    )
    FOLDER_OPEN = Misconfiguration(
        "folder-open",
        "files and permissions",
        "others can look into the folder, or a part of it",
        "chmod 700 the folder",
    )
    FOLDER_UNUSABLE = Misconfiguration(
        "folder-unusable",
        "files and permissions",
        "the folder or a part of it cannot be made",
        "correct its owner, or whatever lies in its place",
    )
    FILE_MISSING = Misconfiguration(
        "file-missing",
        "files and permissions",
        "a key, a certificate or the trust bundle is gone",
        "restore the folder from a backup, or enrol again",
    )
    FILE_OPEN = Misconfiguration(
        "file-open",
        "files and permissions",
        "others can read a private file",
        "chmod 600 it, and enrol again if it was a key and was exposed",
    )
    KEY_CLEAR = Misconfiguration(
        "key-clear",
        "files and permissions",
        "a passphrase is given, and a key lies there in clear",
        "encrypt it with silo-agent keys protect, or unset the passphrase",
    )
    PASSPHRASE = Misconfiguration(
        "passphrase-wrong",
        "files and permissions",
        "keys are encrypted, and the passphrase of the environment does not open them, or there is none",
        "give the right one in LORICA_KEY_PASSPHRASE_FILE",
    )
    TOKEN = Misconfiguration(
        "token-unusable",
        "files and permissions",
        "a key lies in a PKCS#11 token, and the library, the token, its PIN or the key is not as its file says",
        "do what the line says before the next start: a token counts wrong PINs, and locks after a few",
    )
    FILE_DAMAGED = Misconfiguration(
        "file-damaged",
        "files and permissions",
        "a key, certificate or `enrolment.json` does not parse, or certificate and key do not belong together",
        "restore the folder from one backup, or enrol again",
    )
    ROTATION = Misconfiguration(
        "rotation-unfinished",
        "files and permissions",
        "a rotation of the identity key was begun and not finished: what is sealed may have the seal of either key",
        "start the agent, which finishes it, or run silo-agent identity rotate again",
    )
    SETTINGS = Misconfiguration(
        "settings-wrong",
        "settings",
        "`silo.toml` has an unknown key, a value that is not allowed, or is no TOML; or it is gone, or a link to "
        "nothing, and this silo had one",
        "correct the key that the line names, or put the file back",
    )
    CERTIFICATE_ENDED = Misconfiguration(
        "certificate-ended", "certificate", "this silo's certificate has ended", "have the silo invited again"
    )
    CERTIFICATE_ENDING = Misconfiguration(
        "certificate-ending",
        "certificate",
        "this silo's certificate ends within a day",
        "start the agent, which renews it, and look for certificate-not-renewed in its log",
    )
    CERTIFICATE_FOREIGN = Misconfiguration(
        "certificate-foreign",
        "certificate",
        "the certificate is of an authority that is not trusted here",
        "enrol again",
    )
    CLOCK_EARLY = Misconfiguration(
        "clock-early",
        "clock",
        "the clock is before the making of a certificate that lies here",
        "set the clock, and keep it by NTP",
    )
    CLOCK_BEHIND = Misconfiguration(
        "clock-behind", "clock", "the clock is before the journal's last record", "set the clock, and keep it by NTP"
    )
    PROXY = Misconfiguration(
        "proxy-wrong",
        "route and TLS interception",
        "`HTTPS_PROXY` is no address of a proxy",
        "use http://[USER:PASSWORD@]HOST:PORT",
    )
    UNREACHABLE = Misconfiguration(
        "unreachable",
        "route and TLS interception",
        "nobody answers at the coordinator's address, or the proxy lets nothing through",
        "check the address, the network, the firewall and `HTTPS_PROXY`",
    )
    INTERCEPTED = Misconfiguration(
        "tls-intercepted",
        "route and TLS interception",
        "somebody else's certificate answers in the coordinator's place",
        "have the coordinator's address exempted from inspection",
    )
    COORDINATOR_CERTIFICATE = Misconfiguration(
        "coordinator-certificate",
        "route and TLS interception",
        "what answers is of this federation, and its certificate has ended or names somebody else",
        "have the operator restart the coordinator; check the clock",
    )
    REFUSED = Misconfiguration(
        "refused",
        "coordinator accepts this silo",
        "the coordinator answers and does not let this silo in",
        "ask the operator for its log; have the silo invited again",
    )
    RECORD_DAMAGED = Misconfiguration(
        "record-damaged",
        "what people decided",
        "`approvals.json` or `lineages.json` does not parse, was edited, or others can read it",
        "restore it from a backup of today; without it nobody knows what was approved, or masked",
    )
    MASKS_UNSAID = Misconfiguration(
        "masks-unsaid",
        "what people decided",
        "this silo has masked, and its `[policy]` does not say whether its updates may leave without a mask",
        "set `[policy] require_secure_aggregation = true`; false, if people mean it, is a notice here",
    )
    UNAPPROVED = Misconfiguration(
        "plan-unapproved",
        "plan and policy",
        "the plan that is offered waits for approval by this silo's people",
        "look with silo-agent plan show, which says how to allow it",
    )
    POLICY = Misconfiguration(
        "plan-refused",
        "plan and policy",
        "a rule of `[policy]` refuses the plan that is offered",
        "change the rule that the line names, or have the operator change the plan",
    )
    PINS_DAMAGED = Misconfiguration(
        "pins-damaged",
        "pinned silos",
        "`peers.json` is missing, edited, comes from a backup, or others can read it",
        "restore it from a backup of today; else silo-agent trust reset-memory, and compare each pin again",
    )
    PINS_FEW = Misconfiguration(
        "pins-few",
        "pinned silos",
        "fewer silos are pinned than the smallest cohort with masks takes",
        "compare the keys that `silo-agent trust own` prints at theirs by telephone, then `silo-agent trust add "
        "NAME KEY`",
    )
    MASKING_MEMORY = Misconfiguration(
        "masking-memory",
        "memory of masked rounds",
        "`masking/memory` or `lineages.json` is missing, edited, or comes from a backup, or others know of masked "
        "rounds that it does not",
        "restore both from a backup of today; else silo-agent trust reset-memory",
    )
    GROUPS_DAMAGED = Misconfiguration(
        "groups-damaged",
        "release groups",
        "`release-groups.json` is missing, edited, comes from a backup, or others can read it",
        "restore it from a backup of today; else silo-agent trust reset-memory: without it this silo would sign a "
        "second successor",
    )
    GROUPS_WAIT = Misconfiguration(
        "groups-wait",
        "release groups",
        "proposed release groups wait for this silo's people",
        "look with silo-agent groups show, allow them with silo-agent groups approve, or have the operator propose "
        "others",
    )
    GROUPS_PROMISE = Misconfiguration(
        "groups-promise",
        "release groups",
        "the release groups that this silo holds hold against fewer colluders, or allow smaller sets, than "
        "`[policy]` asks for",
        "have the operator run coordinator groups propose with --colluders and --smallest-group, or lower `[policy]`",
    )
    BUDGET_UNSET = Misconfiguration(
        "budget-unset",
        "privacy budget",
        "`require_privacy` is set and `max_epsilon` is not: a default stands in for what people should decide",
        "set `[policy] max_epsilon` to the most that these records may ever cost",
    )
    LEDGER = Misconfiguration(
        "ledger-damaged",
        "privacy budget",
        "the privacy ledger is not the one that this silo wrote",
        "put the right one back: silo-agent privacy verify says what is missing",
    )
    BUDGET_SMALL = Misconfiguration(
        "budget-small",
        "privacy budget",
        "the budget does not last to the end of the plan's schedule",
        "raise `[policy] max_epsilon`, or `max_epsilon_alone` for joint noise, or have the operator plan fewer "
        "rounds or more noise",
    )
    BUDGET_SHARED = Misconfiguration(
        "budget-shared",
        "privacy budget",
        "the registry of `[policy] shared_budget` is missing, damaged, open to others, or another than this silo "
        "counted in before",
        'restore it; set `shared_budget` to its place, or to "none" if no other folder has these records',
    )
    MEMORY = Misconfiguration(
        "memory-small",
        "memory",
        "less memory is free than training the plan's model takes",
        "close other programs or add memory",
    )
    DISK = Misconfiguration(
        "disk-small",
        "disk",
        "the folder's disk has no room for models, the update, and under masks its masked copy",
        "free some space",
    )
    SPOOL = Misconfiguration(
        "spool-small",
        "disk for lines",
        "memory does not hold this silo's lines and their tokens, and beside its models the folder's disk has no room "
        "for them",
        "free some space: lines and tokens take twice the room of the lines, those of a ByT5 five times",
    )
    DEVICE = Misconfiguration(
        "device-missing",
        "device",
        "`[training] device` names a GPU that PyTorch does not find",
        'set it to "auto" or "cpu", or install the driver and a PyTorch for it',
    )
    LAUNCH = Misconfiguration(
        "launch-wrong",
        "processes",
        "`[training] launch` begins with a program that is not there, or `rank_interface` is no network interface",
        "install the program or give its path; leave both out where all ranks run on this machine",
    )
    METRICS_PORT = Misconfiguration(
        "metrics-port-taken",
        "metrics port",
        "the port of `[metrics] listen` is another process's, or the address is not of this machine",
        "choose another one",
    )
    DATA_MISSING = Misconfiguration(
        "data-missing",
        "data",
        "no data folder is given, or a file of it is missing, empty or unreadable",
        "name the right one with `--data`, and put the file there; `silo-agent import` makes such a folder",
    )
    SCHEMA = Misconfiguration(
        "schema-missing",
        "data",
        "`schema.json` is missing or is no schema",
        "make it with `silo-agent schema URL`",
    )
    DATA_BAD = Misconfiguration(
        "data-bad",
        "data",
        "more lines of a file are bad than `[data] max_bad_lines_share` allows",
        "correct the lines that the agent's log names",
    )
    FEW_LOSSES = Misconfiguration(
        "losses-few",
        "losses of a round",
        "the plan weighs by logged losses, of which this silo's examples make fewer than three a round",
        "have the operator set `loss_reduction` to `evaluated`, `loss_log_steps` lower, or more epochs for this silo",
    )
    UNIT_FIELD = Misconfiguration(
        "unit-field-missing",
        "unit of privacy",
        "the plan hides all lines of one unit, and training lines do not say whose they are",
        "add the key to each training line",
    )
    UNIT_HALF = Misconfiguration(
        "unit-owns-half",
        "unit of privacy",
        "the plan hides all lines of one unit, and one has half of the training lines or more: nothing is trained",
        "correct the key of the lines, or leave lines of this unit out",
    )
    JAIL = Misconfiguration(
        "sql-jail-missing",
        "jail of SQL",
        "`[sql] require_jail` is set, and the kernel or the machine lacks a wall of the jail that a model's SQL "
        "runs in",
        "use a kernel with Landlock and install libseccomp2, or set `require_jail = false`",
    )
    DATABASE = Misconfiguration(
        "database-unreachable",
        "database",
        "the database does not answer, is locked, or is none",
        "correct `[database] url`, the server or the role",
    )
    DATABASE_WRITES = Misconfiguration(
        "database-writable",
        "database",
        "the role that a model's SQL would run as may write",
        "make a role that reads alone, as ops/docs/silo.md has it",
    )
