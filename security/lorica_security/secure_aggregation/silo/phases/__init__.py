"""The silo's handlers, one file a phase of the protocol, and the rules and keys that several of them use."""
