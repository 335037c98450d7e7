"""Small training runs and what they write."""

import json
import pathlib
import signal
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import preloaded
import safetensors.numpy

from gigpo_jax import episodes, metrics
from gigpo_jax.tools import metric_list

# Smaller than the smoke variant: the path is what is tested.
SMALL = (
  '--config.num_iterations=3',
  '--config.rollout.groups=2',
  '--config.rollout.episodes_per_group=4',
  '--config.rollout.batch_buckets=(8,)',
  '--config.rollout.prompt_buckets=(320,)',
  '--config.learner.length_buckets=(360,)',
  '--config.evaluation.num_tasks=8',
  '--config.evaluation.every=3',
  '--config.env.max_steps=6',
  '--config.episodes.every=1',
)


def command(script: str, *flags: str) -> list[str]:
  return [sys.executable, f'launch/{script}.py', *flags]


def small(workdir: pathlib.Path, *flags: str, variant: str = 'smoke'):
  return command(
    'train',
    f'--config=configs/alfworld.py:{variant}',
    f'--workdir={workdir}',
    *SMALL,
    *flags,
  )


def read_lines(workdir: pathlib.Path) -> list[dict]:
  """The metrics of a run, without what is another each time."""
  path = workdir / 'metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  unlisted = {k for line in lines for k in line if not metric_list.find(k)} - {
    'iteration'
  }
  assert not unlisted, f'add to gigpo_jax/tools/metric_list.py: {unlisted}'
  return [
    {
      k: v
      for k, v in line.items()
      if not k.startswith(metrics.NONDETERMINISTIC)
    }
    for line in lines
  ]


def read_episodes(workdir: pathlib.Path) -> list[dict]:
  return list(episodes.open_dataset(workdir / 'episodes'))


def read_policy(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  return safetensors.numpy.load_file(workdir / 'policy' / 'model.safetensors')


def read_state(workdir: pathlib.Path) -> dict:
  """Parameters and optimizer of the newest checkpoint, in float32."""
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(newest_checkpoint(workdir) / 'state')


def newest_checkpoint(workdir: pathlib.Path) -> pathlib.Path:
  found = (workdir / 'checkpoints').iterdir()
  return max(
    (p for p in found if p.name.isdecimal()), key=lambda p: int(p.name)
  )


def assert_same_end(found: pathlib.Path, expected: pathlib.Path) -> None:
  """Compares two runs bit for bit."""
  lines = read_lines(found)
  assert [line['iteration'] for line in lines] == list(range(len(lines)))
  assert lines == read_lines(expected)
  assert read_policy(found).keys() == read_policy(expected).keys()
  jax.tree.map(
    np.testing.assert_array_equal, read_policy(found), read_policy(expected)
  )
  saved = read_state(expected)
  assert len(jax.tree.leaves(saved)) > len(read_policy(expected))
  jax.tree.map(np.testing.assert_array_equal, read_state(found), saved)


def interrupt(
  moment: str, command: list[str], status: int = -signal.SIGKILL
) -> str:
  """Runs a command until it gets a signal at a moment; returns its output."""
  python, *rest = command
  process = preloaded.Process([python, 'tests/moments.py', moment, *rest])
  out, errors = process.communicate(timeout=400)
  assert process.returncode == status, f'{moment}: {out}{errors}'
  return errors + out


def stopped_run(workdir: pathlib.Path, *flags: str) -> str:
  """Runs until the run stops with an error; returns its line."""
  process = preloaded.Process(small(workdir, *flags))
  out, errors = process.communicate(timeout=400)
  assert process.returncode == 1, out + errors
  assert len(errors.splitlines()) == 1, errors
  return errors
