import pytest

from gigpo_jax.tools import equal_cost


def run(name, seed, steps, success, kl):
  """Returns evaluations of a run at its start, middle and end."""
  return [
    {
      'experiment': 'shop',
      'name': name,
      'seed': seed,
      'iteration': 10 * n,
      'spent/episodes': 80 * n,
      'spent/env_steps': steps[n],
      'spent/tokens': 10 * steps[n],
      'eval/success_rate': success[n],
      'ratio/kl': kl if n else None,
    }
    for n in range(3)
  ]


def test_differences_interpolate_the_longer_run():
  short = run('gigpo', 0, [0, 400, 800], [0.2, 0.4, 0.6], 3e-5)
  long = run('grpo', 0, [0, 500, 1000], [0.2, 0.3, 0.5], 1e-5)
  # 800 steps are 3/5 of the second half: 30 + 0.6 * 20 = 42 %.
  pair = {0: short}, {0: long}
  steps = equal_cost.differences(*pair, 'spent/env_steps')
  assert steps == pytest.approx([60 - 42])
  tokens = equal_cost.differences(*pair, 'spent/tokens')
  assert tokens == pytest.approx([60 - 42])
  episodes = equal_cost.differences(*pair, 'spent/episodes')
  assert episodes == pytest.approx([10])
  # The other way round, the sign changes.
  back = equal_cost.differences(*reversed(pair), 'spent/env_steps')
  assert back == pytest.approx([42 - 60])


def test_table_has_the_seeds_of_both_methods():
  evaluations = [
    *run('grpo', 0, [0, 500, 1000], [0.2, 0.3, 0.5], 1e-5),
    *run('grpo', 1, [0, 500, 1000], [0.2, 0.3, 0.5], 9e-5),
    *run('gigpo', 0, [0, 400, 800], [0.2, 0.4, 0.6], 3e-5),
    *run('gigpo', 7, [0, 400, 800], [0.2, 0.4, 0.9], 9e-5),
    *run('lone', 7, [0, 400, 800], [0.2, 0.4, 0.9], 9e-5),
  ]
  table = equal_cost.table(evaluations, 'grpo').splitlines()
  assert table[2:] == [
    '| shop | gigpo | 1 | -20.0 % | 10.0 | 18.0 | 18.0 | 3 |'
  ]
  # A method whose metrics lack the KL.
  for line in evaluations[6:]:
    line['ratio/kl'] = None
  table = equal_cost.table(evaluations, 'grpo').splitlines()
  assert 'kl' not in table[0] and table[2].endswith('| 18.0 | 18.0 |')
