r"""GRPO, GiGPO and the best method with 0.1B parameters, on a GPU.

    python launch/sft.py --config=configs/alfworld.py:small
    python launch/sweep.py --sweep=configs/sweeps/tuning_small.py \
        --workdir=runs/tuning_small --at_once=6
    python launch/sweep.py --sweep=configs/sweeps/small.py \
        --workdir=runs/small --at_once=5

`--at_once` is for 80 GB of memory. The final policies play 512 unseen
games. The rates are in configs/alfworld.py. An iteration of a run takes seven
seconds of an H100, so the nine runs and their tests take about eight minutes
(estimated).
"""

METHODS = {'grpo': ',grpo', 'gigpo': '', 'g2po': ',g2po'}
SEEDS = range(3)
EXPERIMENT = 'alfworld small'
ITERATIONS = 5


def fields(iterations: int) -> dict[str, int]:
  """Returns the fields of a run, which is evaluated at its start and end.

  These evaluations only complete the table; tests have more games.
  """
  return {
    'num_iterations': iterations,
    'checkpoint.every': iterations,
    'evaluation.every': iterations,
    'evaluation.num_tasks': 32,
    # For several runs on a GPU.
    'learner.microbatch_tokens': 10_880,
  }


RUNS = [
  {
    'experiment': EXPERIMENT,
    'name': name,
    'config': f'configs/alfworld.py:small{word}',
    'seed': seed,
    'overrides': fields(ITERATIONS),
    'test': {'evaluation.num_tasks': 512, 'rollout.batch_buckets': (512,)},
  }
  for seed in SEEDS
  for name, word in METHODS.items()
]
