"""A training run: set-up, state, logs, and checks of its work directory."""
