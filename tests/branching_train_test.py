"""Training runs with branches: resume, counts and what is trained on."""

import math

import programs
import pytest
import small_runs

# Requests of a lockstep rollout are decoded together in the same way.
FLAGS = (
  '--config.num_iterations=2',
  '--config.evaluation.every=0',
  '--config.checkpoint.every=1',
  '--config.rollout.schedule=lockstep',
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize('name', ['arpo', 'tree_grpo'])
def test_a_killed_run_with_branches_ends_the_same(tmp_path, name):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  for workdir in (whole, parts):
    command = small_runs.small(workdir, *FLAGS, variant=f'smoke,{name}')
    if workdir == parts:
      # In the second iteration, after the roots.
      moment = (
        'run.collection:collect@2,branching:next_starts,sampler:Sampler.step@2'
      )
      small_runs.interrupt(moment, command)
    programs.run(command)
  small_runs.assert_same_end(parts, whole)
  _check_lines(small_runs.read_lines(whole), small_runs.read_episodes(whole))


def _check_lines(lines: list[dict], episodes: list[dict]) -> None:
  """Compares the metrics of a run with its episodes."""
  env_steps = tokens = 0
  for line in lines:
    played = [e for e in episodes if e['iteration'] == line['iteration']]
    assert [(e['group'], e['member']) for e in played] == [
      (g, m) for g in range(2) for m in range(4)
    ]
    steps = [s for e in played for s in e['steps'] if not s['is_last']]
    # Turns that repeat those of another episode are not trained on.
    new = [s for s in steps if not math.isnan(s['advantage'])]
    assert line['branching/repeated_steps'] == len(steps) - len(new) > 0
    assert line['branching/new_steps'] == len(new)
    assert line['update/count'] > 0
    assert line['update/tokens'] == sum(len(s['log_probs']) for s in new)
    env_steps += len(steps)
    tokens += line['update/tokens']
    assert line['spent/env_steps'] == env_steps
    assert line['spent/tokens'] == tokens
