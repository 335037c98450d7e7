"""What to set instead of methods and values of verl, TRL and Tunix.

docs/running.md lists these trainers' names of options.
"""

import re
from collections.abc import Mapping

# Methods that are options here.
_OPTIONS = {
  'cispo': (
    'CISPO has the options loss.surrogate=cispo, loss.clip_epsilon=1 and '
    'loss.clip_epsilon_high'
  ),
  'dapo': (
    'DAPO has the options filter.drop_zero_variance=True, '
    'loss.clip_epsilon_high=0.28 and loss.kl_weight=0'
  ),
  'gspo': (
    'GSPO has the options loss.ratio_level=row, '
    'loss.aggregation=sequence_mean, loss.clip_epsilon=3e-4 and '
    'loss.clip_epsilon_high=4e-4'
  ),
}


def _are(values: Mapping[str, str]) -> dict[str, str]:
  return {name: f'{name} is {here}' for name, here in values.items()}


# Words that are no variants and no algorithms.
METHODS = _OPTIONS | _are(
  {
    'gae': 'ppo',
    'reinforce_plus_plus': 'reinforce_pp',
    'reinforce_plus_plus_baseline': 'reinforce_pp_baseline',
  }
)
_VALUES = {
  'algorithm.name': METHODS,
  'algorithm.norm': _are(
    {
      'group': 'mean_std',
      'mean_norm': 'mean',
      'mean_std_norm': 'mean_std',
      'none': 'mean',
    }
  ),
  'loss.aggregation': _are(
    {
      'bnpo': 'token_mean',
      'cispo': 'loss.surrogate=cispo with token_mean',
      'dapo': 'token_mean',
      'dr_grpo': 'fixed_length',
      'grpo': 'sequence_mean',
      'seq-mean-token-mean': 'sequence_mean',
      'seq-mean-token-sum': 'sequence_sum',
      'seq-mean-token-sum-norm': 'fixed_length',
      'sequence-mean-token-mean': 'sequence_mean',
      'token-mean': 'token_mean',
    }
  ),
  'loss.kl_estimator': _are(
    {
      'kl': 'k1, whose gradient is 0 on average',
      'low_var_kl': 'k3',
      'mse': 'k2',
      'mse_kl': 'k2',
    }
  ),
  'loss.name': _OPTIONS
  | dict.fromkeys(
    ('dr_grpo', 'grpo', 'ppo'), 'algorithms are variants, such as :grpo'
  ),
  'loss.ratio_level': _are(
    {'gspo-token': 'row', 'sequence': 'row', 'sequence_token': 'row'}
  ),
  'reward.kl_estimator': _are({'kl': 'k1', 'low_var_kl': 'k3', 'mse': 'k2'}),
}


def add_hint(problem: str) -> str:
  """Returns an error of a config, with the answer to another trainer's value.

  Args:
    problem: a line such as `loss.aggregation=dapo: unknown; must be ...`.
  """
  match = re.match(r'([\w.]+)=([^:]*): unknown', problem)
  hint = match and _VALUES.get(match[1], {}).get(match[2])
  if not hint:
    return problem
  return problem.replace('; must be', f'; {hint}; must be', 1)
