"""Models and updates of one plan on disk: who holds them, how much room they take, how one is exported."""
