"""What both programs rest on for security: keys, masks, privacy, audit logs, and the host they run on."""
