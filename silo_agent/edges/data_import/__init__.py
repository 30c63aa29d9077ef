"""`silo-agent import`: data as people have it (CSV, TSV, JSON, Parquet, Arrow, Spider, BIRD) becomes a silo's data
folder."""
