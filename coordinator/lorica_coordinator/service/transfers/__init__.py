"""Models on their way out, updates on their way in, and receipts for what arrived."""
