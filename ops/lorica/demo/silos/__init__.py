"""The demo's synthetic silos: public, generated, derived from nobody's records."""
