"""Held-out panels: every task once, rates with 95 % intervals.

The panel is fixed (the first tasks of a split) and so are its random streams,
so two checkpoints are compared on the same games and the same noise.
"""

import json
from collections.abc import Callable

import jax
import ml_collections

from envs import base
from gigpo_jax import config as config_lib
from gigpo_jax import experiment, hosts, metrics, rollout, sampler


def evaluate(
  roller: rollout.Roller,
  params: dict,
  panel: list[base.Task],
  *,
  sampling: sampler.Sampling,
  kind: Callable[[base.Task], str],
) -> dict[str, float]:
  """Returns success and lengths of a policy on a panel, names 'eval/...'.

  A task whose environment broke off counts as failed, and is counted beside.
  """
  with hosts.bar(total=len(hosts.share(len(panel))), desc='evaluation') as bar:
    trajectories = roller.collect(
      params,
      panel,
      episodes_per_group=1,
      stream=(rollout.EVALUATION, 0),
      sampling=sampling,
      kind=kind,
      on_finished=bar.update,
    )
  low, high = metrics.wilson(
    sum(t.success for t in trajectories), len(trajectories)
  )
  return metrics.summarize(trajectories, prefix='eval') | {
    'eval/success_low': low,
    'eval/success_high': high,
    'eval/episodes': float(len(trajectories)),
  }


def main(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Evaluates `model.path` on the config's panel; prints one JSON object.

  Raises:
    ValueError: in one line a problem, if the config cannot work.
  """
  del workdir  # Evaluation leaves nothing behind.
  config_lib.validate(config)
  hosts.join()
  policy = experiment.make_policy(config)
  with jax.set_mesh(policy.mesh), experiment.make_pool(config) as pool:
    rates = evaluate(
      experiment.make_roller(config, policy, pool),
      policy.load(),
      experiment.make_panel(config),
      sampling=experiment.make_sampling(config, evaluation=True),
      kind=experiment.make_kind(config),
    )
  hosts.say(json.dumps(rates, indent=2, sort_keys=True))
