"""Play for the warm start of Gymnasium's MountainCarContinuous."""

import numpy as np

from envs import base


def demonstrate(
  observation: base.Observation, noise: float, rng: np.random.Generator
) -> str:
  """Returns a push of random strength in the direction of the motion.

  Args:
    observation: its last number is the speed's bin of six; bins from 3 are to
      the right.
    noise: probability of a random direction.
    rng: source of the strength and of the noise.
  """
  strength, is_random, coin = rng.random(3)
  speed = int(observation.text.split()[-1])
  is_right = coin < 0.5 if is_random < noise else speed >= 3
  return f'<action>{strength if is_right else -strength:.1f}</action>'
