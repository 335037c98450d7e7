r"""Evaluates policies on a config's evaluation tasks: table, JSON and plot.

    python launch/evaluate.py --config=configs/alfworld.py:tiny \
        --model=runs/alfworld-tiny/policy --repeats=4
    python launch/evaluate.py --config=configs/alfworld.py:tiny \
        --checkpoint=runs/alfworld-tiny --checkpoint=runs/alfworld-tiny-grpo
    python launch/evaluate.py --config=configs/alfworld.py:tiny \
        --model=runs/alfworld-tiny/policy --config.evaluation.temperature=0

The third command samples greedily. At least one `--model` or `--checkpoint` is
needed. The first policy, checkpoints before models, is compared with each other
policy, task by task. The results of an earlier evaluation in the work directory
are moved to `evaluation.bak`.
"""

from gigpo_jax.runtime import output
from launch import interrupt


@interrupt.handle()
@output.handle()
def main() -> None:
  """Parses the flags and evaluates."""
  from absl import flags

  from launch import command

  models = flags.DEFINE_multi_string(
    'model', [], 'Hugging Face folder, or a name on the hub; may be repeated.'
  )
  checkpoints = flags.DEFINE_multi_string(
    'checkpoint',
    [],
    'Work directory of a run, for its newest checkpoint, or '
    'WORKDIR/checkpoints/ITERATION; may be repeated.',
  )
  repeats = flags.DEFINE_integer(
    'repeats',
    None,
    'Episodes per task; default: evaluation.repeats.',
    lower_bound=1,
  )
  export = flags.DEFINE_string(
    'export',
    '',
    'Folder to which the only --checkpoint is written as Hugging Face files.',
  )

  def run(config, workdir: str) -> None:
    # Worker processes import this file again and must not load jax: on a TPU
    # host, jax would claim the chips.
    from gigpo_jax import evaluation

    config.evaluation.repeats = repeats.value or config.evaluation.repeats
    evaluation.main(
      config,
      workdir,
      models=models.value,
      checkpoints=checkpoints.value,
      export=export.value,
    )

  command.run(run)


if __name__ == '__main__':
  main()
