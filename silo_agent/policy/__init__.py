"""What this silo refuses, whatever the coordinator says: the rules of `[policy]`, and what each plan and upload is held
to."""
