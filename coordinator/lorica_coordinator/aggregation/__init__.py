"""How updates become one mean delta, as pure arithmetic: weights, clipped sums, the server's step."""
