"""What lies in a silo's folder: files and permissions, certificate, clock, the plan that is offered, the privacy
budget."""

import os
import stat
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime

from lorica_security.console.preflight import Misconfigured, meaning, misconfigured
from lorica_security.errors import ConfigurationError, IntegrityError, StateError, StorageError
from lorica_security.host import key_file
from lorica_security.pkcs11_keys.token_keys import TokenIdentityKey, TokenTlsKey
from lorica_security.pkcs11_keys.token_session import TokenUnusable, WrongPin
from lorica_security.pkcs11_keys.token_uri import BY_LABEL
from lorica_security.pki.validity import Window
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.accounts.shared_budget import sharing_of
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, check_settled, load_credentials
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.privacy import SharedRecords
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle

LEAST_CERTIFICATE_LIFE_S = 24 * 3600
CLOCK_TOLERANCE_S = 300


def check_files(folder: SiloFolder) -> str:
    with meaning(Mistake.NOT_ENROLLED.value, ConfigurationError):
        folder.require_enrolled()
    with meaning(Mistake.FOLDER_OPEN.value, ConfigurationError), meaning(Mistake.FOLDER_UNUSABLE.value, StorageError):
        folder.make()
    secret = (*folder.private_keys, folder.enrolment)
    for path in secret:
        if not path.is_file():
            raise misconfigured(Mistake.FILE_MISSING.value, f"{path} is missing")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise misconfigured(Mistake.FILE_OPEN.value, f"{path} has mode {mode:04o}: others can read it")
    with meaning(Mistake.PASSPHRASE.value):
        passphrase = key_file.passphrase_of(os.environ)
    for path in folder.private_keys:
        content = path.read_bytes()
        if passphrase is not None and not key_file.is_reference(content) and not key_file.is_encrypted(content):
            raise misconfigured(Mistake.KEY_CLEAR.value, f"{path} is not encrypted")
    with (
        meaning(Mistake.PASSPHRASE.value, key_file.WrongPassphrase),
        meaning(Mistake.FILE_DAMAGED.value, ConfigurationError),
        meaning(Mistake.TOKEN.value, TokenUnusable, WrongPin),
    ):
        credentials = load_credentials(folder)
    with meaning(Mistake.ROTATION.value, StateError):
        check_settled(folder)
    protected = "encrypted" if passphrase else "readable by their owner alone"
    return f"{credentials.identity.uri} in {folder.root}, private keys {protected}"


def keys_in_a_token(credentials: SiloCredentials) -> str:
    """Which keys lie in which token, each of which signed a challenge as it was opened; nothing where none does."""
    both = (("identity", credentials.identity_key), ("TLS", credentials.tls_key))
    held = [(word, key.uri) for word, key in both if isinstance(key, TokenIdentityKey | TokenTlsKey)]
    if not held:
        return ""
    keys = ", ".join(f"{word} key {uri.of_key} in token {uri.of_token}" for word, uri in held)
    by_label = "" if all(uri.serial for _, uri in held) else f"; {BY_LABEL}"
    return f"{keys}: each signed a challenge{by_label}"


def keys_that_may_leave(credentials: SiloCredentials) -> str:
    """Of those in a token, which it gives to whoever has the PIN."""
    both = credentials.identity_key, credentials.tls_key
    return ", ".join(
        key.uri.of_key for key in both if isinstance(key, TokenIdentityKey | TokenTlsKey) and key.may_leave
    )


def check_certificate(credentials: SiloCredentials, now: datetime) -> str:
    window = Window.of(credentials.certificate)
    if now > window.end:
        raise Misconfigured(
            Mistake.CERTIFICATE_ENDED.value, f"certificate of {credentials.identity.uri} {window.problem_at(now)}"
        )
    left = (window.end - now).total_seconds()
    if left < LEAST_CERTIFICATE_LIFE_S:
        raise misconfigured(
            Mistake.CERTIFICATE_ENDING.value,
            f"certificate of {credentials.identity.uri} ends in {left / 3600:.1f} hours and was not renewed",
        )
    if not credentials.trust.issuers_of(credentials.certificate):
        raise misconfigured(
            Mistake.CERTIFICATE_FOREIGN.value, "the certificate is not issued by a CA of the trust bundle"
        )
    return f"valid until {window.end.isoformat()}, {left / 86400:.1f} days"


def check_clock(folder: SiloFolder, credentials: SiloCredentials, now: datetime) -> str:
    for certificate in (credentials.certificate, *credentials.trust.authorities):
        begin = Window.of(certificate).begin
        if now < begin:
            raise misconfigured(
                Mistake.CLOCK_EARLY.value,
                f"the clock says {now.isoformat()}, before {begin.isoformat()} when a certificate here was made",
            )
    with closing(_journal(folder, credentials)) as journal:
        history = journal.history(1)
    if history and now.timestamp() < history[-1].unix_s - CLOCK_TOLERANCE_S:
        last = datetime.fromtimestamp(history[-1].unix_s, UTC)
        raise misconfigured(
            Mistake.CLOCK_BEHIND.value,
            f"the clock says {now.isoformat()}, before the journal's last record at {last.isoformat()}",
        )
    return f"{now.isoformat(timespec='seconds')}, after everything that is recorded here"


def _journal(folder: SiloFolder, credentials: SiloCredentials) -> RoundJournal:
    return RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo)


def offered_plan(folder: SiloFolder, credentials: SiloCredentials) -> PlanBundle | None:
    """The plan that is offered now: one that is refused, else the one that was prepared last."""
    plans = PlanStore(folder.plans)
    if refused := plans.refused():
        return refused
    with closing(_journal(folder, credentials)) as journal:
        plan = journal.fact("plan")
    return None if plan is None else plans.load(Digest(plan))


def check_budget(
    folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy, bundle: PlanBundle | None
) -> str:
    rules = policy.rules
    if rules.require_privacy != "none" and "max_epsilon" not in rules.model_fields_set:
        raise misconfigured(
            Mistake.BUDGET_UNSET.value,
            f"[policy] require_privacy = {rules.require_privacy!r} without max_epsilon, for which "
            f"{rules.max_epsilon:g} is taken",
        )
    with (
        closing(_journal(folder, credentials)) as journal,
        meaning(Mistake.LEDGER.value, IntegrityError, StorageError),
        meaning(Mistake.BUDGET_SHARED.value, SharedRecords),
    ):
        sharing = sharing_of(folder, rules.shared_budget)
        guard = guard_of(folder, credentials, policy, journal, sharing=sharing)
        counted = guard.counted()
        rounds = bundle.plan.schedule.rounds if bundle else 0
        releases = [
            (what, replace(release, steps=release.steps * rounds))
            for what, release in (bundle.plan.releases_of_round if bundle else ())
        ]
        spent = counted.epsilon()
        after = counted.epsilon(releases, bundle.plan.privacy.unit_field if bundle else "")
    if bundle is not None and releases and after > rules.max_epsilon:
        raise misconfigured(
            Mistake.BUDGET_SMALL.value,
            f"the {rounds} rounds of plan {bundle.plan.name} would take this silo from epsilon {spent:.3g} to "
            f"{after:.3g}, [policy] max_epsilon is {rules.max_epsilon:g}",
        )
    if bundle is not None and releases and counted.joint(releases):  # also of earlier plans
        alone = counted.epsilon_alone(releases, bundle.plan.privacy.unit_field)
        if alone > rules.max_epsilon_alone:
            raise misconfigured(
                Mistake.BUDGET_SMALL.value,
                f"if all others whose noise counts worked against this silo, the {rounds} rounds of plan "
                f"{bundle.plan.name} would take it to epsilon {alone:.3g}, [policy] max_epsilon_alone is "
                f"{rules.max_epsilon_alone:g}",
            )
    if bundle is None or not releases:
        further = "no plan was offered yet" if bundle is None else f"plan {bundle.plan.name} spends none"
        told = f"epsilon {spent:.3g} of {rules.max_epsilon:g} is spent; {further}"
    else:
        told = f"epsilon {spent:.3g} of {rules.max_epsilon:g} is spent, {after:.3g} after plan {bundle.plan.name}"
        if counted.joint(releases):
            told += f" ({alone:.3g} of {rules.max_epsilon_alone:g} towards all others whose noise counts, together)"
    if sharing.shown:
        return f"{told}; together with other folders that count in {sharing.shown}"
    if rules.require_privacy == "none" and not releases:
        return told
    return (
        f"{told}; counted in this folder alone: nobody notices other folders with the same records ([policy] "
        "shared_budget)"
    )
