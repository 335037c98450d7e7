r"""Evaluates a policy on its config's panel, and prints rates as JSON.

python launch/evaluate.py --config=configs/alfworld.py:tiny \
        --config.model.path=runs/alfworld-tiny/policy
"""

if __name__ == '__main__':
  # Here, because worker processes import this file again, and must not load
  # jax: on a TPU host it would seize the chips.
  from gigpo_jax import evaluation
  from launch import command

  command.run(evaluation.main)
