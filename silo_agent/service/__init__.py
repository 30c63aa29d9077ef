"""The one loop of the agent: event in -> machine.step -> journal -> effects."""
