"""A training run with continuations: resume and counts."""

import programs
import pytest
import small_runs

# Requests of a lockstep rollout are decoded together in the same way.
FLAGS = (
  '--config.num_iterations=2',
  '--config.evaluation.every=0',
  '--config.checkpoint.every=1',
  '--config.rollout.schedule=lockstep',
  '--config.algorithm.continuations=2',
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_with_continuations_ends_the_same(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  for workdir in (whole, parts):
    command = small_runs.small(workdir, *FLAGS, variant='smoke,vineppo')
    if workdir == parts:
      moment = 'run.collection:estimate_state_values@2,sampler:Sampler.step@3'
      small_runs.interrupt(moment, command)
    programs.run(command)
  small_runs.assert_same_end(parts, whole)
  played = small_runs.read_episodes(whole)
  assert played
  lines = small_runs.read_lines(whole)
  totals = dict.fromkeys(('env_steps', 'tokens'), 0.0)
  for line in lines:
    episodes = [e for e in played if e['iteration'] == line['iteration']]
    steps = [s for e in episodes for s in e['steps'] if not s['is_last']]
    assert 0 < line['continuations/states'] <= len(steps)
    assert line['continuations/env_steps'] > 2 * len(steps)
    assert line['update/count'] > 0
    totals['env_steps'] += len(steps) + line['continuations/env_steps']
    totals['tokens'] += sum(len(s['log_probs']) for s in steps)
    totals['tokens'] += line['continuations/tokens']
    for name, total in totals.items():
      assert line[f'spent/{name}'] == total
