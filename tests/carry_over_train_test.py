"""A training run with groups that wait: resume, records and tokens."""

import numpy as np
import programs
import pytest
import small_runs

# Requests of a lockstep rollout are always decoded together in the same way,
# so that their log-probs, and the importance weights, are equal in every bit.
FLAGS = (
  '--config.num_iterations=5',
  '--config.evaluation.every=2',
  '--config.checkpoint.every=1',
  '--config.rollout.schedule=lockstep',
  '--config.rollout.carry_over=2',
  '--config.loss.tis_clip=2.0',
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_with_waiting_groups_ends_the_same(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  programs.run(small_runs.small(whole, *FLAGS))
  for moment in (
    'checkpoint:_write_manifest+',  # All groups wait, in the first iteration.
    'run.collection:collect@2,sampler:Sampler.step@3',
    'learner:Learner.update@2',
  ):
    small_runs.interrupt(moment, small_runs.small(parts, *FLAGS))
  programs.run(small_runs.small(parts, *FLAGS))
  small_runs.assert_same_end(parts, whole)
  found, expected = map(small_runs.read_episodes, (parts, whole))
  np.testing.assert_equal(found, expected)
  _check_lines(small_runs.read_lines(whole), expected)


def _check_lines(lines: list[dict], episodes: list[dict]) -> None:
  """Compares the metrics of a run with its episodes."""
  # Six turns, two in an iteration: the first two iterations train on nothing.
  assert [line.get('update/count') for line in lines[:3]] == [0, 0, 1]
  assert {e['iteration'] for e in episodes} == {2, 3, 4}
  for line in lines[2:5]:
    played = [e for e in episodes if e['iteration'] == line['iteration']]
    assert sorted({e['group'] for e in played}) == list(range(len(played) // 4))
    steps = [s for e in played for s in e['steps'] if not s['is_last']]
    assert line['update/tokens'] == sum(len(s['log_probs']) for s in steps)
    assert line['carry/staleness_max'] == 2
    assert 0 < line['carry/staleness_mean'] < line['carry/staleness_max']
