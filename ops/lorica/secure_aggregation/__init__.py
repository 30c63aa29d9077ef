"""Secure aggregation as a library: both state machines, and whole attempts in memory. It imports neither gRPC nor
PyTorch.

The protocol (Bonawitz et al. 2017, against active adversaries) is in ops/docs/secure-aggregation.md. A machine is a
function `step(state, event, ...) -> (state, effects)` without input or output: `silo_machine` and
`coordinator_machine`. `AttemptInMemory` runs both for silos of this process. A mean of four vectors, of which nobody
sees more than the sum:

Examples:
    >>> import numpy as np
    >>> from lorica import secure_aggregation as secagg
    >>> silos = ["bank-a", "bank-b", "hospital-a", "hospital-b"]
    >>> vectors = {silo: np.linspace(-1, 1, 1000) * (number + 1) / 4 for number, silo in enumerate(silos)}
    >>> weights = {"bank-a": 100.0, "bank-b": 200.0, "hospital-a": 300.0, "hospital-b": 400.0}
    >>> terms = secagg.terms_of(silos, elements=1000, largest=1.0, largest_weight=400.0)
    >>> attempt = secagg.AttemptInMemory(silos, terms)
    >>> sent = {
    ...     silo: secagg.masked(attempt.works[silo], vectors[silo], weight=weights[silo])
    ...     for silo in silos
    ... }
    >>> mean = attempt.mean(sent)
    >>> plain = sum(weights[silo] * vectors[silo] for silo in silos) / 1000
    >>> bool(np.abs(mean.vector - plain).max() < 1e-6), round(mean.weight_sum), mean.saturated
    (True, 1000, 0)
"""

from lorica.secure_aggregation.in_memory import AttemptInMemory, Mean, masked, terms_of
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.masked_vectors.fixed_point import Encoder, FixedPoint, Ranges
from lorica_security.secure_aggregation.parameters import NoiseTerms, Parameters, Terms
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo.party import Party

__all__ = [
    "Attempt",
    "AttemptInMemory",
    "Encoder",
    "FixedPoint",
    "Mean",
    "NoiseTerms",
    "Parameters",
    "Partition",
    "Party",
    "Ranges",
    "Terms",
    "coordinator_machine",
    "first_link",
    "masked",
    "silo_machine",
    "terms_of",
]
