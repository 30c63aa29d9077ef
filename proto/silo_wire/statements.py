"""What the two sides sign: statements bound to federation, plan, round and attempt, so that none can be replayed
elsewhere.

A statement is (domain, canonical bytes); `lorica_security.identity.identity_key` signs and verifies it under that
domain.
"""

from silo_wire.canonical import Digest, canonical_json
from silo_wire.messages import RoundKey, TrainingSummary

MODEL_DOMAIN = "round-model"
UPDATE_DOMAIN = "client-update"
TRUST_DOMAIN = "trust-bundle"


def model_statement(*, federation: str, plan: Digest, round_number: int, model: Digest) -> bytes:
    """Signed by the coordinator: this is the model that round `round_number` of the plan made (0: the initial one)."""
    return canonical_json({"federation": federation, "model": model, "plan": plan, "round": round_number})


def update_statement(*, key: RoundKey, silo: str, model: Digest, update: Digest, summary: TrainingSummary) -> bytes:
    """Signed by the silo: this update, with this training summary, was made from `model` for this attempt alone."""
    return canonical_json(
        {
            "attempt": key.attempt,
            "federation": key.federation,
            "model": model,
            "plan": key.plan,
            "round": key.round,
            "silo": silo,
            "summary": {
                "examples": summary.examples,
                "loss_first": summary.loss_first,
                "loss_last": summary.loss_last,
                "loss_max": summary.loss_max,
                "loss_min": summary.loss_min,
                "optimizer_steps": summary.optimizer_steps,
                "seconds": summary.seconds,
            },
            "update": update,
        }
    )


def trust_statement(*, federation: str, trust: bytes, since: int, certificate: bytes) -> bytes:
    """Signed by the coordinator: the trust bundle with this digest is what it accepts, and what whoever holds
    `certificate` should.

    `since`, Unix seconds, is when the bundle took the place of the one before: it rises with each. `certificate` is the
    SHA-256 of the one that goes with it, which is for a key made for this: no answer can be played again.
    """
    return canonical_json(
        {"certificate": certificate.hex(), "federation": federation, "since": since, "trust": trust.hex()}
    )
