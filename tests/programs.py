"""Runs the project's commands as a user does."""

import os
import pathlib
import subprocess

import gigpo_jax

# Flags of XLA with which compiling takes a third of the time; programs are as
# right, and slower.
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
PROJECT = pathlib.Path(gigpo_jax.__file__).parents[1]


def run(
  command: list[str],
  folder: pathlib.Path = PROJECT,
  *,
  timeout: float = 400,
  **variables: str,
) -> str:
  """Returns what a command prints; it must succeed."""
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
