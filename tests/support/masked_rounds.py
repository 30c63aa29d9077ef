"""The round machine in a masked round, with real silo machines that answer its orders."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lorica_coordinator.rounds.effects import Effect
from lorica_coordinator.rounds.events import Event, MaskAnswered
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.orders import order_for
from lorica_coordinator.rounds.states import Masking, State
from lorica_security.errors import LoricaError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import states as silo_states
from silo_wire.messages import Mask
from tests.support.rounds import FEDERATION, LINK, T0, A, B, C, after, enrolled, masking_opened, ready, started, trained
from tests.support.rounds import IDLE as NOBODY
from tests.support.secagg_federation import SIZES, Silo, entropy, identities, identity_key

D = SiloName("clinic-d")
SILOS = (A, B, C, D)


def silo(name: SiloName) -> Silo:
    party = silo_party.Party(
        federation=FEDERATION,
        silo=name,
        identity_key=identity_key(name),
        pinned=identities(SILOS),
        link=LINK,
        approved=frozenset(LINK.atoms),
    )
    return Silo(party)


class MaskedRounds:
    """A plan whose round 1 is open to `SILOS`; `now` stands still unless a test moves it."""

    def __init__(self, **terms: Any) -> None:
        fields = {"min_silos": 3, "evaluate_every": 0, "evaluate_last": False, "start_when_ready": True}
        secure = {"secure_aggregation": True, "masking_deadline_s": 30.0}
        self.now = T0
        self.silos = {name: silo(name) for name in SILOS}
        self.effects: list[Effect] = []
        self.state: State = after(replace(NOBODY, population=frozenset()), *(enrolled(name) for name in SILOS))
        self.happen(started(**{**fields, **secure, **terms}), *(ready(name) for name in SILOS))

    def happen(self, *events: Event) -> None:
        for event in events:
            self.state, effects = step(self.state, event)
            self.effects += effects

    def train(self, *silos: SiloName) -> None:
        model = self.state.course.model  # type: ignore[union-attr]
        self.happen(*(trained(name, self.key, model=model, now=self.now) for name in silos or SILOS))

    def open(self, silos: Sequence[SiloName] | None = None, **terms: Any) -> None:
        assert isinstance(self.state, Masking)
        of = {"silos": tuple(silos or self.state.silos), "model": self.state.course.model, "now": self.now}
        self.happen(masking_opened(self.key, **{**of, **terms}))

    @property
    def key(self) -> Any:
        return self.state.key  # type: ignore[union-attr]

    @property
    def phase(self) -> str:
        """The protocol's phase."""
        assert isinstance(self.state, Masking)
        assert self.state.secure is not None
        return self.state.secure.state.phase

    def order(self, name: SiloName) -> Any:
        return order_for(self.state, name, self.now)

    def answers_of(self, name: SiloName) -> list[Any]:
        """What the silo would send now; nothing when nothing is asked of it."""
        order = self.order(name)
        if not isinstance(order, Mask):
            return []
        if order.message is not None:
            return self.silos[name].take(order.message)
        if isinstance(at := self.silos[name].state, silo_states.InAttempt) and at.attempt != order.attempt:
            self.silos[name].take(silo_events.AttemptEnded(at.attempt))
        root = Secret(entropy("root", name, order.attempt.id.hex()))
        return self.silos[name].take(
            silo_events.OpenAttempt(attempt=order.attempt, model=bytes.fromhex(order.model), tensors=SIZES, root=root)
        )

    def answer(self, *names: SiloName) -> None:
        """Each of them answers what it is asked now."""
        key = self.key
        answers = [answer for name in names for answer in self.answers_of(name)]
        for answer in answers:
            self.happen(MaskAnswered(now=self.now, key=key, answer=answer))

    def until(self, phase: str) -> None:
        """All answer until the protocol is in `phase`."""
        while self.phase != phase:
            self.answer(*(name for name in SILOS if isinstance(self.order(name), Mask)))

    def run(self) -> None:
        """All answer until nothing is masked any more."""
        while isinstance(self.state, Masking):
            self.answer(*(name for name in SILOS if isinstance(self.order(name), Mask)))

    def taken(self, kind: type[Any]) -> list[Any]:
        """The effects of one kind since the last time."""
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return found

    def refused(self, event: Event, error: type[LoricaError]) -> None:
        before = self.state
        try:
            step(self.state, event)
        except error:
            assert self.state == before
        else:
            raise AssertionError(f"{type(event).__name__} was taken")
