"""Checks of the loss of a config."""

from collections.abc import Iterator

import ml_collections

from configs import variants
from gigpo_jax import losses
from gigpo_jax.run import config_fields

# A bound that hardly ever clips ratios of rows, which are means over tokens.
_WIDE_CLIP = 0.05


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option that the loss rejects or does not have."""
  try:
    loss = losses.of_section(config.loss.to_dict())
  except ValueError as error:
    yield from (f'loss.{problem}' for problem in str(error).splitlines())
    return
  unknown = set(loss.columns) - set(losses.TRAINING_COLUMNS)
  if unknown:
    yield (
      f'loss.name={config.loss.name}: reads {", ".join(sorted(unknown))}; '
      f'must read only {", ".join(losses.TRAINING_COLUMNS)}'
    )
  if 'importance' not in loss.columns:
    for field, value, off in config_fields.non_default(
      config, ('rollout.carry_over', 'loss.tis_clip')
    ):
      yield (
        f'{field}={value}: loss.name={config.loss.name} does not read '
        f'importance weights; must be {off}'
      )
      break  # carry_over needs tis_clip.
  yield from _options_of_losses(config)


def without_effect(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option that has hardly any effect.

  They are not refused, because presets set them.
  """
  loss, own = config.loss, losses.options_of(config.loss.name)
  has_rows = 'ratio_level' in own and loss.ratio_level == 'row'
  is_wide = loss.surrogate == 'clipped' and loss.clip_epsilon >= _WIDE_CLIP
  # A preset of the algorithm may have the clip of its paper.
  is_chosen = 'loss.ratio_level' not in variants.preset_fields(config)
  if has_rows and is_wide and is_chosen:
    yield (
      f'loss.clip_epsilon={loss.clip_epsilon}: hardly ever clips the ratios of '
      'loss.ratio_level=row, which are means over tokens; GSPO has 3e-4 for '
      'long responses, SAMPO 3e-3 for turns'
    )
  is_clamped = loss.kl_clamp is not None
  if is_clamped and config.reward.kl_weight and not loss.kl_weight:
    yield (
      f'loss.kl_clamp={loss.kl_clamp}: has no effect with loss.kl_weight=0; '
      'reward.kl_weight has no clamp'
    )


def _options_of_losses(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a target that adapts no single KL, and options of other losses."""
  own = losses.options_of(config.loss.name)
  in_loss = 'kl_weight' in own and config.loss.kl_weight > 0
  in_reward = config.reward.kl_weight > 0
  target = config.loss.kl_target
  if target is not None and in_loss == in_reward:
    yield (
      f'loss.kl_target={target}: adapts one KL; needs either loss.kl_weight or '
      'reward.kl_weight above 0'
    )
  # Configs of environments set kl_weight for any loss.
  ignored = losses.all_options() - own - {'kl_target', 'kl_weight'}
  fields = [
    f'loss.{option}.weight'
    if isinstance(config.loss[option], ml_collections.ConfigDict)
    else f'loss.{option}'
    for option in sorted(ignored)
  ]
  for field, value, default in config_fields.non_default(config, fields):
    if value:
      yield (
        f'{field}={value}: loss.name={config.loss.name} has no such option; '
        f'must be {default}'
      )
