r"""Evaluates policies on a config's panel: a table, JSON and a picture.

    python launch/evaluate.py --config=configs/alfworld.py:tiny \
        --model=runs/alfworld-tiny/policy --repeats=4
    python launch/evaluate.py --config=configs/alfworld.py:tiny \
        --checkpoint=runs/alfworld-tiny --checkpoint=runs/alfworld-tiny-grpo
    python launch/evaluate.py --config=configs/alfworld.py:tiny \
        --model=runs/alfworld-tiny/policy --config.evaluation.temperature=0

The third is greedy. At least one `--model` or `--checkpoint` is needed. The
first of several, checkpoints before models, is compared with each of the others
task by task.
"""

if __name__ == '__main__':
  from absl import flags

  from launch import command

  _MODELS = flags.DEFINE_multi_string(
    'model', [], 'Hugging Face folder, or a name on the hub; may be repeated.'
  )
  _CHECKPOINTS = flags.DEFINE_multi_string(
    'checkpoint',
    [],
    'Work directory of a run, of which the newest is taken, or '
    'WORKDIR/checkpoints/ITERATION; may be repeated.',
  )
  _REPEATS = flags.DEFINE_integer('repeats', 1, 'Episodes of a task.')

  def main(config, workdir: str) -> None:
    """Evaluates."""
    # Here, because worker processes import this file again, and must not load
    # jax: on a TPU host it would seize the chips.
    from gigpo_jax import evaluation

    evaluation.main(
      config,
      workdir,
      models=_MODELS.value,
      checkpoints=_CHECKPOINTS.value,
      repeats=_REPEATS.value,
    )

  command.run(main)
