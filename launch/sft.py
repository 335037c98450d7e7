r"""Trains a policy to imitate an expert, or the episodes of a run.

    python launch/sft.py --config=configs/alfworld.py:tiny
    python launch/sft.py --config=configs/alfworld.py:tiny --config.sft.epochs=2
    python launch/sft.py --config=configs/alfworld.py:tiny --config.sft.init= \
        --config.sft.data=runs/alfworld-tiny/episodes --workdir=runs/refined

The third command imitates the successful episodes of a run. Writes
WORKDIR/policy, a Hugging Face directory for `--config.model.path`. With
`--config.sft.init= --config.sft.rounds=3` it samples episodes, trains on the
successful ones, and repeats that; round N, from 0, writes
WORKDIR/round-N/policy.
"""

import re

from gigpo_jax.runtime import output
from launch import interrupt

# Fields of RL that fields of the warm start replace.
_REPLACED = {
  'learner.epochs': 'sft.epochs',
  'learner.minibatch_rows': 'sft.minibatch_rows',
  'optimizer.learning_rate': 'sft.learning_rate',
  'optimizer.warmup_updates': 'sft.warmup_updates',
  'optimizer.warmup_ratio': 'sft.warmup_updates',
  'optimizer.decay_updates': 'sft.decay',
  'optimizer.decay': 'sft.decay',
  'optimizer.final_rate': 'sft.decay',
}
# Fields that only RL reads.
_OF_RL = re.compile(
  r'(num_iterations|filter|algorithm(?!\.anchor)|critic|loss(?!\.aggregation)|'
  r'teacher|guard|checkpoint)\b'
)


@interrupt.handle()
@output.handle()
def main() -> None:
  """Parses the flags and trains by imitation."""
  from gigpo_jax.run import config_fields
  from launch import command

  def run(config, workdir: str) -> None:
    # Worker processes import this file again and must not load jax: on a TPU
    # host, jax would claim the chips.
    from gigpo_jax import rejection_sampling, sft

    rounds = config.sft.rounds
    if rounds:
      interrupt.set_outlook(lambda: 'the same command resumes its round')
    train = rejection_sampling.run if rounds else sft.warm_start
    train(config, workdir)

  fields = config_fields.flatten(config_fields.defaults())
  unused = dict.fromkeys(filter(_OF_RL.match, fields), '')
  command.run(run, ending='-sft', replaced=_REPLACED | unused)


if __name__ == '__main__':
  main()
