"""What a model is trained for: how a silo's lines are read, what the model is told, which answers are right."""
