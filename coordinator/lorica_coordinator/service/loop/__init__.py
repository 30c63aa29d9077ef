"""The one place that moves the round machine: event in, step, persist, effects, acknowledge."""
