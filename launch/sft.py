"""Warm start: imitates an expert, `python launch/sft.py --config=...`.

With `--config.sft.data=RUN/episodes` a run's episodes, the successful ones.
Writes WORKDIR/policy, a Hugging Face directory for `--config.model.path`.
"""

if __name__ == '__main__':
  # Here, because worker processes import this file again, and must not load
  # jax: on a TPU host it would seize the chips.
  from gigpo_jax import sft
  from launch import command

  command.run(sft.warm_start, ending='-sft')
