"""Secure aggregation: Bonawitz et al. 2017 (CCS '17), active-adversary variant. The directory listing is the protocol.

    attempt, roster           what is agreed on: one attempt at one round; who takes part, with which keys and parameters
    parameters, fixed_point   numbers that cannot overflow: threshold, cohort; reals to integers mod 2^32 and back
    key_agreement             one root of entropy per silo and attempt; everything secret is expanded from it
    secret_sharing, share_box key shares, their commitments; sealed silo to silo
    mask_stream, counter_mode AES-256-CTR, addressable, expanded and added in blocks that stay in cache
    messages                  what travels
    silo_machine, silo_memory what a silo does and refuses, within one attempt and across attempts
    coordinator_machine       what the coordinator relays, checks and sums

Nothing here does input or output, reads a clock, or draws randomness: entropy and the identity key are arguments.
Python can copy bytes where it likes, so erasing a `Secret` overwrites every buffer that this package owns and no more.
"""
