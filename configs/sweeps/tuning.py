r"""Tunes the learning rate of each method over the same three values.

    python launch/sweep.py --sweep=configs/sweeps/tuning.py \
        --workdir=runs/tuning

Uses seed 100 and tasks that no other table uses. The best rate has the highest
mean success over the evaluations after the start; the last evaluation breaks
ties.
"""

from collections.abc import Mapping, Sequence

from configs.sweeps import credit, main

RATES = (7.5e-5, 1.5e-4, 3e-4)
SPLITS = {'alfworld': 'valid_seen', 'webshop': 'valid'}


def runs(
  methods: Mapping[str, str],
  splits: Mapping[str, str],
  rates: Sequence[float] = RATES,
  seeds: Sequence[int] = (100,),
  fields: Mapping[str, int] | None = None,
) -> list[dict]:
  """Returns a run for each seed, environment, method and rate.

  Args:
    methods: word in the config's variant, by method.
    splits: evaluated split, by environment.
    rates: the learning rates.
    seeds: the seeds, of which no other table has runs.
    fields: further config fields.
  """
  return [
    {
      'experiment': env,
      'name': f'{method} {rate:g}',
      'config': credit.config_of(env, word),
      'seed': seed,
      'overrides': {
        'optimizer.learning_rate': rate,
        'evaluation.split': split,
        **(fields or {}),
      },
    }
    for seed in seeds
    for env, split in splits.items()
    for method, word in methods.items()
    for rate in rates
  ]


RUNS = runs(main.METHODS | {'g2po': ',g2po'}, SPLITS)
RUNS += runs(
  {name: f',{name}' for name in ('graphgpo', 'pgpo', 'gagpo', 'ecpo', 'hgpo')},
  SPLITS,
)
# Below the smallest rates that were selected.
RUNS += runs({'grpo': ',grpo'}, SPLITS, [3.75e-5])
RUNS += runs({'gigpo': ''}, {'webshop': 'valid'}, [3.75e-5])
