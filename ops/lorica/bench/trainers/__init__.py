"""Plain training beside Hugging Face's trainer."""
