r"""Advise whether a run's data support step advantages (GiGPO) or not (GRPO).

    python -m gigpo_jax.tools.advise runs/alfworld --law=law.json

Reads the metrics of a run's first iterations and prints the numbers that the
advice depends on. Some statements hold for any run:

- If no step shares its anchor (`advantage/singleton_anchor_rows` is 1), A_S is
  0 and GiGPO is GRPO.
- If all groups have zero variance, A_E is 0 and GRPO learns nothing.
- The correlation of the advantages of GRPO, A_E, and of GiGPO, A_E + w A_S,
  follows from the standard deviations and the correlation of A_E and A_S. At 1
  both methods differ only in a factor and a constant.

Whether the difference helps is an empirical question. `--law` names a file of
`python -m gigpo_jax.tools.law fit`, which predicts GiGPO - GRPO from runs in
other settings. Without it, the advice is limited to these statements.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from gigpo_jax import algorithms, metrics
from gigpo_jax.runtime import files, output
from gigpo_jax.tools import law as law_lib

# Further metrics that the statements use.
_METRICS = {
  'advantage/zero_variance_groups': 'zero-variance groups',
  'advantage/episode_std': 'standard deviation of A_E',
  'advantage/step_std': 'standard deviation of A_S',
}
_DIGITS = 3


def first_iterations(
  lines: Sequence[Mapping[str, float]], count: int
) -> dict[str, float]:
  """Returns the mean of each metric over a run's first iterations.

  Metrics that no line has are absent.

  Args:
    lines: lines of `metrics.read`.
    count: number of iterations.
  """
  found = {}
  for name in (*law_lib.PREDICTORS, *_METRICS):
    values = [line[name] for line in lines[:count] if name in line]
    values = [v for v in values if v is not None and math.isfinite(v)]
    if values:
      found[name] = float(np.mean(values))
  return found


def correlation_with_sum(correlation: float, ratio: float) -> float:
  """Returns the correlation of x and x + y.

  Args:
    correlation: of x and y.
    ratio: standard deviation of y, divided by that of x.
  """
  length = 1 + 2 * correlation * ratio + ratio**2
  if length <= 0:
    return 0.0
  value = (1 + correlation * ratio) / math.sqrt(length)
  return min(max(value, -1.0), 1.0)  # Rounding can exceed the interval.


def statements(
  values: Mapping[str, float], step_weight: float, episode_weight: float = 1.0
) -> list[str]:
  """Returns what follows from the metrics, without a law.

  Args:
    values: means over the first iterations.
    step_weight: the weight of A_S; 0: nothing is said about its effect.
    episode_weight: the weight of A_E.
  """
  lines = []
  singletons = values.get('advantage/singleton_anchor_rows')
  if singletons == 1:
    lines.append('no step shares its anchor: A_S is 0, GiGPO equals GRPO')
  elif singletons is not None:
    lines.append(
      f'A_S is 0 in at least {singletons:.1%} of steps, the singletons'
    )
  if values.get('advantage/zero_variance_groups') == 1:
    lines.append('A_E is 0 in all steps: GRPO learns nothing')
  if values.get('train/success_rate') == 0:
    lines.append(
      'no episode succeeded: unless the environment has partial rewards, no '
      'method of this kind learns more than to avoid invalid actions'
    )
  spread = values.get('advantage/episode_std', 0.0)
  if spread and step_weight and 'advantage/correlation' in values:
    similarity = values['advantage/correlation']
    words = 'without A_E'
    if episode_weight:
      weight = step_weight / episode_weight
      ratio = weight * values.get('advantage/step_std', 0.0) / spread
      similarity = correlation_with_sum(similarity, ratio)
      words = f'w A_S is {ratio:.2f} times as large as A_E, with w={weight:g}'
    lines.append(
      f'correlation of the advantages of GRPO and GiGPO: {similarity:.3f} '
      f'({words})'
    )
    if round(similarity, _DIGITS) == 1:
      lines.append(
        'GiGPO and GRPO differ only in the size of their steps: tune '
        'optimizer.learning_rate instead'
      )
  return lines


def advise(
  values: Mapping[str, float], law: law_lib.Law | None
) -> tuple[str, list[str]]:
  """Returns the advice and the numbers of the law that it uses.

  Args:
    values: means over the first iterations.
    law: a fitted law, if any.

  Raises:
    ValueError: in one line, if the law is not about one method, or if the run
      lacks a predictor.
  """
  if values.get('advantage/singleton_anchor_rows') == 1:
    return 'grpo: GiGPO equals it here', []
  if law is None:
    return (
      'not known: these numbers alone do not decide, and --law gives no law; '
      'train both on a few seeds and tasks that you do not report',
      [],
    )
  if law.method == law_lib.BEST:
    raise ValueError(
      '--law: predicts the gain of the best of several methods, which is no '
      'method to run; must be the law of one'
    )
  law_lib.check_predictors({'the run': values}, law.coefficients)
  effect, half = law.predict(values), law.half_width
  low, high = effect - half, effect + half
  numbers = [
    law_lib.describe(law),
    f'here: {effect:+.1f} points, 95 % [{low:+.1f}, {high:+.1f}]',
  ]
  if outside := law.outside(values):
    numbers.append(f'outside the range of the law: {", ".join(outside)}')
  if outside or law.error >= law.constant_error or low <= 0 <= high:
    return 'not known: the law does not decide', numbers
  name = law.method if low > 0 else law_lib.BASELINE
  return f'{name}: the interval excludes 0', numbers


@output.handle()
def main(argv: Sequence[str] | None = None) -> int:
  """Prints numbers and advice; returns 2 on errors."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('run', help='work directory of launch/train.py')
  parser.add_argument('--law', help='file of `gigpo_jax.tools.law fit`')
  parser.add_argument('--iterations', type=int, default=10, help='default 10')
  options = parser.parse_args(argv)
  try:
    if options.iterations < 1:
      raise ValueError(f'--iterations={options.iterations}: must be at least 1')
    folder = pathlib.Path(options.run)
    lines = metrics.read(folder) if folder.is_dir() else []
    # The last line may have an evaluation only.
    lines = [line for line in lines if 'train/success_rate' in line]
    values = first_iterations(lines, options.iterations)
    if 'train/success_rate' not in values:
      raise ValueError(
        f'{options.run}: has no metrics of an iteration; must be the work '
        'directory of a run'
      )
    law = law_lib.Law.read(options.law) if options.law else None
    advice, numbers = advise(values, law)
    numbers = statements(values, *_weights(folder)) + numbers
  except ValueError as error:
    sys.stderr.write(f'{error}\n')
    return 2
  print(f'means over {min(len(lines), options.iterations)} iterations:')
  for name, words in (law_lib.PREDICTORS | _METRICS).items():
    if name in values:
      print(f'  {words}: {values[name]:.3f} ({name})')
  print('\n'.join(numbers))
  print(f'advice: {advice}')
  return 0


def _weights(folder: pathlib.Path) -> tuple[float, float]:
  """Returns the weights of A_S and A_E in a run's config; 1 if not given."""
  path = folder / 'config.json'
  stored = files.read_stored(path) if path.is_file() else {}
  options = stored.get('algorithm') or {}
  if not isinstance(options, dict):
    raise ValueError(f'{path}: its algorithm is {options!r}, no section')
  default = 1.0
  if 'name' in options:
    algorithm = algorithms.of_section(options)
    default = getattr(algorithm, 'default_episode_weight', default)
  step, episode = (options.get(f'{n}_weight') for n in ('step', 'episode'))
  return 1.0 if step is None else step, default if episode is None else episode


if __name__ == '__main__':
  sys.exit(main())
