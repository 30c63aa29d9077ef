"""What secure aggregation needs of the folder: who this silo is in it, and its checks of round models."""
