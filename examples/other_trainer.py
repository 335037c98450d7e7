"""Use GiGPO's advantages in another trainer.

    python examples/other_trainer.py

Many trainers take a list of samples, dictionaries with one advantage each. Only
`annotate` uses this project: it computes advantages from rewards, groups and
states. The rest of this file is such a trainer: a Flax policy, an optax update,
and episodes in the corridor of `envs/toy.py`.
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
    samples: one dictionary per turn, in any order, with `reward`, `task`
      (episodes of a task are compared), `episode`, `turn`, `state` (any text;
      turns of a task in the same state are compared) and `valid`.
    **options: options of `gigpo_jax.advantages.gigpo`.
  """
  # Each number of rows compiles a kernel, so there are powers of two only.
  padding = (1 << (len(samples) - 1).bit_length()) - len(samples)

  def column(name: str) -> np.ndarray:
    return np.pad([sample[name] for sample in samples], (0, padding))

  def ids(name: str, fill: int = 0) -> np.ndarray:
    values = [sample[name] for sample in samples]
    index = np.unique(values, return_inverse=True)[1]
    return np.pad(index, (0, padding), constant_values=fill)

  advantages = gigpo_jax.advantages.gigpo(
    column('reward'),
    ids('task', fill=-1),  # Marks padding.
    ids('episode'),
    column('turn'),
    ids('state'),
    column('valid'),
    **options,
  )
  advantages = np.asarray(advantages)[: len(samples)]
  for sample, advantage in zip(samples, advantages, strict=True):
    sample['advantage'] = float(advantage)


class Policy(nn.Module):
  """Logits of two actions in each room."""

  @nn.compact
  def __call__(self, rooms: jax.Array) -> jax.Array:
    """Returns [..., 2]."""
    return nn.Embed(ROOMS, 2, embedding_init=nn.initializers.zeros)(rooms)


def play(params: dict, iteration: int) -> list[dict]:
  """Plays a group of episodes for each of four tasks; returns all turns."""
  rng = np.random.default_rng(iteration)
  table = np.asarray(jax.nn.softmax(Policy().apply(params, jnp.arange(ROOMS))))
  samples = []
  for index in range(4):
    for member in range(MEMBERS):
      env = toy.Env(rooms=ROOMS, max_steps=MAX_STEPS)
      observation = env.reset(base.Task('train', index))
      for turn in range(MAX_STEPS):
        room = int(observation.text.split()[4])
        action = int(rng.random() < table[room, 1])
        result = env.step(WORDS[action])
        samples.append(
          {
            'task': index,
            'episode': member,
            'turn': turn,
            'state': observation.anchor,
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
        observation = result.observation
  return samples


def loss(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
  """Returns the clipped surrogate loss, averaged over turns."""
  logits = jax.nn.log_softmax(Policy().apply(params, batch['room']))
  log_probs = jnp.take_along_axis(logits, batch['action'][:, None], 1)[:, 0]
  return gigpo_jax.losses.clipped_surrogate(
    log_probs - batch['log_prob'], batch['advantage']
  ).mean()


def main(num_iterations: int = 20, **options) -> list[float]:
  """Trains the policy; returns the success rate of each iteration."""
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
