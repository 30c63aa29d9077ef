"""Secure aggregation at the silo: a Mask order in, the protocol's machine, its effects done in their order, the answer
out.

What the machine remembers and journals is durable before anything leaves. The journal of an attempt holds its root
secret, from which everything else that is secret is expanded; `end` erases both. After a restart the journal gives the
same state and the same bytes; where it cannot, the attempt is forfeited.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from lorica_security.errors import IntegrityError, PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.groups.release_groups import Link
from lorica_security.secure_aggregation.keys.key_agreement import ROOT_BYTES, encapsulated
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.messages import MaskedInput, Reveal, SurvivorSet
from lorica_security.secure_aggregation.parameters import Parameters, default_threshold
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import effects as protocol_effects
from lorica_security.secure_aggregation.silo import events as protocol_events
from lorica_security.secure_aggregation.silo import states as protocol_states
from lorica_security.secure_aggregation.silo.machine import step
from lorica_security.secure_aggregation.silo.memory import COORDINATOR, Forgotten
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.own_dealing import shared_keys
from lorica_security.secure_aggregation.silo.resumption import restored
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import CoordinatorPort, MaskedFile, MaskingJournalPort, Progress
from silo_wire.canonical import Digest
from silo_wire.manifest import SCORES_ALONE
from silo_wire.messages import Mask, RoundKey
from silo_wire.plans.masked_ranges import check_ranges
from silo_wire.plans.noised_masks import check_noise_fits
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.work import Work

Unmasks = Callable[[RoundKey, Digest, SurvivorSet, bytes], None]
"""Is told, before a share leaves, of which model's deltas and of which silos a sum will come out, and under which link
of the release groups, by its digest; durable when it returns."""
Masker = Callable[[protocol_effects.MaskVector], Awaitable[MaskedFile]]
"""Encodes and masks the delta of this round into the journal's vector file."""


class Masking:
    """One silo's part in secure aggregation. `party` says who this silo is, whom it trusts and whom it is summed with,
    as of now.

    `newer_groups` fetches release groups that the coordinator has and this silo may not have heard of.
    """

    def __init__(
        self,
        *,
        journal: MaskingJournalPort,
        coordinator: CoordinatorPort,
        party: Callable[[Mask], Party],
        newer_groups: Callable[[], Awaitable[None]],
        unmasks: Unmasks,
    ) -> None:
        self._newer_groups = newer_groups
        self._journal = journal
        self._coordinator = coordinator
        self._party = party
        self._unmasks = unmasks
        self._lock = asyncio.Lock()
        self._state: protocol_states.State | None = None
        self._written: MaskedFile | None = None
        """The masked vector that this process wrote last."""

    @property
    def under_way(self) -> bool:
        """Whether an attempt is, perhaps since an earlier process; one whose journal was damaged is forfeited."""
        try:
            events = self._journal.events()
        except IntegrityError:
            return False
        _erase_roots(events)
        return bool(events)

    def check_memory(self) -> None:
        """Raises PolicyRefusal where this silo does not know any more what it took part in, or which release groups it
        held."""
        self._journal.check()

    def saw(self, bundle: PlanBundle, model: Digest, number: int | None = None) -> None:
        """Note that `model` is one of this plan, which has masks, and the one after round `number`, before anything is
        made of it.

        Raises PolicyRefusal where another one was, or for more than the plan can have.
        """
        self._journal.saw(bundle, model, number)

    def new_vector_file(self) -> Path:
        """Where the masked vector of the attempt is to be written."""
        return self._journal.new_vector_file()

    async def answer(
        self, order: Mask, update: SavedUpdate, bundle: PlanBundle, *, mask: Masker, progress: Progress
    ) -> bool:
        """Take the step that `order` asks for and deliver the answer; whether it was the shares, the last one.

        Raises PolicyRefusal, Conflict, IntegrityError, AuthenticationError or MalformedMessage for an order that this
        silo refuses for good, WrongTime for a stale one, StorageError, and what the coordinator says to the answer.
        """
        async with self._lock:
            party = self._party(order)
            if isinstance(order.message, Roster) and (party.link is None or party.link.digest != order.message.link):
                await self._newer_groups()
                party = self._party(order)
            if order.message is None and not self._is_under_way(order.attempt):
                # what is left of another attempt serves nothing, and the memory is to be that of the disk
                self._erase()
            at = await asyncio.to_thread(self._restored, party)
            if isinstance(order.message, Roster):
                _check_roster(bundle, order.message)
                if party.link is not None:  # without, the machine refuses by a name of its own
                    check_work_of_groups(bundle.plan, party.link)
            event = self._event(order, update, bundle)
            state = at
            try:
                if order.message is None and order.seen is not None:
                    at.memory.check_remembers({COORDINATOR: order.seen})
                state, effects = await asyncio.to_thread(step, at, event, party)
            except Forgotten as forgotten:
                self._journal.forgot(forgotten)
                self._erase()
                self.check_memory()  # says it with the remedy, as from now on
                raise
            finally:
                if isinstance(event, protocol_events.OpenAttempt) and state == at:
                    event.root.erase()  # the attempt is open already, with another one, or is not to be opened
            sent = await self._do(order.key, state, effects, party, mask, progress)
            return isinstance(sent, Reveal)

    async def end(self) -> None:
        """Erase what the attempt left, here and on disk; nothing happens when there is none."""
        async with self._lock:
            self._erase()

    def _event(self, order: Mask, update: SavedUpdate, bundle: PlanBundle) -> protocol_events.Event:
        if order.message is not None:
            return order.message
        layout = SCORES_ALONE if bundle.plan.timetable.is_closing(update.key.round) else bundle.layout
        return protocol_events.OpenAttempt(
            attempt=order.attempt,
            model=bytes.fromhex(update.model),
            tensors=tuple(tensor.elements for tensor in layout.tensors),
            root=Secret(secrets.token_bytes(ROOT_BYTES)),
        )

    def _is_under_way(self, attempt: Attempt) -> bool:
        if self._state is not None:
            return isinstance(self._state, protocol_states.InAttempt) and self._state.attempt == attempt
        events = self._journal.events()
        _erase_roots(events)
        return bool(events) and isinstance(events[0], protocol_events.OpenAttempt) and events[0].attempt == attempt

    def _restored(self, party: Party) -> protocol_states.State:
        if self._state is None:
            memory, events = self._journal.memory(), self._journal.events()
            try:
                self._state, effects = restored(memory, events, party)
            except PolicyRefusal:
                _erase_roots(events)
                self._journal.erase()  # the attempt is forfeited: nobody plays it again
                raise
            for effect in effects:  # an order asks for it again
                if isinstance(effect, protocol_effects.MaskVector):
                    effect.erase()
        return self._state

    async def _do(
        self,
        key: RoundKey,
        state: protocol_states.State,
        effects: tuple[protocol_effects.Effect, ...],
        party: Party,
        mask: Masker,
        progress: Progress,
    ) -> Any:
        """What was sent last. The state is taken over once it is durable, before anything is sent."""
        sent: Any = None
        durable = False
        for effect in effects:
            match effect:
                case protocol_effects.Remember(memory):
                    self._journal.remember(memory)
                case protocol_effects.Journal(event):
                    self._journal.append(event)
                case protocol_effects.Erase(root=root):
                    root.erase()
                    self._state, durable = state, True
                    self._erase()
                case protocol_effects.ShareKeys():
                    self._state, durable = state, True
                    sent = await self._share(key, party, mask, progress)
                case protocol_effects.MaskVector():
                    self._state, durable = state, True
                    sent = await self._mask(key, effect, party, mask, progress)
                case protocol_effects.Send(message):
                    if not durable and not isinstance(state, protocol_states.Resting):
                        self._state, durable = state, True
                    if isinstance(message, Reveal) and isinstance(state, protocol_states.Revealed):
                        self._unmasks(key, Digest(state.opening.model.hex()), state.survivors, state.roster.link)
                    await self._send(key, message, progress)
                    sent = message
        return sent

    async def _share(self, key: RoundKey, party: Party, mask: Masker, progress: Progress) -> Any:
        at = self._restored(party)
        assert isinstance(at, protocol_states.WithRoster), "keys are shared by a roster"
        shared = await asyncio.to_thread(shared_keys, at, party, encapsulated)
        state, effects = step(at, shared, party)
        return await self._do(key, state, effects, party, mask, progress)

    async def _mask(
        self,
        key: RoundKey,
        work: protocol_effects.MaskVector,
        party: Party,
        mask: Masker,
        progress: Progress,
    ) -> Any:
        try:
            written = await mask(work)
        finally:
            work.erase()
        self._journal.keep_manifest(written.manifest)
        self._written = written
        masked = protocol_events.VectorMasked(bytes.fromhex(written.manifest.digest))
        state, effects = step(self._restored(party), masked, party)
        return await self._do(key, state, effects, party, mask, progress)

    async def _send(self, key: RoundKey, message: Any, progress: Progress) -> None:
        if isinstance(message, MaskedInput):
            manifest = self._journal.manifest()
            known = self._written is not None and self._written.manifest == manifest
            await self._coordinator.upload_masked(
                key,
                message,
                manifest,
                self._journal.vector_file,
                mark=self._written.mark if self._written is not None and known else None,
                progress=progress,
            )
        else:
            await self._coordinator.answer_mask(key, message)

    def _erase(self) -> None:
        """Also what this process knows of the memory: the next attempt looks at the disk."""
        if isinstance(self._state, protocol_states.InAttempt):
            self._state.opening.root.erase()
        self._state = None
        self._journal.erase()


def _erase_roots(events: Sequence[protocol_events.Event]) -> None:
    for event in events:
        if isinstance(event, protocol_events.OpenAttempt):
            event.root.erase()


def _check_roster(bundle: PlanBundle, roster: Roster) -> None:
    """Raise PolicyRefusal for a roster that does not keep what the plan says."""
    check_promises(bundle.plan, roster.parameters)
    closing = bundle.plan.timetable.is_closing(roster.attempt.round)
    if bundle.plan.noise_at == "silos" and not closing:
        check_noise_fits(bundle, roster.parameters)
    else:
        check_ranges(bundle, roster.parameters.fixed_point.ranges, closing=closing)


def check_work_of_groups(plan: Plan, link: Link) -> None:
    """Raise PolicyRefusal where the plan has silos of one atom work differently: what groups promise takes equal work
    for granted."""
    for atom in link.atoms:
        works: dict[Work, SiloName] = {}
        for silo in atom:
            works.setdefault(Work.of(plan.training.for_silo(silo)), silo)
        if len(works) > 1:
            one, other, *_ = works.values()
            raise PolicyRefusal(
                "max_work_ratio",
                f"plan {plan.name} has {one} and {other} train differently, and release groups {link.number} never "
                "told them apart: under masks have the operator give both the same [training.overrides]",
            )


def check_promises(plan: Plan, offered: Parameters) -> None:
    """Raise PolicyRefusal for a roster that offers less than the plan, which this silo's people or rules allowed."""
    wanted = plan.aggregation
    for rule, has, promised in (
        ("min_cohort", offered.cohort, plan.smallest_cohort),
        ("min_threshold", offered.threshold, wanted.threshold or default_threshold(offered.cohort)),
        ("min_survivors", offered.min_survivors, wanted.min_survivors),
        ("colluders", offered.colluders, wanted.colluders),
    ):
        if has < promised:
            raise PolicyRefusal(
                rule,
                f"{rule} is {promised} by plan {plan.name}, the roster offers {has}: no roster goes below its plan",
            )
