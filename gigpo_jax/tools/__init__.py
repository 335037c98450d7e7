"""Commands around runs: viewer, comparison, sweeps, TPU compilation."""
