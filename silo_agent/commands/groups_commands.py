"""`silo-agent groups`: which silos this one is summed with under masks, and its people's word on a change of that."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silo_agent.commands.command_line import Config, Dir, Json, chosen, policy_of, settled_credentials_of, tell_agent
from silo_agent.edges.disk.silo_folder import SiloFolder, silo_folder

if TYPE_CHECKING:
    from pathlib import Path

    from silo_agent.edges.groups.group_chain import CheckedLink, GroupChain
    from silo_agent.edges.keys.key_store import SiloCredentials

groups_app = typer.Typer(
    help="Release groups: the silos that this one is summed with, together or not at all.", no_args_is_help=True
)

Digest = Annotated[
    str, typer.Argument(metavar="DIGEST", help="From `groups show`, all 64 characters.", show_default=False)
]


@groups_app.command()
def show(config: Config = None, directory: Dir = None, as_json: Json = False) -> None:
    """Print the release groups that this silo holds, what is proposed to follow, and what that would let others
    learn."""
    _, _, chain = _chain(directory, config)
    standing = chain.standing()
    if as_json:
        facts = {
            "held": _facts(standing.held),
            "proposed": _facts(standing.proposed),
            "waits_for_people": standing.objection,
            "held_unapproved": [list(one) for one in standing.unapproved],
        }
        print(json.dumps(facts, indent=1))
        return
    if standing.held is None:
        print("this silo holds no release groups: it masks nothing until the first ones stand")
    for title, checked in (("held", standing.held), ("proposed", standing.proposed)):
        if checked is not None:
            print("\n".join(_described(title, checked)))
    if standing.held is not None and standing.unapproved:
        small = "; ".join(", ".join(one) for one in standing.unapproved)
        print(f"this silo masks nothing under the groups that it holds: its people did not approve the small {small}")
        print(f"silo-agent groups approve {standing.held.link.digest.hex()} allows it")
    if standing.objection is not None:
        assert standing.proposed is not None, "an objection is to something"
        digest = standing.proposed.link.digest.hex()
        print(f"waits for this silo's people: {standing.objection}")
        print(f"silo-agent groups approve {digest} allows it")


@groups_app.command()
def approve(digest: Digest, config: Config = None, directory: Dir = None) -> None:
    """Allow the release groups that are proposed, or held, and what they let others learn."""
    from lorica_security.audit.entry import Event
    from silo_agent.edges.accounts.audit_log import audited
    from silo_agent.service.group_keeper import described

    folder, credentials, chain = _chain(directory, config)
    with audited(folder, credentials) as log:
        link, told = chain.approve(_whole(digest))
        log.append(Event.GROUPS_APPROVED, digest=link.digest.hex(), groups=described(link), learnt=told)
    print(f"release groups {link.number} are approved, with this: {told}; {tell_agent(folder)}")


@groups_app.command()
def withdraw(digest: Digest, config: Config = None, directory: Dir = None) -> None:
    """Take back this silo's signature under groups that never came to stand, so that others can be signed in their
    place.

    If they come to stand after all, this silo has signed two successors: it counts as one that colludes.
    """
    from lorica_security.audit.entry import Event
    from silo_agent.edges.accounts.audit_log import audited

    folder, credentials, chain = _chain(directory, config)
    with audited(folder, credentials) as log:
        number = chain.withdraw(whole := _whole(digest))
        log.append(Event.GROUPS_WITHDRAWN, digest=whole, groups=f"number {number}" if number else "no longer here")
    print(f"the signature under release groups {number or whole} is withdrawn; {tell_agent(folder)}")


def _whole(digest: str) -> str:
    from lorica_security.errors import ConfigurationError

    text = digest.lower()
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ConfigurationError(
            f"{digest[:80]!r} is not the whole digest of release groups, 64 of 0-9 and a-f: copy it from "
            "`silo-agent groups show`. Two proposals can be made that begin alike"
        )
    return text


def _chain(directory: "Path | None", config: "Path | None") -> "tuple[SiloFolder, SiloCredentials, GroupChain]":
    from silo_agent.edges.groups.release_groups import group_chain

    folder = silo_folder(directory)
    credentials = settled_credentials_of(folder)
    policy = policy_of(folder, credentials, chosen(folder, None, None, config).settings(folder))
    return folder, credentials, group_chain(folder, credentials, policy)


def _facts(checked: "CheckedLink | None") -> dict[str, Any] | None:
    if checked is None:
        return None
    link = checked.link
    return {
        "number": link.number,
        "digest": link.digest.hex(),
        "groups": [list(group) for group in link.partition.groups],
        "told_apart": [list(atom) for atom in link.atoms],
        "colluders": link.promise.colluders,
        "smallest_group": link.promise.smallest_group,
        "signed_by": list(checked.good),
        "signatures_unchecked": list(checked.unchecked),
        "signatures_false": list(checked.false),
    }


def _described(title: str, checked: "CheckedLink") -> list[str]:
    link, promise = checked.link, checked.link.promise
    by = f"signed by {len(checked.good)}" + (f": {', '.join(checked.good)}" if checked.good else "")
    lines = [
        f"release groups {link.number} ({title}), {link.digest.hex()}",
        f"  against {promise.colluders} colluders, smallest group {promise.smallest_group}; {by}",
    ]
    if checked.unchecked:
        lines.append(f"  not checked, no key is pinned: signatures of {', '.join(checked.unchecked)}")
    if checked.false:
        lines.append(f"  false: signatures of {', '.join(checked.false)}")
    lines += [f"  {', '.join(group)}" for group in link.partition.groups]
    if link.atoms != link.partition.groups:
        lines.append("  told apart over all groups so far:")
        lines += [f"    {', '.join(atom)}" for atom in link.atoms]
    return lines
