"""Models of this silo's own: trained here, scored beside the global model, kept here; nothing of them leaves."""
