"""How silos check that a round model is what the last masked sum made of the model before."""
