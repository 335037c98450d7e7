"""alfworld."""
