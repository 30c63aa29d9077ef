"""Release groups that silos hold before a test begins: proposed, approved by each silo's people, signed by all."""

from collections.abc import Iterable, Sequence

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import (
    Link,
    Partition,
    Promise,
    SignedLink,
    first_link,
    least_group,
    signature_of,
)
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import group_chain
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.codecs.groups_codec import GroupsOffer


def signed_by_all(link: Link, credentials: Iterable[SiloCredentials]) -> SignedLink:
    signatures = sorted((it.silo, signature_of(link, it.identity_key)) for it in credentials if it.silo in link.members)
    return SignedLink(link=link, signatures=tuple(signatures))


def hold_groups(
    silos: Sequence[tuple[SiloFolder, SiloCredentials]],
    groups: Iterable[Iterable[SiloName]] | None = None,
    *,
    rules: PolicyRules | None = None,
    colluders: int = 0,
    others: Sequence[SiloCredentials] = (),
) -> SignedLink:
    """Every silo's people have approved these groups, by default each silo for itself, and all hold them. Peers are
    pinned before.

    `others` are in the groups, and sign them, and hold none.
    """
    everybody = [*(credentials for _, credentials in silos), *others]
    partition = Partition.singletons(it.silo for it in everybody) if groups is None else Partition.of(groups)
    promise = Promise(colluders=colluders, smallest_group=least_group(colluders))
    signed = signed_by_all(first_link(everybody[0].federation, partition, promise), everybody)
    for folder, credentials in silos:
        chain = group_chain(folder, credentials, SiloPolicy(rules=rules or PolicyRules(), silo=credentials.silo))
        chain.take(GroupsOffer(links=(), proposed=SignedLink(link=signed.link), identities=()))
        chain.approve(signed.link.digest.hex())
        chain.take(GroupsOffer(links=(signed,), proposed=None, identities=()))
        assert chain.head == signed.link
    return signed


async def no_newer_groups() -> None:
    """What a test's agent asks where no coordinator has other groups than it holds."""
