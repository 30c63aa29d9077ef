"""The round machine: pure values and one transition table. No clock, no I/O; `now` comes with the event (events.py).

terms      what the machine needs to know of a plan      states   where a plan stands
events     what can happen                               effects  what must be recorded and done
machine    (state, event) -> (state, effects)            phases   the handlers, one file a phase
cohorts    who is in a round                             orders   what each silo should do now
scores, updates                                          the arithmetic and values between them
"""
