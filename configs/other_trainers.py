"""What to set instead of fields, methods and values of verl, TRL and Tunix.

docs/running.md lists these trainers' names of options.
"""

import re
from collections.abc import Mapping

# Methods that are options here.
_OPTIONS = {
  'cispo': (
    'CISPO has the options loss.surrogate=cispo, loss.clip_epsilon=1 and '
    'loss.clip_epsilon_high'
  ),
  'dapo': (
    'DAPO has the options filter.drop_zero_variance=True, '
    'loss.clip_epsilon_high=0.28 and loss.kl_weight=0'
  ),
  'gspo': (
    'GSPO has the options loss.ratio_level=row, '
    'loss.aggregation=sequence_mean, loss.clip_epsilon=3e-4 and '
    'loss.clip_epsilon_high=4e-4'
  ),
}


def _are(values: Mapping[str, str]) -> dict[str, str]:
  return {name: f'{name} is {here}' for name, here in values.items()}


# Words that are no variants and no algorithms.
METHODS = _OPTIONS | _are(
  {
    'gae': 'ppo',
    'reinforce_plus_plus': 'reinforce_pp',
    'reinforce_plus_plus_baseline': 'reinforce_pp_baseline',
  }
)
_VALUES = {
  'algorithm.name': METHODS,
  'algorithm.norm': _are(
    {
      'batch': 'algorithm.name=reinforce_pp_baseline',
      'group': 'mean_std',
      'mean_norm': 'mean',
      'mean_std_norm': 'mean_std',
      'none': 'mean',
    }
  ),
  'loss.aggregation': _are(
    {
      'bnpo': 'token_mean',
      'cispo': 'loss.surrogate=cispo with token_mean',
      'dapo': 'token_mean',
      'dr_grpo': 'fixed_length',
      'grpo': 'sequence_mean',
      'seq-mean-token-mean': 'sequence_mean',
      'seq-mean-token-sum': 'sequence_sum',
      'seq-mean-token-sum-norm': 'fixed_length',
      'sequence-mean-token-mean': 'sequence_mean',
      'token-mean': 'token_mean',
    }
  ),
  'loss.kl_estimator': _are(
    {
      'kl': 'k1, whose gradient is 0 on average',
      **dict.fromkeys(('k1+', 'k3+'), 'k2, whose gradient it has'),
      'low_var_kl': 'k3',
      'mse': 'k2',
      'mse_kl': 'k2',
    }
  ),
  'loss.name': _OPTIONS
  | dict.fromkeys(
    ('dr_grpo', 'grpo', 'ppo'), 'algorithms are variants, such as :grpo'
  ),
  'loss.ratio_level': _are(
    {'gspo-token': 'row', 'sequence': 'row', 'sequence_token': 'row'}
  ),
  'reward.kl_estimator': _are({'kl': 'k1', 'low_var_kl': 'k3', 'mse': 'k2'}),
}

# Their names of fields.
FIELDS = {
  'adv_estimator': 'algorithm.name',
  'beta': 'loss.kl_weight',
  'clip_ratio': 'loss.clip_epsilon',
  'clip_ratio_c': 'loss.dual_clip',
  'clip_ratio_high': 'loss.clip_epsilon_high',
  'critic_warmup': 'critic.warmup_iterations',
  'delta': 'loss.dual_clip',
  'enable_gradient_checkpointing': 'model.remat',
  'enable_similarity': 'algorithm.anchor',
  'env_name': 'env.name',
  'entropy_coef': 'loss.entropy_weight',
  'entropy_coeff': 'loss.entropy_weight',
  'epsilon': 'loss.clip_epsilon',
  'epsilon_high': 'loss.clip_epsilon_high',
  'eval_on_start': 'evaluation.every',
  'eval_steps': 'evaluation.every',
  'gamma': 'algorithm.discount',
  'generation_batch_size': 'rollout.groups',
  'grad_clip': 'optimizer.max_grad_norm',
  'gradient_accumulation_steps': 'learner.microbatch_tokens',
  'gradient_checkpointing': 'model.remat',
  'group_size': 'rollout.episodes_per_group',
  'importance_sampling_level': 'loss.ratio_level',
  'invalid_action_penalty_coef': 'algorithm.invalid_penalty',
  'iterations': 'num_iterations',
  'kl_coef': 'reward.kl_weight',
  'kl_loss_coef': 'loss.kl_weight',
  'kl_loss_mode': 'loss.kl_estimator',
  'kl_loss_type': 'loss.kl_estimator',
  'lam': 'algorithm.gae_lambda',
  'log_completions': 'episodes.every',
  'logger': 'metrics.wandb',
  'lora_rank': 'lora.rank',
  'loss_agg_mode': 'loss.aggregation',
  'loss_algo': 'loss.ratio_level',
  'loss_type': 'loss.aggregation',
  'lr': 'optimizer.learning_rate',
  'lr_scheduler_type': 'optimizer.decay',
  'lr_warmup_steps': 'optimizer.warmup_updates',
  'mask_truncated_completions': 'filter.select',
  'max_actor_ckpt_to_keep': 'checkpoint.keep',
  'max_completion_length': 'rollout.max_completion_tokens',
  'max_num_gen_batches': 'filter.max_refills',
  'max_prompt_length': 'rollout.max_prompt_tokens',
  'max_response_length': 'rollout.max_completion_tokens',
  'mode': 'algorithm.norm',
  'model': 'model.path',
  'model_name_or_path': 'model.path',
  'n': 'rollout.episodes_per_group',
  'num_epochs': 'num_iterations',
  'num_generations': 'rollout.episodes_per_group',
  'num_train_epochs': 'num_iterations',
  'peft_config': 'lora.rank',
  'per_device_train_batch_size': 'learner.microbatch_tokens',
  'ppo_epochs': 'learner.epochs',
  'ppo_micro_batch_size_per_gpu': 'learner.microbatch_tokens',
  'ppo_mini_batch_size': 'learner.minibatch_rows',
  'report_to': 'metrics.wandb',
  'resources_per_worker': 'pool.num_workers',
  'reward_funcs': 'reward.functions',
  'reward_weights': 'reward.function_weights',
  'rollout_data_dir': 'episodes.every',
  'save_freq': 'checkpoint.every',
  'save_steps': 'checkpoint.every',
  'save_total_limit': 'checkpoint.keep',
  'scale_rewards': 'algorithm.norm',
  'similarity_thresh': 'algorithm.similarity_threshold',
  'step_advantage_w': 'algorithm.step_weight',
  'tensor_model_parallel_size': 'rollout.tensor',
  'test_freq': 'evaluation.every',
  'total_epochs': 'num_iterations',
  'total_training_steps': 'num_iterations',
  'train_batch_size': 'rollout.groups',
  'use_kl_in_reward': 'reward.kl_weight',
  'use_kl_loss': 'loss.kl_weight',
  'val_batch_size': 'evaluation.num_tasks',
  'val_before_train': 'evaluation.every',
  'vllm_importance_sampling_clip_max': 'loss.tis_clip',
  'vllm_importance_sampling_clip_min': 'filter.mismatch_low',
  'vllm_tensor_parallel_size': 'rollout.tensor',
  'warmup_steps': 'optimizer.warmup_updates',
}


def add_hint(problem: str) -> str:
  """Returns an error of a config, with the answer to another trainer's value.

  Args:
    problem: a line such as `loss.aggregation=dapo: unknown; must be ...`.
  """
  match = re.match(r'([\w.]+)=([^:]*): unknown', problem)
  hint = match and _VALUES.get(match[1], {}).get(match[2])
  if not hint:
    return problem
  return problem.replace('; must be', f'; {hint}; must be', 1)
