"""Secure aggregation: Bonawitz et al. 2017 (CCS '17), active-adversary variant. The directory listing is the protocol.

    attempt, roster    what is agreed on: one attempt at one round; who takes part, with which keys and parameters
    parameters         numbers that cannot overflow: threshold, cohort, fixed point
    messages           what travels
    dealings           how what was dealt is checked, on both sides
    silo               what a silo does and refuses: machine is the table, phases the handlers
    coordinator        what the coordinator relays, checks and sums: likewise
    keys               one root of entropy per silo and attempt; keys, key shares, their commitments, sealed boxes
    masked_vectors     reals to integers mod 2^32 and back; AES-256-CTR masks, added in blocks that stay in cache
    groups             release groups, and the chain of their changes
    model_evidence     what shows a silo that a model came from the sums that it knows

Nothing here does input or output, reads a clock, or draws randomness: entropy and the identity key are arguments.
Python can copy bytes where it likes, so erasing a `Secret` overwrites every buffer that this package owns and no more.
"""
