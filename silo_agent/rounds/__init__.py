"""What a silo does when, without doing it: events in, effects out (DESIGN section 1). No I/O and no clock here."""
