"""One training in several processes: what each of them does, and what they tell each other."""
