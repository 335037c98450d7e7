"""GiGPO's advantages in a trainer that is not ours.

    python examples/other_trainer.py

Many trainers take a list of samples, dicts with an advantage each. `annotate`
is all that they need of this project: it turns rewards, groups and states into
advantages. The rest of this file stands for such a trainer: a policy in Flax,
an update with optax, episodes in the corridor of `envs/toy.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import gigpo_jax
from envs import base, toy

WORDS = ('<action>left</action>', '<action>right</action>')
ROOMS, MAX_STEPS, MEMBERS = 6, 12, 8


def annotate(samples: list[dict], **options) -> None:
  """Adds GiGPO's advantage to each sample, as `advantage`.

  Args:
    samples: one a turn, in any order: `reward`, `task` (its episodes are
      compared), `episode`, `turn`, `state` (any text; turns of a task with the
      same one are compared) and `valid`.
    **options: of `gigpo_jax.advantages.gigpo`.
  """

  def column(name: str) -> list:
    return [sample[name] for sample in samples]

  def numbers(name: str) -> np.ndarray:
    return np.unique(column(name), return_inverse=True)[1]

  found = gigpo_jax.advantages.gigpo(
    column('reward'),
    numbers('task'),
    numbers('episode'),
    column('turn'),
    numbers('state'),
    column('valid'),
    **options,
  )
  for sample, advantage in zip(samples, np.asarray(found), strict=True):
    sample['advantage'] = float(advantage)


class Policy(nn.Module):
  """Logits of two actions in each room."""

  @nn.compact
  def __call__(self, rooms: jax.Array) -> jax.Array:
    """Returns [..., 2]."""
    return nn.Embed(ROOMS, 2, embedding_init=nn.initializers.zeros)(rooms)


def play(params: dict, iteration: int) -> list[dict]:
  """Returns the turns of a group of episodes for each of four tasks."""
  dice = np.random.default_rng(iteration)
  table = np.asarray(jax.nn.softmax(Policy().apply(params, jnp.arange(ROOMS))))
  samples = []
  for index in range(4):
    for member in range(MEMBERS):
      env = toy.Env(rooms=ROOMS, max_steps=MAX_STEPS)
      seen = env.reset(base.Task('train', index))
      for turn in range(MAX_STEPS):
        room = int(seen.text.split()[4])
        action = int(dice.random() < table[room, 1])
        result = env.step(WORDS[action])
        samples.append(
          {
            'task': index,
            'episode': member,
            'turn': turn,
            'state': seen.anchor,
            'room': room,
            'action': action,
            'log_prob': np.log(table[room, action]),
            'reward': result.reward,
            'valid': result.valid,
            'success': result.success,
          }
        )
        if result.done:
          break
        seen = result.observation
  return samples


def loss(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
  """Returns the clipped objective, the mean over turns."""
  logits = jax.nn.log_softmax(Policy().apply(params, batch['room']))
  log_probs = jnp.take_along_axis(logits, batch['action'][:, None], 1)[:, 0]
  return gigpo_jax.losses.clipped_surrogate(
    log_probs - batch['log_prob'], batch['advantage']
  ).mean()


def main(num_iterations: int = 20, **options) -> list[float]:
  """Trains; returns the success rate of each iteration."""
  params = Policy().init(jax.random.key(0), jnp.zeros(1, int))
  optimizer = optax.adam(0.1)
  state, rates = optimizer.init(params), []
  for iteration in range(num_iterations):
    samples = play(params, iteration)
    annotate(samples, **options)
    batch = {
      name: jnp.asarray([sample[name] for sample in samples])
      for name in ('room', 'action', 'log_prob', 'advantage')
    }
    batch['log_prob'] = batch['log_prob'].astype(jnp.float32)
    updates, state = optimizer.update(jax.grad(loss)(params, batch), state)
    params = optax.apply_updates(params, updates)
    rates.append(sum(s['success'] for s in samples) / (4 * MEMBERS))
    print(f'iteration {iteration}: success {rates[-1]:.0%}')
  return rates


if __name__ == '__main__':
  main()
