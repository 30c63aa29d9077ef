"""Lorica: federated fine-tuning of one text-to-SQL model among institutions that may not share data."""
