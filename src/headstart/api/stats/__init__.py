"""What reuse has saved."""
