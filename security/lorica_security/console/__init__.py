"""What commands of both programs show, and the settings files that people edit."""
