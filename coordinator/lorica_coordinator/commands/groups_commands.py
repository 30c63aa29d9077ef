"""`coordinator groups`: which silos are summed with whom under masks, and the next partition, which the silos sign."""

import json
from typing import Annotated

import typer

from lorica_coordinator.commands.command_line import AsJson, Dir, reach, say
from lorica_security.errors import ConfigurationError
from silo_wire.v1 import operator_pb2
from silo_wire.v1 import secure_aggregation_pb2 as secure_pb2

groups_app = typer.Typer(
    help="Release groups: which silos enter a masked sum together or not at all.", no_args_is_help=True
)


@groups_app.command()
def show(directory: Dir = None, as_json: AsJson = False) -> None:
    """Show the release groups that stand, and what is proposed to follow."""
    _print(reach(directory).ask(lambda stub: stub.GetGroups(operator_pb2.GetGroupsRequest())), as_json)


@groups_app.command()
def propose(
    groups: Annotated[
        list[str], typer.Argument(metavar="SILO,SILO,SILO ...", help="Each group: its silos, joined by commas.")
    ],
    colluders: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10_000,
            help="Silos that may sign two successors, at most; default: as the groups that stand, else 0.",
            show_default=False,
        ),
    ] = None,
    smallest_group: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_002,
            help="No group is of fewer silos, and sets of fewer are for people to allow; default: as the groups "
            "that stand, at least colluders + 2 and 3. 1 and 2 are for groups that small: the promise is as by "
            "default then.",
            show_default=False,
        ),
    ] = None,
    directory: Dir = None,
    as_json: AsJson = False,
) -> None:
    """Propose release groups; they stand once the silos have signed them."""
    wanted = [secure_pb2.ReleaseGroup(silos=_silos(group)) for group in groups]
    request = operator_pb2.ProposeGroupsRequest(groups=wanted, colluders=colluders, smallest_group=smallest_group)
    reached = reach(directory)
    reply = reached.ask(lambda stub: stub.ProposeGroups(request))
    _print(reply, as_json)
    status = reached.ask(lambda stub: stub.GetStatus(operator_pb2.GetStatusRequest()))
    enrolled = {silo.silo for silo in status.silos if silo.state not in ("invited", "revoked")}
    out = sorted(enrolled - {silo for group in groups for silo in _silos(group)})
    if out and not as_json:
        say(
            f"enrolled, and in none of the proposed groups: {', '.join(out)}; what these silos train is in no "
            "masked sum then"
        )


@groups_app.command(name="take-back")
def take_back(
    digest: Annotated[
        str,
        typer.Argument(
            metavar="DIGEST",
            help="All 64 characters, as people of several silos read them out from `silo-agent groups show`.",
            show_default=False,
        ),
    ],
    directory: Dir = None,
) -> None:
    """Where no release groups stand, as after a restore, take those back from silos that lead to the ones named.

    Ask the people of several silos which they hold: what one silo gives back alone may be of its own making.
    """
    whole = digest.lower()
    if len(whole) != 64 or set(whole) - set("0123456789abcdef"):
        raise ConfigurationError(
            f"{digest[:80]!r} is not the whole digest of release groups, 64 of 0-9 and a-f: have people of several "
            "silos read out what `silo-agent groups show` says they hold"
        )
    request = operator_pb2.TakeGroupsBackRequest(digest=bytes.fromhex(whole))
    reach(directory).ask(lambda stub: stub.TakeGroupsBack(request))
    print("the next silo that holds these release groups gives them back: `coordinator groups show` has them then")


def _silos(text: str) -> list[str]:
    silos = sorted(name.strip() for name in text.split(","))
    if not all(silos):
        raise ConfigurationError(f"{text!r} names no silo between two commas: write a release group as a,b,c")
    return silos


def _print(reply: operator_pb2.GroupsStanding, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_value(reply), indent=1))
        return
    if not reply.HasField("standing"):
        say("no release groups stand: nothing is summed under masks")
    for title, signed, digest in (
        ("stand", reply.standing, reply.standing_digest),
        ("proposed", reply.proposed, reply.proposed_digest),
    ):
        if signed.groups.number:
            number, signatures = signed.groups.number, len(signed.signatures)
            say(f"release groups {number} ({title}), {digest.hex()}")
            say(
                f"  against {signed.groups.colluders} colluders, smallest group "
                f"{signed.groups.smallest_group}, signed by {signatures}:"
            )
            for group in signed.groups.groups:
                say(f"  {', '.join(group.silos)}")
    if reply.needed:
        say(f"{reply.needed} more signatures are needed, of: {', '.join(reply.missing)}")
        say("read the digest to the silos' people: it is the one that `silo-agent groups show` prints to them")


def _value(reply: operator_pb2.GroupsStanding) -> dict[str, object]:
    def link(signed: secure_pb2.SignedGroups, digest: bytes) -> dict[str, object] | None:
        if not signed.groups.number:
            return None
        return {
            "number": signed.groups.number,
            "digest": digest.hex(),
            "groups": [list(group.silos) for group in signed.groups.groups],
            "atoms": [list(atom.silos) for atom in signed.groups.atoms],
            "colluders": signed.groups.colluders,
            "smallest_group": signed.groups.smallest_group,
            "signed_by": [one.silo for one in signed.signatures],
        }

    return {
        "standing": link(reply.standing, reply.standing_digest),
        "proposed": link(reply.proposed, reply.proposed_digest),
        "missing": list(reply.missing),
        "needed": reply.needed,
    }
