"""The silo agent: it trains on one institution's data, and decides alone what leaves."""
