"""The coordinator at work: one loop around the round machine, and what the edges call.

federation   what a silo and the operator may ask for     round_loop  event -> step -> persist -> effects -> acknowledge
uploads      updates on their way in                      enrolment   invitations, and silos that accept them
attendance   which agents are connected                   standing    the status that the operator reads
journal      log lines and metrics of each transition     ports       what the edges must provide
"""
