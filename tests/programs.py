"""Runs commands of the project in a subprocess, as a user does."""

import importlib.metadata
import os
import pathlib
import subprocess

import gigpo_jax

# XLA flags that reduce compile time to a third. Results are equally accurate;
# the programs run more slowly.
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
if not importlib.metadata.version('jaxlib').startswith('0.10.'):
  # Later versions lack the second flag. Below the default level, equal rows of
  # other batches differ in their last bits.
  QUICK = ''
PROJECT = pathlib.Path(gigpo_jax.__file__).parents[1]


def run(
  command: list[str],
  folder: pathlib.Path = PROJECT,
  *,
  timeout: float = 400,
  **variables: str,
) -> str:
  """Runs a command, which must succeed; returns its output."""
  done = subprocess.run(
    command,
    cwd=folder,
    env=os.environ | variables,
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout
