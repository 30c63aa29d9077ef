"""This silo's release groups between its folder and the coordinator. What it signs, and what its people decide, is in
its audit log."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from lorica_security.audit.entry import Event
from lorica_security.errors import LoricaError, PolicyRefusal
from lorica_security.identity.identity_key import public_key_bytes, public_key_from_bytes
from lorica_security.identity.seal import Seal
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.secure_aggregation.groups.release_groups import RELEASE_GROUPS, Link, SignedLink, signature_of
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.group_chain import GroupChain
from silo_agent.edges.groups.group_return import EarlierKeys
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.memory.identity_succession import predecessors
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.trust_store import TrustStore, trust_store
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.group_keeper import described
from silo_wire.codecs.groups_codec import GroupsOffer


def group_chain(folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy) -> GroupChain:
    demands = policy.demands()
    store = trust_store(folder, credentials, first_use=policy.rules.trust_on_first_use)
    return GroupChain(
        folder.release_groups,
        federation=credentials.federation,
        silo=credentials.silo,
        own_key=credentials.identity_key.public_key(),
        pinned=lambda: {it.silo: it.key for it in store.trusted()},
        smallest_group=demands.least_group,
        colluders=demands.colluders,
        seal=Seal(credentials.identity_key),
        keeper=masking_journal(folder, credentials),
        earlier=lambda: _earlier_keys(folder, credentials, store),
    )


def _earlier_keys(folder: SiloFolder, credentials: SiloCredentials, store: TrustStore) -> EarlierKeys:
    """Newest first: what led to each pin that counts, and to this silo's own key, and keys whose pins people
    removed."""
    own = [public_key_from_bytes(it.key) for it in reversed(predecessors(folder, credentials))]
    removed = store.removed_keys()
    followed = {it.silo: it.predecessors for it in store.trusted()}
    others = {silo: (*followed.get(silo, ()), *removed.get(silo, ())) for silo in followed.keys() | removed.keys()}
    return {**others, credentials.silo: own}


def small_by_approval(
    folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy
) -> Sequence[tuple[str, str]]:
    """What it costs that its people approved a smaller group of this silo's than policy asks for; nothing of a file
    that is damaged."""
    try:
        link = group_chain(folder, credentials, policy).head
    except LoricaError:
        return ()
    least = policy.demands().least_group
    sets = () if link is None else (link.partition.group_of(credentials.silo), link.atom_of(credentials.silo))
    small = min((one for one in sets if one is not None), key=len, default=None)
    if small is None or len(small) >= least:
        return ()
    if small == (credentials.silo,):
        cost = "this silo can be told apart from all others: two sums, subtracted, are of it alone"
    else:
        cost = (
            f"{', '.join(small)} can be told apart from all others, smallest_group is {least}: sums, subtracted, "
            "are of these alone"
        )
    return (("groups approve", f"{cost}. Nothing but noise under silo-level privacy hides what it learnt then"),)


class GroupsWire(Protocol):
    """What the coordinator is asked. Raises what it says, Unreachable, MalformedMessage."""

    async def fetch_groups(self, after: int, *, held: Sequence[SignedLink] = ()) -> GroupsOffer: ...

    async def sign_groups(self, link: bytes, signature: bytes) -> None: ...


class ReleaseGroups:
    """Implements `GroupsPort`; nothing is entered into a log that is not there."""

    def __init__(
        self,
        chain: GroupChain,
        trust: TrustStore,
        credentials: SiloCredentials,
        *,
        client: GroupsWire,
        log: AuditLog | None = None,
        first_use: bool = False,
    ) -> None:
        self._chain = chain
        self._trust = trust
        self._credentials = credentials
        self._client = client
        self._log = log
        self._first_use = first_use

    async def sync(self) -> str | None:
        head = await asyncio.to_thread(lambda: self._chain.head)
        offer = await self._client.fetch_groups(0 if head is None else head.number)
        if head is not None and not offer.links:  # a coordinator that came from a backup may not have it any more
            offer = await self._client.fetch_groups(head.number, held=await asyncio.to_thread(self._chain.kept))
        first = await asyncio.to_thread(lambda: self._chain.is_new)
        await asyncio.to_thread(self._pin, offer, first)
        taken = await asyncio.to_thread(self._chain.take, offer)
        for link in taken.links:
            self._tell(Event.GROUPS_TAKEN, number=link.number, digest=link.digest.hex(), groups=described(link))
        for link in taken.to_sign:
            self._tell(Event.GROUPS_SIGNED, number=link.number, digest=link.digest.hex(), groups=described(link))
            await self._client.sign_groups(link.digest, signature_of(link, self._credentials.identity_key))
        if taken.refused is not None:
            raise PolicyRefusal(RELEASE_GROUPS, taken.refused)
        if head is not None and not offer.links and taken.waits is None:
            raise PolicyRefusal(RELEASE_GROUPS, _behind(head))
        return taken.waits

    def _pin(self, offer: GroupsOffer, first: bool) -> None:
        """Pins move where the pinned key named a successor. Keys are taken on first use before the first link, and
        never after.

        The file of pins is read once for all who come with the key that is pinned: it holds a line for each of them.
        """
        pins = self._trust.identities() if offer.identities else {}
        for one in offer.identities:
            known = pins.get(one.silo)
            if one.silo == self._credentials.silo or known == one.key:
                continue
            self._trust.follow(one.silo, one.key, one.successions)
            if first and self._first_use:
                self._trust.trusted_on_first_use(one.silo, one.key)
            pinned = self._trust.identities().get(one.silo)
            if pinned is not None and pinned != known:
                how = "first use" if known is None else "succeeded"
                self._tell(Event.PIN_ADDED, silo=one.silo, key=public_key_bytes(pinned).hex(), how=how)

    def _tell(self, event: Event, **particulars: str | int) -> None:
        if self._log is not None:
            self._log.append(event, who=self._log.writer, **particulars)


def _behind(head: Link) -> str:
    groups = " ".join(",".join(group) for group in head.partition.groups)
    return (
        f"this silo holds release groups {head.number} ({head.digest.hex()[:16]}), the coordinator has older ones "
        "or none, and does not take these back. Where `coordinator groups show` says that none stand, have the "
        f"operator run `coordinator groups take-back {head.digest.hex()}`, once people of other silos have read out "
        f"that digest too. Else the coordinator's log says whose signatures it cannot check: have the operator run "
        f"`coordinator groups propose {groups} --colluders {head.promise.colluders} --smallest-group "
        f"{head.promise.smallest_group}`: those who hold these sign again without a word of people"
    )
