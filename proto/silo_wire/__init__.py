"""What the two sides say to each other: messages, plans, models, and the bytes that they are on the wire."""
