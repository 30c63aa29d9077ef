"""The coordinator's handlers, one file a phase of the protocol, and the checks and drop-outs that all phases share."""
