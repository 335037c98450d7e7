"""A training run that rolls back: restored states and resume."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import programs
import pytest
import small_runs

# Every iteration raises an alarm, because its responses are longer than half
# of those of the first iteration.
FLAGS = (
  '--config.evaluation.every=0',
  '--config.checkpoint.every=2',
  '--config.checkpoint.keep=3',
  '--config.rollout.schedule=lockstep',
  '--config.guard.action=rollback',
  '--config.guard.max_response=0.5',
  '--config.guard.start_iterations=1',
  '--config.guard.max_rollbacks=2',
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_that_rolls_back_ends_the_same(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  output = programs.run(small_runs.small(whole, *FLAGS))
  for moment in (
    'run.rollback:restore+',  # Nothing is saved yet.
    'run.rollback:restore@2',
  ):
    small_runs.interrupt(moment, small_runs.small(parts, *FLAGS))
  programs.run(small_runs.small(parts, *FLAGS))
  small_runs.assert_same_end(parts, whole)
  lines = small_runs.read_lines(whole)
  assert [line['guard/rollbacks'] for line in lines] == [1, 2, 2]
  assert [line['guard/step_scale'] for line in lines] == [0.5, 0.25, 0.125]
  assert 'rolled back to the initial policy' in output
  assert 'rolled back to the checkpoint of iteration 0' in output
  # Other episodes are played, from the same state, which is not updated.
  assert lines[0]['train/episode_length'] != lines[1]['train/episode_length']
  with ocp.StandardCheckpointer() as reader:
    states = [
      reader.restore(whole / 'checkpoints' / str(n) / 'state')['policy']
      for n in range(3)
    ]
  jax.tree.map(np.testing.assert_array_equal, *states[:2])
  first, second, third = (int(state['updates']) for state in states)
  assert first == second == 0 < third
